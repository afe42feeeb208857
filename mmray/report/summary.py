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

WAIT_WARNING = 0.2  # fraction of the time in which workers wait for data
BUSY_PERCENT = 80.0  # of the time in which a GPU runs kernels
LIMIT = "limit"  # name of the finding
DATA_FIX = "use more data processes (data.workers), or prepare smaller images (--image-side)"
HOST_FIX = (
    "use larger micro-batches (batch.micro) and train.compile inductor, and do less in "
    "train.callbacks; train.profile 5 records what the process does between kernels"
)


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

    The level is `warning` if they wait, and `observed` then starts with `Data-bound` or
    `Host-bound`; it is `ok` if they wait little, or if nothing was measured.
    """
    waits = run.values("time/data_wait_share")
    if not waits:
        return Finding("ok", LIMIT, "not measured: no step after the first was logged")
    wait = median(waits)
    measured = f"the workers waited for data {wait:.0%} of the time"
    busy_percent = run.values("gpu/busy_percent")
    if busy_percent:
        measured += f", the GPU was busy {median(busy_percent):.0f}%"
    if wait > WAIT_WARNING:
        return Finding("warning", LIMIT, f"Data-bound: {measured}", DATA_FIX)
    if busy_percent and median(busy_percent) < BUSY_PERCENT:
        return Finding("warning", LIMIT, f"Host-bound: {measured}", HOST_FIX)
    return Finding("ok", LIMIT, measured)


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
            examples[reason].append(row | {"reason": reason})
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
