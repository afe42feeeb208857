"""What a sweep shall do: its recipe, search space, goal and budget."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mmray.config import Config, Train
from mmray.config.search_space import Space
from mmray.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """Limits of a sweep over all its commands; None: no limit.

    Attributes:
        seconds: Longest time in seconds.
        gpu_seconds: Largest sum over the trials of their seconds times their GPUs.
    """

    seconds: float | None = None
    gpu_seconds: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> Budget:
        """Parse the value of `--budget`.

        Args:
            text: A time such as `2h`, `30m` or `90s`, or GPU-hours such as `40gpu-hours`; None or
                empty: no limit.

        Returns:
            A Budget: `seconds` or `gpu_seconds` has the limit, the other one is None; both None
            without a limit.

        Raises:
            UsageError: The text has another form, or the number is 0.
        """
        if not text:
            return cls()
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|gpu-hours)", text)
        if match is None or float(match[1]) == 0:
            raise UsageError(
                f"--budget {text}: write a time such as 2h or 30m, or GPU-hours such as 40gpu-hours"
            )
        number = float(match[1])
        if match[2] == "gpu-hours":
            return cls(gpu_seconds=3600 * number)
        return cls(seconds=number * {"s": 1, "m": 60, "h": 3600}[match[2]])

    def fraction_spent(self, seconds: float, gpu_seconds: float) -> float | None:
        """Return the spent fraction of the budget, 1 or more if nothing is left; None without a
        limit.

        It is that of the time, or if only GPU-seconds are limited, that of the GPU-seconds.

        Args:
            seconds: Seconds of the sweep so far, over all its commands.
            gpu_seconds: Seconds of all trials so far, each multiplied by the number of its GPUs.
        """
        if self.seconds is not None:
            return seconds / self.seconds
        if self.gpu_seconds is not None:
            return gpu_seconds / self.gpu_seconds
        return None


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
        searcher: `random` or `optuna`.
        scheduler: `halving` or `asha`.
        budget: Limit of the time or the GPU-hours.
    """

    base: Config
    length: Train
    space: Space
    goal: str
    concurrency: int | None = None
    searcher: str = "random"
    scheduler: str = "halving"
    budget: Budget = field(default_factory=Budget)
