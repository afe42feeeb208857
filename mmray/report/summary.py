"""What limits the speed of a run, its settings, and quarantined rows, for its page."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import chain, islice, zip_longest
from statistics import median
from typing import Any

from mmray.config import Config, flatten
from mmray.config.recipes import RECIPES
from mmray.config.sets import Mixture
from mmray.data.store.manifest import MANIFEST, QUARANTINE
from mmray.report.run import (
    RunRecord,
    format_setting,
    read_json,
)
from mmray.storage.paths import AnyPath, read_lines

WAIT_WARNING = 0.2  # fraction of the time in which workers wait for data
BUSY_PERCENT = 80.0  # of the time in which a GPU runs kernels
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
    """Shorten the value of `data.train` to names of sets."""
    return str(Mixture.parse(trained_on).rename(lambda path: path.rstrip("/").rpartition("/")[2]))


def find_limit(run: RunRecord) -> str:
    """Return a sentence about what keeps the devices of a run waiting, and a fix; "" if little."""
    waits = run.values("time/data_wait_share")
    if not waits:
        return ""
    wait = median(waits)
    measured = f"the workers waited for data {wait:.0%} of the time"
    busy_percent = run.values("gpu/busy_percent")
    if busy_percent:
        measured += f", the GPU was busy {median(busy_percent):.0f}%"
    if wait > WAIT_WARNING:
        return f"Data-bound: {measured}. To change it, {DATA_FIX}."
    if busy_percent and median(busy_percent) < BUSY_PERCENT:
        return f"Host-bound: {measured}. To change it, {HOST_FIX}."
    return ""


def settings_table(config: dict[str, Any]) -> list[dict[str, str]]:
    """Compare the settings of a run with those of its recipe."""
    recipe = flatten(RECIPES.get(str(config.get("recipe")), Config)().to_json())
    recipe = {name: format_setting(value) for name, value in recipe.items()}
    return [
        {"name": name, "value": format_setting(value), "recipe": recipe.get(name, "")}
        for name, value in flatten(config).items()
    ]


MAX_LINES = 100_000  # lines that are read of quarantine.jsonl, for examples
MAX_EXAMPLES = 12  # rows that are shown


def quarantine_summary(folder: AnyPath) -> dict[str, Any]:
    """Summarize the quarantined rows of a prepared set or of a run, and overlaps of the set with
    others.

    Returns:
        `num_rows` (quarantined), `reasons` (pairs of reason and count, the most frequent first),
        `shown` (example rows as {reason, key, source, detail}), `num_read` (rows that prepare read;
        0 of a run), and `leakage` (`Manifest.leakage`; None if it was not checked).
    """
    manifest = read_json(folder / MANIFEST)
    counts: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    # There may be millions of rows; the manifest of a set has their number.
    for entry in islice(read_lines(folder / QUARANTINE), MAX_LINES):
        reason = str(entry.get("reason") or "")
        counts[reason] += 1
        if len(examples[reason]) < MAX_EXAMPLES:
            row = {name: str(entry.get(name) or "") for name in ("key", "source", "detail")}
            examples[reason].append(row | {"reason": reason})
    interleaved = zip_longest(*examples.values())  # one row of each reason in turn
    shown = [row for row in chain.from_iterable(interleaved) if row is not None][:MAX_EXAMPLES]
    reasons = Counter(manifest.get("reasons") or counts)
    return {
        "num_read": manifest.get("num_read") or 0,
        "num_rows": reasons.total(),
        "reasons": [(reason, count) for reason, count in reasons.most_common() if count],
        "shown": shown,
        "leakage": manifest.get("leakage"),
    }
