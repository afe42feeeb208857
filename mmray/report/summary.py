"""Text and tables of the run report: key figures, warnings, quarantined rows."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from statistics import median
from typing import Any

from mmray.config.data import format_mixture, parse_mixture
from mmray.data.formats.detect import SourceSpec, open_source
from mmray.data.formats.rows import BadRow, parse_row
from mmray.data.formats.source import Source, SourceChanged, SourceItem
from mmray.data.images.read import read_image
from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.images.thumbnail import encoded_thumbnail
from mmray.data.prepare.contamination import LEAKS, MAX_EXAMPLES
from mmray.data.store.manifest import MANIFEST, QUARANTINE
from mmray.errors import MmrayError
from mmray.report.figures import DIRECTIONS
from mmray.report.run import RunRecord, read_json, read_lines
from mmray.report.scores import non_retrieval_metrics
from mmray.storage.paths import AnyPath, to_path
from mmray.storage.storage import Storage

RECALL_AT = (1, 5, 10)
DATA_WAIT_WARNING = 0.2  # fraction of the step time


@dataclass(frozen=True)
class KeyFigure:
    """A key figure at the top of the page, with an optional note."""

    name: str
    value: str
    note: str = ""


def format_duration(seconds: float | None) -> str:
    """Format as `45 s`, `3m 20s` or `2h 05m`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def format_number(value: float | None, digits: int = 3) -> str:
    """Format with `digits` decimals and thousands separators; a missing or non-finite value is a dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def dataset_names(trained_on: str) -> str:
    """Return `data.train` with paths reduced to their last part, such as `a + 2 * b`."""
    return format_mixture([(path.rstrip("/").rpartition("/")[2], weight) for path, weight in parse_mixture(trained_on)])


def key_figures(run: RunRecord) -> list[KeyFigure]:
    """Return the measured key figures: recall or perplexity, loss, speed, data wait, memory, duration."""
    scores, figures = run.newest("evaluate"), []
    for way, (title, _) in DIRECTIONS.items():
        if f"recall_at_1/{way}" in scores:
            middle = scores.get(f"median_rank/{way}")
            note = f"median rank {middle:g}" if middle is not None else ""
            figures.append(KeyFigure(f"Recall@1 {title}", f"{scores[f'recall_at_1/{way}']:.1%}", note))
    if "perplexity" in scores:
        note = f"{scores['token_accuracy']:.1%} of tokens guessed"
        figures.append(KeyFigure("Perplexity", format_number(scores["perplexity"]), note))
    if losses := run.values("train/loss"):
        figures.append(KeyFigure("Loss", format_number(losses[-1]), f"{format_number(losses[0])} at first"))
    if rates := run.values("throughput/samples_per_s"):
        note = f"{min(rates):,.0f} to {max(rates):,.0f}"
        figures.append(KeyFigure("Samples/s, median", format_number(median(rates), 0), note))
    if waits := run.values("time/data_wait_share"):
        figures.append(KeyFigure("Data wait, median", f"{median(waits):.1%}", "of a step's time"))
    if run.values("memory/peak_gib"):
        figures.append(KeyFigure("Peak memory", f"{max(run.values('memory/peak_gib')):.2f} GiB", "of a worker"))
    if "elapsed_s" in run.result:
        steps = f"{run.lines[-1]['step']:,} steps" if run.lines else ""
        figures.append(KeyFigure("Duration", format_duration(run.result["elapsed_s"]), steps))
    return figures


def batch_summary(run: RunRecord) -> str:
    """Return the batch summary of result.json, or one derived from the config."""
    if "batch" in run.result:
        return str(run.result["batch"])
    batch = run.config.get("batch") or {}
    workers = (run.config.get("cluster") or {}).get("workers")
    return f"{batch.get('global')} rows per step in micro-batches of {batch.get('micro')}, {workers} workers"


def recall_rows(run: RunRecord) -> list[dict[str, str]]:
    """Return the rows of the retrieval table, one per direction."""
    scores = run.newest("evaluate")
    rows = []
    for way, (title, _) in DIRECTIONS.items():
        if f"recall_at_1/{way}" in scores:
            row = {f"R@{k}": format_number(scores.get(f"recall_at_{k}/{way}")) for k in RECALL_AT}
            rows.append({"": title, **row, "median rank": f"{scores.get(f'median_rank/{way}', math.nan):g}"})
    return rows


MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations")  # measured by the memory dry run


def memory_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return the memory of a worker by component and its peak in GiB; empty without a memory breakdown."""
    found = run.newest("memory")
    rows = [(name, f"{found[f'{name}_gib']:.3f}") for name in MEMORY_PARTS if f"{name}_gib" in found]
    peaks = run.values("memory/peak_gib")
    return [*rows, ("peak", f"{max(peaks):.3f}")] if rows and peaks else rows


def eval_summary(run: RunRecord) -> list[tuple[str, str]]:
    """Return the non-retrieval metrics of the newest evaluation as (name, value)."""
    scores, spent_s = run.newest("evaluate"), run.values("time/evaluate_s")
    if not scores:
        return []
    at = next(line["step"] for line in reversed(run.lines) if any(name.startswith("evaluate/") for name in line))
    facts = [
        ("at step", format_number(at, 0)),
        *non_retrieval_metrics(scores),
        ("evaluations", format_number(len(spent_s), 0)),
    ]
    return [*facts, ("each took", f"{median(spent_s):.1f} s")] if spent_s else facts


