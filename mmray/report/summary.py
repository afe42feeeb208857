"""Text and tables of the run report: key figures, warnings, settings, quarantined rows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from statistics import median
from typing import Any

from mmray.config import Config, flatten
from mmray.config.data import Mixture
from mmray.config.recipes import RECIPES
from mmray.data.prepare.contamination import LEAKS, MAX_EXAMPLES
from mmray.data.store.manifest import MANIFEST, QUARANTINE
from mmray.errors import Finding
from mmray.evaluation import main_scores
from mmray.report.run import (
    Line,
    RunRecord,
    format_number,
    format_setting,
    non_retrieval_metrics,
    read_json,
    read_lines,
    scores_by_set,
)
from mmray.storage.paths import AnyPath, to_path

IDLE_WARNING = 0.2  # fraction of the time in which a device waits, for data or the process
LAUNCH_WARNING = 0.5  # fraction of the time in launch-bound steps, part of which the device is busy
ROWS_CPU_WARNING = 0.5  # CPU time for moving rows, as a fraction of the time
LIMIT = "limit"  # name of the finding
DATA_FIX = "use more data processes (data.workers), or prepare smaller images (--image-side)"
# measured by the memory dry run
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations")


def format_duration(seconds: float | None) -> str:
    """Format seconds as `45 s`, `3m 20s` or `2h 05m`, and None, NaN and infinity as a dash."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def dataset_names(trained_on: str) -> str:
    """Shorten the value of `data.train` to names of sets.

    Args:
        trained_on: A set or a mixture, such as `prepared/a + 2 * s3://bucket/b`.

    Returns:
        The mixture with the last part of each path, such as `a + 2 * b`.
    """
    return str(Mixture.parse(trained_on).rename(lambda path: path.rstrip("/").rpartition("/")[2]))


def key_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the headline numbers of a run, as texts for its page.

    Args:
        run: The content of the run folder, such as its config and metrics.

    Returns:
        (name, value, note) of the main metrics of each set, such as recall@1, and of each measured
        one of loss, speed, data wait, GPU idle time, peak memory and duration, such as ("Loss",
        "1.234", "5.545 at the start").
    """
    figures = []
    for name, scores in scores_by_set(run.newest("evaluate/")).items():
        of_set = f", {name}" if name else ""
        figures += [
            (f"{title[0].upper()}{title[1:]}{of_set}", text, "")
            for title, text in main_scores(scores)
        ]
    if losses := run.values("train/loss"):
        figures.append(
            ("Loss", format_number(losses[-1]), f"{format_number(losses[0])} at the start")
        )
    if rates := run.values("throughput/samples_per_s"):
        note = f"from {min(rates):,.0f} to {max(rates):,.0f}"
        figures.append(("Samples/s, median", format_number(median(rates), 0), note))
    if waits := run.values("time/data_wait_share"):
        figures.append(("Data wait, median", f"{median(waits):.1%}", "of a step's time"))
    if idles := run.values("time/device_idle_share"):
        note = f"between steps; {_median_share(run, 'launch_bound'):.0%} in launch-bound steps"
        figures.append(("GPU idle, median", f"{median(idles):.0%}", note))
    if peaks := run.values("memory/peak_gib"):
        total_gib = run.result.get("all_processes_peak_gib")
        note = (
            "of a worker"
            if total_gib is None
            else (f"of a worker; all processes {total_gib:.2f} GiB")
        )
        figures.append(("Peak memory", f"{max(peaks):.2f} GiB", note))
    if "elapsed_s" in run.result:
        steps = f"{run.lines[-1]['step']:,} steps" if run.lines else ""
        figures.append(("Duration", format_duration(run.result["elapsed_s"]), steps))
    return figures


def find_limit(run: RunRecord) -> Finding:
    """Return what keeps the devices of a run waiting, for its page and for `mmray doctor RUN`.

    On GPUs it is decided by their idle time between steps and by steps in which they wait for
    launches of kernels, on CPUs by the wait for data.

    Args:
        run: The content of the run folder; the logged metrics are read.

    Returns:
        A Finding: `level`, `name` (`limit`), and the texts `observed` and `fix`. The level is
        `warning` if the devices wait, and `observed` then starts with `Data-bound` or `Host-bound`;
        it is `ok` if they wait little, or if nothing was measured.
    """
    if not run.values("time/data_wait_share"):
        return Finding("ok", LIMIT, "not measured: no step after the first was logged")
    data_wait = _median_share(run, "data_wait")
    if not run.values("time/device_idle_share"):
        measured = f"the workers waited for data {data_wait:.0%} of the time"
        if data_wait > IDLE_WARNING:
            return Finding("warning", LIMIT, f"Data-bound: {measured}", DATA_FIX)
        return Finding("ok", LIMIT, f"{measured}; no idle time of a GPU was logged")
    names = ("device_idle", "device_idle_data", "launch_bound", "rows_cpu")
    idle, for_data, launch_bound, rows_cpu = (_median_share(run, name) for name in names)
    measured = f"the GPU was idle {idle:.0%} of the time between steps ({for_data:.0%} for data)"
    if for_data > IDLE_WARNING:
        return Finding("warning", LIMIT, f"Data-bound: {measured}", DATA_FIX)
    measured += f" and launch-bound for another {launch_bound:.0%}"
    if idle - for_data <= IDLE_WARNING and launch_bound <= LAUNCH_WARNING:
        return Finding("ok", LIMIT, measured)
    if rows_cpu > ROWS_CPU_WARNING:
        cause = f"is busy moving rows ({rows_cpu:.0%} of a CPU core)"
        fix = (
            "use more workers, each of which then moves fewer rows; the log has a `data` line if "
            "their pixels could not be pinned"
        )
    elif launch_bound > LAUNCH_WARNING:
        cause = "launches kernels too slowly"
        fix = (
            "use larger micro-batches (batch.micro) and train.compile inductor; CUDA graphs "
            "(train.cuda_graphs auto) need one worker and one micro-batch a step"
        )
    else:
        cause = "does other work between steps, such as callbacks"
        fix = "profile some steps (train.profile), and do less in train.callbacks"
    observed = f"Host-bound: {measured}: the training process {cause}"
    return Finding("warning", LIMIT, observed, fix)


def _median_share(run: RunRecord, name: str) -> float:
    """Return the median of a share of the time (0 to 1) in metrics.jsonl; 0 if there is none."""
    return median(run.values(f"time/{name}_share") or [0.0])


def memory_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return the memory of a worker by component, in GiB.

    Args:
        run: The content of the run folder; the logged memory metrics are read.

    Returns:
        Pairs of name and value as texts, such as ("parameters", "0.334"), the last one `peak`;
        empty if the run measured no memory by component.
    """
    memory = run.newest("memory/")
    rows = [
        (name, f"{memory[f'{name}_gib']:.3f}") for name in MEMORY_PARTS if f"{name}_gib" in memory
    ]
    peaks = run.values("memory/peak_gib")
    return [*rows, ("peak", f"{max(peaks):.3f}")] if rows and peaks else rows


