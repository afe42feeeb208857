"""What the report says in words and figures: the head of the page, and what deserves a second look."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from mmray.config.mixture import parse_mixture, write_mixture
from mmray.report.figures import WAYS
from mmray.report.run import RunRecord
from mmray.report.scores import other_scores

RECALL_AT = (1, 5, 10)
WAIT_WORTH_A_WORD = 0.2  # of a step's time


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures at the head of the page: its name, its value, and a word on it."""

    name: str
    value: str
    note: str = ""


def duration(seconds: float | None) -> str:
    """45 s, 3m 20s, 2h 05m."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def number(value: float | None, digits: int = 3) -> str:
    """A figure with so many digits behind the point, thousands set apart; a dash for what was not measured."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def set_names(trained_on: str) -> str:
    """The last parts of the paths in `data.train`: `a + 2 * b`."""
    return write_mixture([(path.rstrip("/").rpartition("/")[2], weight) for path, weight in parse_mixture(trained_on)])


def key_figures(run: RunRecord) -> list[KeyFigure]:
    """Recall both ways or perplexity, loss, speed, data wait and duration, as far as they were measured."""
    scores, figures = run.newest("evaluate"), []
    for way, (title, _) in WAYS.items():
        if f"recall_at_1/{way}" in scores:
            middle = scores.get(f"median_rank/{way}")
            note = f"median rank {middle:g}" if middle is not None else ""
            figures.append(KeyFigure(f"Recall@1 {title}", f"{scores[f'recall_at_1/{way}']:.1%}", note))
    if "perplexity" in scores:
        note = f"{scores['token_accuracy']:.1%} of tokens guessed"
        figures.append(KeyFigure("Perplexity", number(scores["perplexity"]), note))
    if losses := run.values("train/loss"):
        figures.append(KeyFigure("Loss", number(losses[-1]), f"{number(losses[0])} at first"))
    if rates := run.values("throughput/samples_per_s"):
        note = f"{min(rates):,.0f} to {max(rates):,.0f}"
        figures.append(KeyFigure("Samples/s, median", number(median(rates), 0), note))
    if waits := run.values("time/data_wait_share"):
        figures.append(KeyFigure("Data wait, median", f"{median(waits):.1%}", "of a step's time"))
    if run.values("memory/peak_gib"):
        figures.append(KeyFigure("Peak memory", f"{max(run.values('memory/peak_gib')):.2f} GiB", "of a worker"))
    if "elapsed_s" in run.result:
        steps = f"{run.lines[-1]['step']:,} steps" if run.lines else ""
        figures.append(KeyFigure("Duration", duration(run.result["elapsed_s"]), steps))
    return figures


def batch_line(run: RunRecord) -> str:
    """The batch arithmetic, as the run itself told it."""
    if "batch" in run.result:
        return str(run.result["batch"])
    batch = run.config.get("batch") or {}
    workers = (run.config.get("cluster") or {}).get("workers")
    return f"{batch.get('global')} rows a step in micro-batches of {batch.get('micro')}, {workers} workers"


def recall_rows(run: RunRecord) -> list[dict[str, str]]:
    """Rows of the table of final scores, one each way."""
    scores = run.newest("evaluate")
    rows = []
    for way, (title, _) in WAYS.items():
        if f"recall_at_1/{way}" in scores:
            row = {f"R@{k}": number(scores.get(f"recall_at_{k}/{way}")) for k in RECALL_AT}
            rows.append({"": title, **row, "median rank": f"{scores.get(f'median_rank/{way}', math.nan):g}"})
    return rows


HELD = ("parameters", "gradients", "optimizer", "activations")  # as the rehearsal of a step found them


def memory_rows(run: RunRecord) -> list[tuple[str, str]]:
    """What a worker's memory is spent on, and its peak, in GiB; empty where no step was rehearsed."""
    found = run.newest("memory")
    rows = [(name, f"{found[f'{name}_gib']:.3f}") for name in HELD if f"{name}_gib" in found]
    peaks = run.values("memory/peak_gib")
    return [*rows, ("peak", f"{max(peaks):.3f}")] if rows and peaks else rows


def evaluated(run: RunRecord) -> list[tuple[str, str]]:
    """What else the newest evaluation says, by name; empty where there was none."""
    scores, spent_s = run.newest("evaluate"), run.values("time/evaluate_s")
    if not scores:
        return []
    at = next(line["step"] for line in reversed(run.lines) if any(name.startswith("evaluate/") for name in line))
    facts = [("at step", number(at, 0)), *other_scores(scores), ("evaluations", number(len(spent_s), 0))]
    return [*facts, ("each took", f"{median(spent_s):.1f} s")] if spent_s else facts


def notices(run: RunRecord) -> list[tuple[str, str]]:
    """(kind, sentence): what went wrong, or deserves a second look; kind is `bad` or `note`."""
    said: list[tuple[str, str]] = []
    if run.status == "failed":
        said.append(("bad", f"The run failed: {run.result.get('error', 'it left no reason')}"))
    if run.status == "stopped":
        said.append(("note", "The run was stopped; the same command goes on where it was."))
    if run.status == "unfinished":
        said.append(("note", "The run has no result yet: it is under way, or was cut off. This is how far it got."))
    if nan := sum(value is None for value in run.series("train/loss")[1]):
        said.append(
            ("bad", f"The loss was not a number at {nan:,} of {len(run.lines):,} logged steps (gaps in its line).")
        )
    if skipped := max(run.values("train/skipped_steps"), default=0):
        said.append(("bad", f"{skipped:,.0f} steps were skipped because their gradient was not finite."))
    if restarts := run.result.get("restarts"):
        wasted = run.result.get("wasted_steps", 0)
        said.append(("note", f"Workers failed {restarts:,} times; {wasted:,} steps were taken twice."))
    if bad := run.newest("evaluate").get("bad_rows"):
        said.append(("note", f"{bad:,.0f} held-out rows could not be read and were left out of the scores."))
    waits = run.values("time/data_wait_share")
    if waits and median(waits) > WAIT_WORTH_A_WORD:
        said.append(("note", f"The workers waited for data {median(waits):.0%} of the time: rows come too slowly."))
    return said
