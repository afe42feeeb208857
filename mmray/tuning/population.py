"""Population based training (Jaderberg et al. 2017): at each rung copies of the best trials replace
the worst ones.

Not Ray Tune's scheduler: that holds every trial in memory or in its own checkpoints, draws from
Python's global random numbers, and cannot be restored. Here each choice is a pure function of the
rows, so a repeated command makes it again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmray.config import from_yaml, to_yaml
from mmray.config.search_space import Range, Space, override_settings, round_sampled
from mmray.data.store.manifest import QUARANTINE
from mmray.engine.checkpoint import files
from mmray.errors import TrainingError, UsageError
from mmray.report.sweep import LEARNING_GOALS
from mmray.storage.paths import AnyPath, copy_file, remove_tree, write_atomic
from mmray.tuning.results import Row
from mmray.tuning.trials import CHANGEABLE

QUANTILE = 0.25  # of the population, replaced at each rung
# of each setting; otherwise it is changed by a factor, or to the next listed value
RESAMPLE_PROBABILITY = 0.25
FACTORS = (0.8, 1.25)
COPIED_FILES = ("metrics.jsonl", "tokenizer.json", "data.json", "environment.json", QUARANTINE)


@dataclass(frozen=True)
class Child:
    """A trial that continues the run of `parent` with other settings."""

    parent: str
    settings: dict[str, Any]


def check_sweep(space: Space, goal: str, searcher: str) -> None:
    """Raise UsageError for settings that a resumed run cannot change, and for options without
    effect.
    """
    if goal not in LEARNING_GOALS or searcher != "random":
        raise UsageError(
            "--scheduler pbt needs --goal loss, recall or time-to-quality and --search random; its "
            "later settings come "
            "from the best trials"
        )
    if fixed := [key for key in space.axes if key not in CHANGEABLE]:
        raise UsageError(
            f"--scheduler pbt: {', '.join(fixed)} cannot change during a run; search "
            f"{', '.join(CHANGEABLE)}, or use "
            "--scheduler halving"
        )


def next_generation(
    rows: Sequence[Row], rung: int, size: int, space: Space, maximize: bool
) -> tuple[list[str], list[Child]]:
    """Return the trials that continue after the rung, counted from 0, and the children that fill up
    the population.

    rows: of the trials trained to this rung, failed ones included. size: trials of a population.
    """
    reached = [row for row in rows if len(row["rungs"]) > rung]
    reached.sort(key=lambda row: row["rungs"][rung]["value"], reverse=maximize)
    num_replaced = min(math.ceil(len(reached) * QUANTILE), len(reached) // 2)
    survivors, rng = reached[: len(reached) - num_replaced], random.Random(f"{space.seed} {rung}")
    top = survivors[: max(1, num_replaced)]
    parents = [rng.choice(top) for _ in range(size - len(survivors))] if top else []
    children = [Child(row["trial"], _perturbed(row["settings"], space, rng)) for row in parents]
    return [row["trial"] for row in survivors], children


def _perturbed(settings: dict[str, Any], space: Space, rng: random.Random) -> dict[str, Any]:
    changed = dict(settings)
    for key, axis in space.axes.items():
        resample = rng.random() < RESAMPLE_PROBABILITY
        if isinstance(axis, Range):
            value = axis.at(rng.random()) if resample else settings[key] * rng.choice(FACTORS)
            changed[key] = round_sampled(min(max(value, axis.low), axis.high))
        elif resample or settings[key] not in axis:
            changed[key] = rng.choice(axis)
        else:
            index = axis.index(settings[key]) + rng.choice((-1, 1))
            changed[key] = axis[min(max(index, 0), len(axis) - 1)]
    return changed


def copy_run(parent: AnyPath, child: AnyPath, settings: dict[str, Any]) -> None:
    """Make `child` a run that resumes from the newest valid checkpoint of `parent` with these
    settings.

    Its config.yaml is written last: a folder without one is the rest of a killed copy.
    """
    if (child / "config.yaml").exists():
        return
    remove_tree(child)
    checkpoint = files.latest_valid_checkpoint(parent / "checkpoints", rename=False)
    if checkpoint is None:
        raise TrainingError(
            f"{parent / 'checkpoints'} has no valid checkpoint to continue from; "
            "delete the sweep's folder and run it again"
        )
    copied = child / "checkpoints" / checkpoint.name
    copied.mkdir(parents=True)
    for file in checkpoint.iterdir():
        copy_file(file, copied / file.name)
    for name in COPIED_FILES:
        if name != QUARANTINE or (parent / name).exists():  # without bad rows there is none
            copy_file(parent / name, child / name)
    config = override_settings(
        from_yaml((parent / "config.yaml").read_text(), str(parent)), settings
    )
    write_atomic(child / "config.yaml", to_yaml(config))
