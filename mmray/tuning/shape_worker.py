"""Time steps of batch shapes on synthetic batches, in one worker of a group.

Without Ray; all ranks do the same.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mmray import objectives
from mmray.engine import precision
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import GIB, free_bytes, headroom_bytes, keep_freed_memory
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.optimizer import set_lr
from mmray.engine.parallel.device_defaults import configure_torch, resolve_auto
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.prefetch import LocalBatch, make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import optimizer_step, zero_gradients
from mmray.errors import OutOfMemoryError, UsageError, first_line, is_out_of_memory
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.tuning.shape import Failure, Measurements, ShapeTask, Visit, next_micro_batch_size

if TYPE_CHECKING:
    from mmray.config import Config

MAX_STEPS = 60  # timed steps of a visit
WINDOW_S = 0.6  # duration of a visit, if a step is shorter
LABEL_TOKENS = 4  # tokens of a synthetic label name
# Called on rank 0 with `status`, `note`, `trying` (global batch and micro-batch) or `measured`.
Report = Callable[[dict[str, Any]], Any]


def measure_shapes(task: ShapeTask, group: Group, report: Report) -> Measurements:
    """Time batch shapes of each global batch until the best one is known.

    A collective call: all ranks take the same steps on synthetic batches.

    Args:
        task: Global batches in rows, and what earlier worker groups measured.
        report: Called with a dict with one or more of `status` and `note` (texts), `trying` (a
            pair, the rows of the global batch and of the micro-batch) and `measured` (a Visit with
            step time and memory, or a Failure with the reason). A batch shape is reported before it
            is timed, so that the driver knows which one killed a worker.

    Returns:
        A Measurements with `visits` (step time and memory of the timed shapes), `failures`,
        `workers` and `limit_gib`, also of earlier groups; equal on all ranks.

    Raises:
        OutOfMemoryError: This rank ran out of memory in a step in which other ranks wait for it.
    """
    config = task.config
    device = group.device
    torch.set_num_threads(config.cluster.num_threads)
    if device.type == "cpu":
        keep_freed_memory()
    precision.seed_everything(config.train.seed, config.train.deterministic)
    config = config.replace(train=resolve_auto(config.train, group))
    configure_torch(config.train, device)
    report({"status": "building the model"})
    stepper = Stepper.create(config, build_model(config, group, report), group)
    measurements = Measurements(
        group.world_size, _memory_limit_gib(group), list(task.visits), list(task.failures)
    )
    for global_batch_size in task.global_batch_sizes:
        if global_batch_size < group.world_size:
            continue
        while (size := next_micro_batch_size(measurements, global_batch_size)) is not None:
            message: dict[str, Any] = {"trying": (global_batch_size, size)}
            if size not in measurements.step_times(global_batch_size):
                message["status"] = (
                    f"global batch of {global_batch_size} in micro-batches of {size}"
                )
            report(message)
            outcome = stepper.measure(global_batch_size, size)
            report({"measured": outcome})
            if isinstance(outcome, Visit):
                measurements.visits.append(outcome)
            else:
                measurements.failures.append(outcome)
    return measurements


def build_model(config: Config, group: Group, report: Report) -> nn.Module:
    """Build the model of a config as a run does, in training mode.

    If its weights cannot be read on every rank, it has random weights in the shape of the settings,
    because the speed does not depend on their values.

    Args:
        group: All ranks; each calls this function.
        report: Called with {"note": text} if weights cannot be read.
    """
    model = None
    reason = ""
    try:
        model = build(config.model, config.model.vocab_size)
    except UsageError as error:
        reason = str(error)
    if group.all_reduce_min(int(model is not None)) == 0:
        model = build(config.model, config.model.vocab_size, architecture={})
        report({"note": f"random weights in the shape of the settings: {reason}"})
    assert model is not None
    use_tokenizer: Any = getattr(model, "use_tokenizer", None)
    if use_tokenizer is not None:
        use_tokenizer(SimpleNamespace(encode=_encode_label_names))
    return apply_transforms(model, config.train, config.optimizer, group).train()


def _encode_label_names(names: list[str]) -> tuple[np.ndarray, list[int]]:
    return np.ones((len(names), LABEL_TOKENS), int), [LABEL_TOKENS] * len(names)


@dataclass
class Stepper:
    """Takes training steps on synthetic batches, with the communication of all ranks.

    `measure(global_batch_size, micro_batch_size)` returns a Visit, with the seconds of a step and
    the peak memory, or a Failure if they do not fit.

    Attributes:
        config: Settings of the run.
        state: Wrapped model, optimizer and objective.
        group: All ranks.
    """

    config: Config
    state: TrainState
    group: Group

    @classmethod
    def create(cls, config: Config, model: nn.Module, group: Group) -> Stepper:
        """Wrap the model for `train.parallel`, and build an optimizer.

        The learning rate is 0, so that the weights do not change.
        """
        objective = objectives.build(config.objective)
        state = TrainState.build(config.train, config.optimizer, model, objective, group)
        # Random rows must not lead to infinite weights, whose updates are skipped.
        set_lr(state.optimizer, 0.0)
        return cls(config, state, group)

    def measure(self, global_batch_size: int, micro_batch_size: int) -> Visit | Failure:
        """Time steps with a global batch and micro-batch; a collective call that returns the same
        on all ranks.

        Returns:
            A Visit: `step_s`, the median seconds of a step of the slowest rank, and `peak_gib`, the
            largest peak memory of a rank. Or with a single rank a Failure, whose `reason` is why
            they do not fit into memory.

        Raises:
            OutOfMemoryError: This rank ran out of memory, and other ranks wait for it.
        """
        device = self.group.device
        _reset_peak_memory(device)
        timers = PhaseTimers(device)
        state = replace(self.state, timers=timers)
        batch: LocalBatch | None = None
        next_batch: list[torch.Tensor] = []
        reason = ""
        try:
            batch = self._make_batch(
                ceil(global_batch_size / self.group.world_size), micro_batch_size
            )
            # A GPU holds the next batch too, which is copied to it during the step.
            if device.type == "cuda":
                next_batch = [
                    column.clone() for rows in batch.micro_batches for column in rows.values()
                ]
            first_s = self._time(state, batch)  # allocates, and is slower than others
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
            if self.group.world_size > 1:
                raise OutOfMemoryError(
                    f"out of memory with micro-batches of {micro_batch_size} rows: {reason}"
                ) from error
        if reason:  # outside `except`: the traceback would keep the step's tensors alive
            batch = None
            next_batch.clear()
            zero_gradients(state)
            return Failure(global_batch_size, micro_batch_size, reason)
        assert batch is not None
        slowest_s = max(self.group.all_gather_objects(first_s))
        num_steps = min(MAX_STEPS, max(1, ceil(WINDOW_S / slowest_s)))
        times_s = [self._time(state, batch) for _ in range(num_steps)]
        own = (float(np.median(times_s)), timers.peak_gib())
        step_s, peak_gib = np.max(self.group.all_gather_objects(own), axis=0).tolist()
        next_batch.clear()
        return Visit(global_batch_size, micro_batch_size, step_s, peak_gib)

    def _make_batch(self, rows: int, micro_batch_size: int) -> LocalBatch:
        """Return the micro-batches of a step of this rank, of `rows` rows in total."""
        spec = self.config.model
        device = self.group.device
        sizes = [min(micro_batch_size, rows - first) for first in range(0, rows, micro_batch_size)]
        return make_local_batch(
            [synthetic_batch(spec.inputs, spec.vocab_size, size, device) for size in sizes]
        )

    def _time(self, state: TrainState, batch: LocalBatch) -> float:
        start_s = time.perf_counter()
        seed_of = partial(precision.micro_seed, self.config.train.seed, 0, self.group.rank)
        optimizer_step(state, batch, seed_of)
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        return time.perf_counter() - start_s


def _reset_peak_memory(device: torch.device) -> None:
    """Release what earlier steps allocated, so that the next peak is measured in the next steps."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _memory_limit_gib(group: Group) -> float:
    """Return the memory that every worker may use, as `batch.micro auto` does
    (engine/memory_probe.py).

    It is the same on all ranks, because they choose the next collective by it.
    """
    device = group.device
    if device.type == "cuda":
        used_gib = torch.cuda.memory_reserved(device) / GIB
    else:
        used_gib = PhaseTimers(device).peak_gib()
    limit_gib = used_gib + free_bytes(group, headroom_bytes(device)) / GIB
    return min(group.all_gather_objects(limit_gib))
