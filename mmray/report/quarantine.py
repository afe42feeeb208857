"""The rows that were set aside, for the report: how many for which reason, and some of them with their pictures.

A prepared set keeps no picture of a row that it refused; the picture is looked up in the source, where that is still
there and the picture can be decoded.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import Any

from mmray.config.mixture import parse_mixture
from mmray.data.formats.detect import Chosen, source_of
from mmray.data.formats.rows import BadRow, row_of
from mmray.data.formats.source import Item, Source, SourceChanged
from mmray.data.images.files import read_picture
from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.images.thumbnail import thumbnail_of
from mmray.data.prepare.leakage import LEAKS, SHOWN
from mmray.data.store.manifest import MANIFEST, QUARANTINE
from mmray.errors import MmrayError
from mmray.report.run import read_json, read_lines
from mmray.storage.remote_path import Folder, folder_at
from mmray.storage.storage import Place

SECONDS = 5.0  # at most, to look for the pictures in the source
CHUNK_ROWS = 512
LOOKED_AT = 100_000  # lines of leaks.jsonl


@dataclass
class Aside:
    """One row that was set aside; `picture` is a data URI, or None where it cannot be opened any more."""

    key: str
    source: str  # file:line
    stage: str
    reason: str
    detail: str
    picture: str | None = None


@dataclass(frozen=True)
class Quarantine:
    """Rows of the prepared set and of the run that were set aside."""

    num_read: int = 0  # rows of the source, 0 where that is not known
    reasons: list[tuple[str, int]] = field(default_factory=list)  # the most frequent first
    shown: list[Aside] = field(default_factory=list)
    leakage: dict[str, Any] = field(default_factory=dict)  # the manifest's summary, where it was looked for
    leaks: list[dict[str, Any]] = field(default_factory=list)  # lines of leaks.jsonl that have pictures

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.reasons)


def quarantine_of(run: Folder, prepared: str | None) -> Quarantine:
    """What was set aside when the set was prepared (of several that were mixed, the first), and in training since."""
    place = folder_at(parse_mixture(prepared)[0][0]) if prepared else None
    manifest = read_json(place / MANIFEST) if place else {}
    entries = list(read_lines(run / QUARANTINE))
    reasons: Counter[str] = Counter("in training" for _ in entries)
    by_reason: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in chain(entries, read_lines(place / QUARANTINE) if place else ()):
        reason = "in training" if entry.get("stage") == "train" else str(entry.get("reason"))
        if reason != "in training":
            reasons[reason] += 1
        if len(by_reason[reason]) < SHOWN:  # a set may have set aside millions
            by_reason[reason].append(entry)
    shown = [_aside(entry) for entry in _in_turn(by_reason.values())][:SHOWN]
    about, settings = manifest.get("source") or {}, manifest.get("settings") or {}
    if shown and place and about.get("format"):
        chosen = Chosen(about["format"], about["folder"], about["file"])
        columns = {ours: theirs for ours, _, theirs in (each.partition("=") for each in settings.get("columns") or ())}
        template = str(settings.get("caption") or "")
        _find_pictures(shown, source_of(chosen, Place(str(place)), columns, template), Place(chosen.address))
    leaks = [line for line in islice(read_lines(place / LEAKS), LOOKED_AT) if line.get("pictures")] if place else []
    num_read, found = int(manifest.get("num_read") or 0), manifest.get("leakage") or {}
    return Quarantine(num_read, reasons.most_common(), shown, found, leaks[:SHOWN] if found else [])


def _in_turn(lists: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One of each reason, then the second of each, and so on."""
    return [entry for turn in zip_longest(*lists) for entry in turn if entry is not None]


def _aside(entry: dict[str, Any]) -> Aside:
    in_training = entry.get("stage") == "train"
    return Aside(
        key=str(entry.get("key") or ""),
        source=str(entry.get("source") or ""),
        stage=str(entry.get("stage") or ""),
        reason="in training" if in_training else str(entry.get("reason") or ""),
        detail=str(entry.get("reason" if in_training else "detail") or ""),
    )


def _find_pictures(rows: list[Aside], source: Source, place: Place) -> None:
    """Pictures of these rows by where they came from, as far as the source is still there and they can be opened."""
    wanted: dict[str, list[Aside]] = defaultdict(list)
    for row in rows:
        wanted[row.source].append(row)
    until = time.monotonic() + SECONDS
    try:
        with closing(SandboxedDecoder()) as sandbox:
            for item in chain.from_iterable(source.read(chunk) for chunk in source.scan(CHUNK_ROWS, ())):
                for row in wanted.pop(item.origin, ()):
                    row.picture = _picture(place, item, sandbox)
                if not wanted or time.monotonic() > until:
                    return
    except (OSError, ValueError, SourceChanged, MmrayError):
        return  # the source is gone, or another one stands in its place: the rows are told without pictures


def _picture(place: Place, item: Item, sandbox: SandboxedDecoder) -> str | None:
    if isinstance(item.values, BadRow):
        return None
    try:
        data = read_picture(place, row_of(item.values, item.origin).images[0])
    except (OSError, ValueError):  # BadRow among them: often the very reason it was set aside
        return None
    return thumbnail_of(data, sandbox)
