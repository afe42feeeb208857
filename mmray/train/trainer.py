"""One run from config to weights on a Ray cluster: the room's composer.

What it needs of torch is imported while Ray starts, each four seconds of a laptop; what it needs of Ray after that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mmray.cluster.connect import joined

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.train.coordinator import Listener
    from mmray.train.driver import Outcome


def train(config: Config, listener: Listener) -> Outcome:
    """Train `config` to its end, or go on with it; raises MmrayError with its exit code."""
    actors = 1 if config.data.workers == "auto" else config.data.workers
    with joined(config.cluster, actors, beside=partial(check, config)):
        from mmray.train.driver import course

        return course(config, listener)


def check(config: Config) -> None:
    """Raise UsageError for settings that contradict each other, before any data is looked at."""
    from mmray import objectives
    from mmray.engine.batch import shape_of
    from mmray.train import trackers, validate

    shape_of(config.batch, config.cluster.most_workers)
    validate.check(config)
    trackers.check(config)
    objectives.build(config.objective)
