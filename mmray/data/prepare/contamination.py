"""Holds a set that is being prepared against other prepared sets, and its splits against each other: prepare's part
that looks at images a second time, in Ray tasks, a shard each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.prepare import leakage
from mmray.data.prepare.assemble import Findings, records, shards_of
from mmray.data.prepare.image_hashes import LOOKS, all_rows, look_at, looks_name, missing, read_looks
from mmray.data.prepare.tasks import MAX_RETRIES, MAX_RETRIES_APART, answer_of, item_of, run_tasks
from mmray.data.store.manifest import Manifest, Shard
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, ResourceError, UsageError
from mmray.storage.storage import Place

if TYPE_CHECKING:
    from mmray.config import Prepare

Tell = Callable[[int, int], None]  # rows looked at, of how many
Say = Callable[[str, str], None]  # a sentence, and its label


@dataclass(frozen=True)
class Look:
    """How shards are looked at; `careful`: each image is decoded in a process of its own first."""

    out: str
    near: bool
    max_pixels: int
    careful: bool = False


def check(settings: Prepare, out: str) -> None:
    """Raises UsageError or DataError for what can be known before anything is read."""
    if wanted(settings) and settings.near_bits >= 0 and find_spec("imagehash") is None:
        raise UsageError(
            "near-duplicates are looked for with the package imagehash: pip install 'mmray[leakage]', or compare "
            "contents alone with --near-bits -1"
        )
    for address in settings.against:
        if Place(address).address == Place(out).address:
            raise UsageError(f"--against {address} is the set that is being prepared: name another one")
        PreparedSet.open(address)


def wanted(settings: Prepare) -> bool:
    return bool(settings.against) or settings.drop_leaked


def leaks_of(
    out: Place, chunks: Sequence[int], source: str, findings: Findings, settings: Prepare, tell: Tell, say: Say
) -> tuple[dict[int, str], dict[str, Any]]:
    """Rows that leak -> what the quarantine says of them, and the manifest's summary; leaks.jsonl is written.

    Raises DataError, or ResourceError where tasks die.
    """
    others = [PreparedSet.open(address) for address in settings.against]
    own = [shard for _, record in records(out, chunks) for shard in shards_of(record)]
    shards_by = [(out.address, source, own)]
    shards_by += [(each.place.address, _source(each.manifest), list(each.manifest.shards)) for each in others]
    near = settings.near_bits >= 0
    _look(shards_by, Look(out.address, near, settings.max_pixels), tell, say)
    columns = [(record["rows"]["shard"], record["shards"]) for _, record in records(out, chunks)]
    places = leakage.in_source_order([a for a, _ in columns], [[each["num_rows"] for each in b] for _, b in columns])
    splits = [shards[number]["split"] for numbers, shards in columns for number in numbers]
    leaks = leakage.search(
        read_looks(out, own, near, live=False)[places],
        ~findings.dropped,
        splits,
        [read_looks(out, shards, near, live=True) for _, _, shards in shards_by[1:]],
        settings.near_bits,
    )
    rows = all_rows(out.address, source, own)
    lines = list(leakage.told(leaks, rows, places, others))
    leakage.write(out, leaks, lines, rows, places, others)
    told = {int(row): leakage.sentence(line) for row, line in zip(leaks.row, lines, strict=True)}
    return told, leakage.summary(leaks, settings.against, settings.near_bits, settings.drop_leaked)


def _source(manifest: Manifest) -> str:
    return str(manifest.source.get("address") or "")


def _look(shards_by: list[tuple[str, str, list[Shard]]], look: Look, tell: Tell, say: Say) -> None:
    out = Place(look.out)
    out.make(LOOKS)
    names = {looks_name(shard, look.near).rpartition("/")[2] for _, _, shards in shards_by for shard in shards}
    for name in set(out.names(LOOKS)) - names:  # of shards that are no more
        out.delete(f"{LOOKS}/{name}")
    items = _unseen(shards_by, look)
    total = _rows_of(items)
    tell(0, total)
    try:
        _look_at_all(items, look, MAX_RETRIES, total, tell, say)
        return
    except ray.exceptions.RayError:
        items = _unseen(shards_by, look)  # one may hold an image that kills: decoded apart, it is named
    try:
        _look_at_all(items, replace(look, careful=True), MAX_RETRIES_APART, total, tell, say)
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"looking for leaks ended: {error}\nThe same command goes on where it was; images are not the cause (they "
            "were decoded in processes of their own): memory may be"
        ) from error


def _unseen(shards_by: list[tuple[str, str, list[Shard]]], look: Look) -> list[dict[str, Any]]:
    return [
        {"address": address, "source": source, "shard": asdict(shard)}
        for address, source, shards in shards_by
        for shard in missing(Place(look.out), shards, look.near)
    ]


def _rows_of(items: list[dict[str, Any]]) -> int:
    return sum(item["shard"]["num_rows"] for item in items)


def _look_at_all(items: list[dict[str, Any]], look: Look, retries: int, total: int, tell: Tell, say: Say) -> None:
    done = total - _rows_of(items)
    with closing(run_tasks(partial(_look_batch, look=look), items, retries)) as answers:
        for answer in answers:
            if answer["fault"]:
                raise DataError(answer["fault"])
            if answer["deadly"]:
                say(f"{answer['deadly']}: the decoder dies of the image; only its bytes were compared", "crash")
            done += int(answer["num_rows"])
            tell(done, total)


def _look_batch(batch: dict[str, np.ndarray], look: Look) -> dict[str, np.ndarray]:
    """The Ray task: the looks of one shard."""
    item = item_of(batch)
    shard = Shard.from_json(item["shard"])
    try:
        with closing(SandboxedDecoder()) as sandbox:
            where = (Place(look.out), item["address"], item["source"])
            deadly = look_at(*where, shard, look.near, look.max_pixels, sandbox if look.careful else None)
    except OSError as error:
        fault = f"{item['address']}/{shard.file} cannot be compared: {error}"
        return answer_of({"num_rows": 0, "fault": fault, "deadly": ""})
    return answer_of({"num_rows": shard.num_rows, "fault": "", "deadly": ", ".join(deadly)})