def eval_summary(run: RunRecord) -> list[tuple[str, str]]:
    """Return the newest evaluation of a run without its retrieval metrics.

    Args:
        run: The content of the run folder; the logged metrics are read.

    Returns:
        Pairs of name and value as texts: step, metrics, number of evaluations, time per evaluation.
        Empty if the run was not evaluated.
    """
    scores = run.newest("evaluate/")
    spent_s = run.values("time/evaluate_s")
    if not scores:
        return []
    at = next(
        line["step"]
        for line in reversed(run.lines)
        if any(name.startswith("evaluate/") for name in line)
    )
    facts = [("step", format_number(at, 0)), *non_retrieval_metrics(scores)]
    facts.append(("evaluations", format_number(len(spent_s), 0)))
    return [*facts, ("time per evaluation", f"{median(spent_s):.1f} s")] if spent_s else facts


def run_warnings(run: RunRecord) -> list[tuple[str, str]]:
    """Return sentences about problems of a run, for its page.

    Args:
        run: The content of the run folder, such as its metrics and result.json.

    Returns:
        Pairs of kind and sentence. The kind is `bad` for failures such as a loss of NaN, or `note`,
        for example for restarts.
    """
    nan = sum(value is None for value in run.series("train/loss")[1])
    result = run.result
    skipped = max(run.values("train/skipped_steps"), default=0)
    restarts = result.get("restarts") or 0
    wasted = result.get("wasted_steps") or 0
    causes = (
        f"{result.get('resizes') or 0:,} to add workers, {result.get('preemptions') or 0:,} "
        "for node preemptions"
    )
    evaluated = scores_by_set(run.newest("evaluate/"))
    bad = sum(scores.get("bad_rows") or 0 for scores in evaluated.values())
    limit = find_limit(run)
    rules = (
        (
            run.status == "failed",
            "bad",
            f"The run failed: {result.get('error', 'no reason was recorded')}",
        ),
        (
            run.status == "stopped",
            "note",
            "The run was stopped; run the same command to resume it.",
        ),
        (
            run.status == "unfinished",
            "note",
            "The run has no result yet: it is still running or was killed.",
        ),
        (
            nan,
            "bad",
            f"The loss was not a number at {nan:,} of {len(run.lines):,} logged steps "
            "(gaps in the curve).",
        ),
        (
            skipped,
            "bad",
            f"{skipped:,.0f} steps were skipped because their gradient was not finite.",
        ),
        (
            restarts,
            "note",
            f"Workers were restarted {restarts:,} times ({causes}); {wasted:,} "
            "steps were repeated.",
        ),
        (
            bad,
            "note",
            f"{bad:,.0f} held-out rows could not be read and were left out of the scores.",
        ),
        (limit.fix, "note", f"{limit.observed}. To change it, {limit.fix}."),
    )
    return [(kind, sentence) for shown, kind, sentence in rules if shown]


