"""Text and tables of the run report: key figures, warnings, settings, quarantined rows."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice, zip_longest
from statistics import median
from typing import Any

from mmray.config import Config, Section
from mmray.config.data import format_mixture, parse_mixture
from mmray.config.recipes import RECIPES
from mmray.data.formats.detect import SourceSpec, open_source
from mmray.data.formats.rows import BadRow, parse_row
from mmray.data.formats.source import Source, SourceChanged
from mmray.data.images.crash_probe import CrashProbe
from mmray.data.images.read import read_image
from mmray.data.prepare.contamination import LEAKS, MAX_EXAMPLES
from mmray.data.store.manifest import MANIFEST, QUARANTINE
from mmray.errors import MmrayError, UsageError
from mmray.report.figures import DIRECTIONS
from mmray.report.run import RunRecord, format_number, non_retrieval_metrics, read_json, read_lines
from mmray.storage.paths import AnyPath, to_path
from mmray.storage.storage import Storage

DATA_WAIT_WARNING = 0.2  # fraction of the step time
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations")  # measured by the memory dry run


def format_duration(seconds: float | None) -> str:
    """Format as `45 s`, `3m 20s` or `2h 05m`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def dataset_names(trained_on: str) -> str:
    """Return `data.train` with paths reduced to their last part, such as `a + 2 * b`."""
    return format_mixture([(path.rstrip("/").rpartition("/")[2], weight) for path, weight in parse_mixture(trained_on)])


def key_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of the measured recall or perplexity, loss, speed, data wait, memory, duration."""
    scores, figures = run.newest("evaluate/"), []
    for way, (title, _) in DIRECTIONS.items():
        if f"recall_at_1/{way}" in scores:
            rank = scores.get(f"median_rank/{way}")
            note = f"median rank {rank:g}" if rank is not None else ""
            figures.append((f"Recall@1 {title}", f"{scores[f'recall_at_1/{way}']:.1%}", note))
    if "perplexity" in scores:
        note = f"{scores['token_accuracy']:.1%} of tokens guessed"
        figures.append(("Perplexity", format_number(scores["perplexity"]), note))
    if losses := run.values("train/loss"):
        figures.append(("Loss", format_number(losses[-1]), f"{format_number(losses[0])} at first"))
    if rates := run.values("throughput/samples_per_s"):
        note = f"{min(rates):,.0f} to {max(rates):,.0f}"
        figures.append(("Samples/s, median", format_number(median(rates), 0), note))
    if waits := run.values("time/data_wait_share"):
        figures.append(("Data wait, median", f"{median(waits):.1%}", "of a step's time"))
    if peaks := run.values("memory/peak_gib"):
        figures.append(("Peak memory", f"{max(peaks):.2f} GiB", "of a worker"))
    if "elapsed_s" in run.result:
        steps = f"{run.lines[-1]['step']:,} steps" if run.lines else ""
        figures.append(("Duration", format_duration(run.result["elapsed_s"]), steps))
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
    scores = run.newest("evaluate/")
    rows = []
    for way, (title, _) in DIRECTIONS.items():
        if f"recall_at_1/{way}" in scores:
            row = {f"R@{k}": format_number(scores.get(f"recall_at_{k}/{way}")) for k in (1, 5, 10)}
            rows.append({"": title, **row, "median rank": f"{scores.get(f'median_rank/{way}', math.nan):g}"})
    return rows


def memory_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return the memory of a worker by component and its peak in GiB; empty without a memory breakdown."""
    memory = run.newest("memory/")
    rows = [(name, f"{memory[f'{name}_gib']:.3f}") for name in MEMORY_PARTS if f"{name}_gib" in memory]
    peaks = run.values("memory/peak_gib")
    return [*rows, ("peak", f"{max(peaks):.3f}")] if rows and peaks else rows


def eval_summary(run: RunRecord) -> list[tuple[str, str]]:
    """Return the non-retrieval metrics of the newest evaluation as (name, value)."""
    scores, spent_s = run.newest("evaluate/"), run.values("time/evaluate_s")
    if not scores:
        return []
    at = next(line["step"] for line in reversed(run.lines) if any(name.startswith("evaluate/") for name in line))
    facts = [("at step", format_number(at, 0)), *non_retrieval_metrics(scores)]
    facts.append(("evaluations", format_number(len(spent_s), 0)))
    return [*facts, ("each took", f"{median(spent_s):.1f} s")] if spent_s else facts


def run_warnings(run: RunRecord) -> list[tuple[str, str]]:
    """Return (kind, sentence) of failures (`bad`) and warnings (`note`)."""
    warnings: list[tuple[str, str]] = []
    if run.status == "failed":
        warnings.append(("bad", f"The run failed: {run.result.get('error', 'no reason was recorded')}"))
    if run.status == "stopped":
        warnings.append(("note", "The run was stopped; run the same command to resume it."))
    if run.status == "unfinished":
        warnings.append(("note", "The run has no result yet: it is still running or was killed."))
    if nan := sum(value is None for value in run.series("train/loss")[1]):
        steps = f"{nan:,} of {len(run.lines):,} logged steps"
        warnings.append(("bad", f"The loss was not a number at {steps} (gaps in the curve)."))
    if skipped := max(run.values("train/skipped_steps"), default=0):
        warnings.append(("bad", f"{skipped:,.0f} steps were skipped because their gradient was not finite."))
    if restarts := run.result.get("restarts"):
        wasted = run.result.get("wasted_steps", 0)
        warnings.append(("note", f"Workers failed {restarts:,} times; {wasted:,} steps were repeated."))
    if bad := run.newest("evaluate/").get("bad_rows"):
        warnings.append(("note", f"{bad:,.0f} held-out rows could not be read and were left out of the scores."))
    waits = run.values("time/data_wait_share")
    if waits and median(waits) > DATA_WAIT_WARNING:
        warnings.append(("note", f"Data-bound: the workers waited for data {median(waits):.0%} of the time."))
    return warnings


