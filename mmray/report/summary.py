"""What limits the speed of a run, its settings, and quarantined rows, for its page."""

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
from mmray.report.run import (
    Line,
    RunRecord,
    format_setting,
    read_json,
    read_lines,
)
from mmray.storage.paths import AnyPath, to_path

IDLE_WARNING = 0.2  # fraction of the time in which a device waits, for data or the process
LAUNCH_WARNING = 0.5  # fraction of the time in launch-bound steps, part of which the device is busy
ROWS_CPU_WARNING = 0.5  # CPU time for moving rows, as a fraction of the time
LIMIT = "limit"  # name of the finding
DATA_FIX = "use more data processes (data.workers), or prepare smaller images (--image-side)"


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


def settings_table(config: dict[str, Any]) -> list[dict[str, str]]:
    """Compare the settings of a run with those of its recipe.

    Args:
        config: Content of config.yaml: {section: {field: value}} and `recipe`.

    Returns:
        A dict per setting: `name` (such as `optimizer.lr`), and the texts `value` and `recipe` (""
        if the recipe has no such setting).
    """
    recipe = flatten(RECIPES.get(str(config.get("recipe")), Config)().to_json())
    recipe = {name: format_setting(value) for name, value in recipe.items()}
    return [
        {"name": name, "value": format_setting(value), "recipe": recipe.get(name, "")}
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
    """Return whether a file exists; False without access, as in a run copied from a cluster."""
    try:
        return file.is_file()
    except OSError:
        return False