def settings_table(config: dict[str, Any]) -> list[dict[str, str]]:
    """Compare the settings of a run with those of its recipe.

    Args:
        config: Content of config.yaml: {section: {field: value}} and `recipe`.

    Returns:
        A dict of texts per setting: `name` (such as `optimizer.lr`), `value`, and `recipe` (value
        in the recipe; empty if it has no such setting).
    """
    recipe = flatten(RECIPES.get(str(config.get("recipe")), Config)().to_json())
    return [
        {
            "name": name,
            "value": format_setting(value),
            "recipe": format_setting(recipe[name]) if name in recipe else "",
        }
        for name, value in flatten(config).items()
    ]


MAX_LINES = 100_000  # lines that are read of quarantine.jsonl and leaks.jsonl, for examples


def quarantine_summary(
    folders: Sequence[AnyPath], run_folder: AnyPath | None = None
) -> dict[str, Any]:
    """Summarize the quarantined (excluded) rows of prepared sets and of a run, and overlaps of the
    sets with others.

    Args:
        folders: The folders of the sets.
        run_folder: The folder of the run that trained on them; None: there is none.

    Returns:
        `num_read` (rows that prepare read), `num_rows` (quarantined by prepare), `num_in_training`
        (quarantined by the run), `reasons` (pairs of reason and count, the most frequent first),
        `shown` (example rows as {reason, key, source, detail, file}; `file` locates the image in
        the source as {file, offset, length}, or is None), `contamination` (overlap of training and
        held-out rows, a dict per checked set: `set` (its name), the entries of `Manifest.leakage`,
        and `pairs`, example lines of leaks.jsonl), and `unread` (names of sets that cannot be read
        from here).
    """
    readable = [folder for folder in folders if _is_readable(folder / MANIFEST)]
    reasons: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    lists: list[Iterable[Line]] = []
    if run_folder is not None:
        lists.append(read_lines(run_folder / QUARANTINE))
    # There may be millions of rows; the manifest has their number.
    lists += [islice(read_lines(folder / QUARANTINE), MAX_LINES) for folder in readable]
    for entry in chain.from_iterable(lists):
        is_of_run = entry.get("stage") == "train"
        reason = "in training" if is_of_run else str(entry.get("reason") or "")
        reasons[reason] += is_of_run
        if len(examples[reason]) < MAX_EXAMPLES:
            row = {name: str(entry.get(name) or "") for name in ("key", "source", "detail")}
            examples[reason].append(row | {"reason": reason, "file": entry.get("image")})
    interleaved = zip_longest(*examples.values())  # one row of each reason in turn
    shown = [row for row in chain.from_iterable(interleaved) if row is not None][:MAX_EXAMPLES]
    num_read = 0
    checks = []
    for folder in readable:
        manifest = read_json(folder / MANIFEST)
        num_read += manifest.get("num_read") or 0
        reasons.update(manifest.get("reasons") or {})
        if summary := manifest.get("leakage"):
            lines = islice(read_lines(folder / LEAKS), MAX_LINES)
            pairs = islice((line for line in lines if line.get("thumbnails")), MAX_EXAMPLES)
            checks.append({"set": folder.name, **summary, "pairs": list(pairs)})
    num_in_training = reasons.get("in training", 0)
    return {
        "num_read": num_read,
        "num_in_training": num_in_training,
        "num_rows": reasons.total() - num_in_training,
        "reasons": [(reason, count) for reason, count in reasons.most_common() if count],
        "shown": shown,
        "contamination": checks,
        "unread": [folder.name for folder in folders if folder not in readable],
    }


def set_folders(trained_on: str | None) -> list[AnyPath]:
    """Return the folders of the sets that a value of `data.train` names, none for None."""
    addresses = Mixture.parse(trained_on).addresses if trained_on else ()
    return [to_path(address) for address in addresses]


def _is_readable(file: AnyPath) -> bool:
    """Return whether a file exists;

    False without access, as for a run that was copied from a cluster.
    """
    try:
        return file.is_file()
    except OSError:
        return False