def settings_of(config: dict[str, Any]) -> list[dict[str, str]]:
    """Return name, value, recipe (its value there) and description of all settings in order.

    Without descriptions if this mmray version cannot parse the config.
    """
    recipe = _flatten(RECIPES.get(str(config.get("recipe")), Config)().model_dump(mode="json", by_alias=True))
    try:
        descriptions = dict(_descriptions(Config.model_validate(config)))
    except UsageError:
        descriptions = {}
    return [
        {
            "name": name,
            "value": _text(value),
            "recipe": _text(recipe[name]) if name in recipe else "",
            "description": descriptions.get(name, ""),
        }
        for name, value in _flatten(config).items()
    ]


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out


def _descriptions(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, setting in type(section).model_fields.items():
        value, full = getattr(section, name), prefix + (setting.alias or name)
        if isinstance(value, Section):
            yield from _descriptions(value, full + ".")
        else:
            yield full, setting.description or ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# A prepared set does not keep the images of quarantined rows, so they are read from the source if it still exists.
SCAN_SECONDS = 5.0  # time limit for finding the images in the source
CHUNK_ROWS = 512
MAX_LEAK_LINES = 100_000  # lines of leaks.jsonl


def quarantine_of(run: AnyPath, prepared: str | None) -> dict[str, Any]:
    """Return the rows quarantined in training and by prepare (for a mixture, of its first set).

    {"num_rows", "num_read": rows of the source or 0, "reasons": [(reason, count)] in descending order, "shown":
    examples with key, source (file:line), reason, detail and picture (a data URI, or None if the image cannot be read),
    "leakage": the manifest's summary of the contamination check, "leaks": lines of leaks.jsonl with images}
    """
    folder = to_path(parse_mixture(prepared)[0][0]) if prepared else None
    manifest = read_json(folder / MANIFEST) if folder else {}
    reasons: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in chain(read_lines(run / QUARANTINE), read_lines(folder / QUARANTINE) if folder else ()):
        in_training = entry.get("stage") == "train"
        reason = "in training" if in_training else str(entry.get("reason") or "")
        reasons[reason] += 1
        if len(examples[reason]) < MAX_EXAMPLES:  # there may be millions
            row = {name: str(entry.get(name) or "") for name in ("key", "source", "detail")}
            detail = str(entry.get("reason") or "") if in_training else row["detail"]
            examples[reason].append(row | {"reason": reason, "detail": detail, "picture": None})
    turns = zip_longest(*examples.values())  # one row of each reason in turn
    shown = [row for row in chain.from_iterable(turns) if row is not None][:MAX_EXAMPLES]
    about, settings = manifest.get("source") or {}, manifest.get("settings") or {}
    if shown and folder and about.get("format"):
        spec = SourceSpec(about["format"], about["folder"], about["file"])
        columns = {ours: theirs for ours, _, theirs in (each.partition("=") for each in settings.get("columns") or ())}
        template = str(settings.get("caption") or "")
        _load_images(shown, open_source(spec, Storage(str(folder)), columns, template), Storage(spec.address))
    leakage, leaks = manifest.get("leakage") or {}, []
    if leakage and folder:
        lines = islice(read_lines(folder / LEAKS), MAX_LEAK_LINES)
        leaks = list(islice((line for line in lines if line.get("thumbnails")), MAX_EXAMPLES))
    counts = {"num_rows": reasons.total(), "num_read": manifest.get("num_read") or 0, "reasons": reasons.most_common()}
    return counts | {"shown": shown, "leakage": leakage, "leaks": leaks}


def _load_images(rows: list[dict[str, Any]], source: Source, storage: Storage) -> None:
    """Set `picture` of these rows if the source still exists and the image can be decoded."""
    wanted: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        wanted[row["source"]].append(row)
    until = time.monotonic() + SCAN_SECONDS
    try:
        with closing(CrashProbe()) as crash_probe:
            for item in chain.from_iterable(source.read(chunk) for chunk in source.scan(CHUNK_ROWS, ())):
                for row in wanted.pop(item.location, ()):
                    if isinstance(item.values, BadRow):
                        continue
                    try:
                        data = read_image(storage, parse_row(item.values, item.location).image)
                    except (OSError, ValueError):  # includes BadRow: unreadable images are often quarantined
                        continue
                    row["picture"] = crash_probe.thumbnail(data)
                if not wanted or time.monotonic() > until:
                    return
    except (OSError, ValueError, SourceChanged, MmrayError):
        return  # the source is gone or changed: show the rows without images
