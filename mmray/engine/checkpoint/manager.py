"""What is kept of a run while it trains: its checkpoints and the files that grow. For worker.py.

The keeper is rank 0; of a model that is cut over the ranks, the others are helpers who write their own parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from mmray.engine.checkpoint import files as checkpoint
from mmray.engine.checkpoint.async_saver import AsyncSaver
from mmray.engine.metrics.writers import LogUploader, MetricsLog
from mmray.errors import StorageError, TrainingError
from mmray.evaluate.build import best_metric
from mmray.storage import lease
from mmray.storage.paths import AnyPath

if TYPE_CHECKING:
    from mmray.config import Config


MAX_WAIT_S = 10.0  # for a write under way, while other ranks stand in a collective


class CheckpointManager:
    """Writes checkpoints beside the training into `folder`, as the holder of the lease `fence`.

    `about` goes into each meta.json, the number of ranks (`world`) among it. `tell` hears, with a label, what the
    storage did not take while the run goes on. `ranks` is the process group, on hosts and for this alone, of a model
    that is cut over them.
    """

    def __init__(
        self,
        folder: AnyPath,
        fence: int,
        config: Config,
        about: dict[str, Any],
        tell: Callable[[str, str], None],
        ranks: Any = None,
    ):
        self._ranks = ranks
        alone_or_cut = ranks is not None or about["world"] == 1
        self._most_s = None if alone_or_cut else config.cluster.collective_timeout_s / 2
        self._folder, self._config, self._about = folder, config, about
        self._check = partial(lease.check_fence, folder, fence)
        self._tell_storage, self._tell = partial(tell, "storage"), partial(tell, "checkpoint")
        self.growing = LogUploader(folder, self._tell_storage, self._check)
        self.writer = AsyncSaver(self._tell)

    def log_from(self, step: int) -> MetricsLog:
        """The log of the steps after `step`."""
        return MetricsLog(self.growing.here, step, self._tell_storage, self._check)

    def save(
        self, step: int, rows_consumed: int, state: dict[str, Any], metrics: dict[str, Any], last: bool
    ) -> float | None:
        """Have a checkpoint written; answers what the one before cost, in seconds.

        Where that one is still under way, as on a storage that stalls, this one is left out, unless it is the `last`:
        other ranks stand in their next step's collective meanwhile, which does not wait for ever. Parts of a model that
        is cut are written by all ranks, which wait together; and alone, nobody stands anywhere.
        """
        meta = {
            "step": step,
            "rows_consumed": rows_consumed,
            **self._about,
            "config": self._config.model_dump(mode="json", by_alias=True),
            "metrics": metrics,
        }
        if not self.writer.submit(state, partial(self._write, step, meta), None if last else self._patience_s(metrics)):
            self._tell(
                f"step {step} has no checkpoint: the storage has not yet taken the one before. The run goes on, and "
                "will try again at its next checkpoint"
            )
        return self.writer.cost_s

    def _patience_s(self, metrics: dict[str, Any]) -> float | None:
        """How long a checkpoint waits for the one before: what was scored as long as may be, for it may be the best."""
        if self._most_s is None:
            return None
        scored = any(name.startswith("evaluate/") for name in metrics)
        return self._most_s if scored else min(MAX_WAIT_S, self._most_s)

    def close(self) -> None:
        """The last checkpoint is there, or its error is raised, and all that was logged."""
        try:
            self.writer.close()
        finally:
            self.growing.close()

    def _write(self, step: int, meta: dict[str, Any], state: dict[str, Any]) -> None:
        """Write a checkpoint, unless another run has taken the folder over; first what was logged up to it."""
        folder, check = self._folder / "checkpoints", partial(self._begin, step)
        if self._ranks is None:
            check()
            model_state = state.pop("model")
            checkpoint.save(folder, step, model_state, state, meta)
        else:
            checkpoint.save_shards(folder, step, state, meta, self._ranks, check)
        try:
            checkpoint.prune(folder, self._config.train.keep_checkpoints, best_metric(self._config))
        except TrainingError as error:  # the new one is there, which is what counts
            self._tell(str(error))

    def _begin(self, step: int) -> None:
        """This run still has the folder, and what was logged is there."""
        try:
            self._check()
            self.growing.push()
        except OSError as error:
            raise StorageError(f"the storage does not answer, so step {step} has no checkpoint: {error}") from error


class ShardWriter:
    """On every rank but the first: writes its part of each checkpoint, beside the training, as the keeper does."""

    def __init__(self, folder: AnyPath, ranks: Any):
        self._folder, self._ranks, self._writer = folder / "checkpoints", ranks, AsyncSaver()

    def save(
        self, step: int, rows_consumed: int, state: dict[str, Any], metrics: dict[str, Any], last: bool
    ) -> float | None:
        """Have this rank's part written; the keeper knows the rest."""
        self._writer.submit(state, partial(self._write, step))
        return self._writer.cost_s

    def close(self) -> None:
        """The last part is there, or its error is raised."""
        self._writer.close()

    def _write(self, step: int, state: dict[str, Any]) -> None:
        checkpoint.save_shards(self._folder, step, state, {}, self._ranks)


# When to write a checkpoint: after a fixed number of steps, or so rarely that writing takes a small share of the time.
#
# Pure; loop.py asks it after each step. Every rank must come to the same answer, so what rank 0 measured goes to all.
COST_SHARE = 0.02  # of the training time, at most, for checkpoints
FIRST_STEPS = 10  # until something is measured: after so many steps, then after twice as many, and so on


def steps_between_checkpoints(step_s: float | None, cost_s: float | None, steps_taken: int) -> int:
    """Steps to the next checkpoint from the seconds of a step and of a write; None: not measured yet."""
    if not step_s or cost_s is None:
        return max(FIRST_STEPS, steps_taken)
    return max(1, math.ceil(cost_s / (COST_SHARE * step_s)))


@dataclass
class CheckpointSchedule:
    """The step of the next checkpoint, for a run that goes on after `begin` steps."""

    every: int | Literal["auto"]
    begin: int
    _next: int = 0

    def __post_init__(self) -> None:
        self._next = self.begin + FIRST_STEPS

    def due(self, step: int) -> bool:
        if self.every == "auto":
            return step >= self._next
        return self.every > 0 and step % self.every == 0

    def written(self, step: int, steps: int) -> None:
        """A checkpoint was taken at `step`; with `auto` the next one is `steps` later."""
        self._next = step + steps