def run_warnings(run: RunRecord) -> list[tuple[str, str]]:
    """Return (kind, sentence) of failures (`bad`) and warnings (`note`)."""
    said: list[tuple[str, str]] = []
    if run.status == "failed":
        said.append(("bad", f"The run failed: {run.result.get('error', 'no reason was recorded')}"))
    if run.status == "stopped":
        said.append(("note", "The run was stopped; run the same command to resume it."))
    if run.status == "unfinished":
        said.append(
            (
                "note",
                "The run has no result yet: it is still running or was killed.",
            )
        )
    if nan := sum(value is None for value in run.series("train/loss")[1]):
        said.append(
            ("bad", f"The loss was not a number at {nan:,} of {len(run.lines):,} logged steps (gaps in the curve).")
        )
    if skipped := max(run.values("train/skipped_steps"), default=0):
        said.append(("bad", f"{skipped:,.0f} steps were skipped because their gradient was not finite."))
    if restarts := run.result.get("restarts"):
        wasted = run.result.get("wasted_steps", 0)
        said.append(("note", f"Workers failed {restarts:,} times; {wasted:,} steps were repeated."))
    if bad := run.newest("evaluate").get("bad_rows"):
        said.append(("note", f"{bad:,.0f} held-out rows could not be read and were left out of the scores."))
    waits = run.values("time/data_wait_share")
    if waits and median(waits) > DATA_WAIT_WARNING:
        said.append(("note", f"Data-bound: the workers waited for data {median(waits):.0%} of the time."))
    return said


# A prepared set does not keep the images of quarantined rows, so they are read from the source if it still exists.
SCAN_SECONDS = 5.0  # time limit for finding the images in the source
CHUNK_ROWS = 512
MAX_LEAK_LINES = 100_000  # lines of leaks.jsonl


@dataclass
class QuarantinedRow:
    """A quarantined row; `picture` is a data URI, or None if the image cannot be read."""

    key: str
    source: str  # file:line
    stage: str
    reason: str
    detail: str
    picture: str | None = None


@dataclass(frozen=True)
class Quarantine:
    """Quarantined rows of the prepared set and of the run."""

    num_read: int = 0  # rows of the source; 0: unknown
    reasons: list[tuple[str, int]] = field(default_factory=list)  # in descending order
    shown: list[QuarantinedRow] = field(default_factory=list)
    leakage: dict[str, Any] = field(default_factory=dict)  # the manifest's summary of the contamination check
    leaks: list[dict[str, Any]] = field(default_factory=list)  # lines of leaks.jsonl with images

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.reasons)


def quarantine_of(run: AnyPath, prepared: str | None) -> Quarantine:
    """Return rows quarantined by prepare (for a mixture, of its first set) and in training."""
    place = to_path(parse_mixture(prepared)[0][0]) if prepared else None
    manifest = read_json(place / MANIFEST) if place else {}
    entries = list(read_lines(run / QUARANTINE))
    reasons: Counter[str] = Counter("in training" for _ in entries)
    by_reason: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in chain(entries, read_lines(place / QUARANTINE) if place else ()):
        reason = "in training" if entry.get("stage") == "train" else str(entry.get("reason"))
        if reason != "in training":
            reasons[reason] += 1
        if len(by_reason[reason]) < MAX_EXAMPLES:  # there may be millions
            by_reason[reason].append(entry)
    shown = [_parse_entry(entry) for entry in _round_robin(by_reason.values())][:MAX_EXAMPLES]
    about, settings = manifest.get("source") or {}, manifest.get("settings") or {}
    if shown and place and about.get("format"):
        chosen = SourceSpec(about["format"], about["folder"], about["file"])
        columns = {ours: theirs for ours, _, theirs in (each.partition("=") for each in settings.get("columns") or ())}
        template = str(settings.get("caption") or "")
        _load_images(shown, open_source(chosen, Storage(str(place)), columns, template), Storage(chosen.address))
    leaks = (
        [line for line in islice(read_lines(place / LEAKS), MAX_LEAK_LINES) if line.get("thumbnails")] if place else []
    )
    num_read, found = int(manifest.get("num_read") or 0), manifest.get("leakage") or {}
    return Quarantine(num_read, reasons.most_common(), shown, found, leaks[:MAX_EXAMPLES] if found else [])


def _round_robin(lists: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the first of each list, then the second of each, and so on."""
    return [entry for turn in zip_longest(*lists) for entry in turn if entry is not None]


def _parse_entry(entry: dict[str, Any]) -> QuarantinedRow:
    in_training = entry.get("stage") == "train"
    return QuarantinedRow(
        key=str(entry.get("key") or ""),
        source=str(entry.get("source") or ""),
        stage=str(entry.get("stage") or ""),
        reason="in training" if in_training else str(entry.get("reason") or ""),
        detail=str(entry.get("reason" if in_training else "detail") or ""),
    )


def _load_images(rows: list[QuarantinedRow], source: Source, place: Storage) -> None:
    """Set `picture` of these rows if the source still exists and the image can be decoded."""
    wanted: dict[str, list[QuarantinedRow]] = defaultdict(list)
    for row in rows:
        wanted[row.source].append(row)
    until = time.monotonic() + SCAN_SECONDS
    try:
        with closing(SandboxedDecoder()) as sandbox:
            for item in chain.from_iterable(source.read(chunk) for chunk in source.scan(CHUNK_ROWS, ())):
                for row in wanted.pop(item.origin, ()):
                    row.picture = _thumbnail_of(place, item, sandbox)
                if not wanted or time.monotonic() > until:
                    return
    except (OSError, ValueError, SourceChanged, MmrayError):
        return  # the source is gone or changed: show the rows without images


def _thumbnail_of(place: Storage, item: SourceItem, sandbox: SandboxedDecoder) -> str | None:
    if isinstance(item.values, BadRow):
        return None
    try:
        data = read_image(place, parse_row(item.values, item.origin).image)
    except (OSError, ValueError):  # includes BadRow: an unreadable image is a common reason for quarantine
        return None
    return encoded_thumbnail(data, sandbox)
