"""Time steps of batch shapes on synthetic batches, in one worker of a group.

Without Ray; all ranks do the same.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mmray import objectives
from mmray.engine import precision
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import dry_run, synthetic_step
from mmray.engine.metrics.timers import PeakMemory
from mmray.engine.optimizer import set_lr
from mmray.engine.parallel.device_defaults import configure_torch, resolve_auto
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.run_state import TrainState
from mmray.engine.step import optimizer_step
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.protocol import RANDOM_WEIGHTS
from mmray.models.synthetic import synthetic_rows
from mmray.tuning.shape import Measurements, Visit, next_micro_batch_size

if TYPE_CHECKING:
    from mmray.config import Config

MAX_STEPS = 60  # timed steps of a visit
WINDOW_S = 0.6  # duration of a visit, if a step is shorter
Report = Callable[[dict[str, str]], Any]  # called with {"status": text} or {"note": text}


def measure_shapes(config: Config, group: Group, report: Report) -> Measurements:
    """Time batch shapes of the global batch of a config until the best one is known.

    A collective call: all ranks take the same steps on synthetic batches.

    Returns:
        The Measurements, equal on all ranks.

    Raises:
        OutOfMemoryError: Not even one row fits, or memory ran out although the shape had fitted.
    """
    device = group.device
    if group.rank > 0:
        report = lambda _: None  # noqa: E731
    precision.seed_everything(config.train.seed, config.train.deterministic)
    config = config.replace(train=resolve_auto(config.train, group))
    configure_torch(config.train, device)
    report({"status": "building the model"})
    model = build_model(config, group, report)
    objective = objectives.build(config.objective)
    size = config.batch.global_
    assert size is not None, "resolved by the driver"
    report({"status": "searching the largest micro-batch that fits"})
    shape = BatchShape(size, ceil(size / group.world_size), group.world_size, auto=True)
    shape, _ = dry_run(config, model, objective, group, shape, steps=1)
    measurements = Measurements(size, group.world_size, shape.micro_batch_size)
    state = TrainState.build(config.train, config.optimizer, model, objective, group)
    # Random rows must not lead to infinite weights, whose updates are skipped.
    set_lr(state.optimizer, 0.0)
    while (micro := next_micro_batch_size(measurements)) is not None:
        if micro not in measurements.step_times():
            report({"status": f"timing micro-batches of {micro}"})
        measurements.visits.append(time_shape(config, state, micro))
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
        model = build(config.model, config.model.vocab_size, RANDOM_WEIGHTS)
        report({"note": f"random weights in the shape of the settings: {reason}"})
    assert model is not None
    return apply_transforms(model, config.train, config.optimizer, group).train()


def time_shape(config: Config, state: TrainState, micro_batch_size: int) -> Visit:
    """Time steps of a batch shape that fits; a collective call that returns the same on all ranks.

    Returns:
        A Visit: `step_s` is the median step of the slowest rank, `peak_gib` the largest of a rank.
    """
    group = state.group
    _reset_peak_memory(group.device)
    memory = PeakMemory(group.device)
    state = replace(state, memory=memory)
    rows = ceil((config.batch.global_ or 1) / group.world_size)
    batch = synthetic_step(
        partial(synthetic_rows, state.module, config.model, device=group.device),
        micro_batch_size,
        rows,
    )
    # A GPU holds the next batch too, which is copied to it during the step.
    next_batch = [
        column.clone()
        for micro_batch in batch.micro_batches
        for column in micro_batch.values()
        if group.device.type == "cuda"
    ]
    seed_of = partial(precision.micro_seed, config.train.seed, 0, group.rank)

    def time_step() -> float:
        start_s = time.perf_counter()
        optimizer_step(state, batch, seed_of)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        return time.perf_counter() - start_s

    # The first step allocates, and is slower than others.
    slowest_s = max(group.all_gather_objects(time_step()))
    num_steps = min(MAX_STEPS, max(1, ceil(WINDOW_S / slowest_s)))
    own = (float(np.median([time_step() for _ in range(num_steps)])), memory.peak_gib())
    step_s, peak_gib = np.max(group.all_gather_objects(own), axis=0).tolist()
    next_batch.clear()
    return Visit(micro_batch_size, step_s, peak_gib)


def _reset_peak_memory(device: torch.device) -> None:
    """Release what earlier steps allocated, so that the next peak is measured in the next steps."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
