"""What a sweep shall do: its recipe, search space, goal and budget."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmray.config import Config, Train
from mmray.config.search_space import Space
from mmray.errors import UsageError


def parse_budget(text: str | None) -> float | None:
    """Return the seconds of a value of `--budget`, such as `2h`, `30m` or `90s`; None without one.

    Raises:
        UsageError: The text has another form, or the number is 0.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget {text}: write a time such as 2h, 30m or 90s")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True)
class SweepRequest:
    """Recipe, search space, goal and budget of a sweep, as the user has requested it.

    Attributes:
        base: The recipe, with its own training length (steps, samples or epochs), for best.yaml.
        length: Section `train` with the training length of a trial; without any it is that of the
            recipe.
        space: Lists and ranges by searched setting.
        goal: `throughput` (samples/s), `loss` (held-out) or `recall` (recall@1).
        concurrency: Trials at a time; None: one on a single machine, as many as fit on a cluster.
        budget_s: Largest number of seconds of all commands of the sweep; None: no limit.
    """

    base: Config
    length: Train
    space: Space
    goal: str
    concurrency: int | None = None
    budget_s: float | None = None
