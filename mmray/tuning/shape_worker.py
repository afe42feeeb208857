"""Measure steps of batch shapes in one worker of a group, on synthetic batches.

Without Ray; all ranks do the same.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mmray import objectives
from mmray.engine import precision
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import GIB, HEADROOM, HOST_FRACTION, FakeGroup, keep_freed_memory
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.optimizer import build_optimizer, set_lr
from mmray.engine.parallel import strategy
from mmray.engine.parallel.device_defaults import configure_torch, resolve_auto
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.prefetch import LocalBatch, make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import optimizer_step, zero_gradients
from mmray.errors import OutOfMemoryError, UsageError, first_line, is_out_of_memory
from mmray.machine import free_memory
from mmray.models.build import build
from mmray.models.fusion import LabelTexts
from mmray.models.synthetic import synthetic_batch
from mmray.tuning.shape import (
    ROUNDS,
    Measurements,
    Sample,
    ShapeTask,
    explore,
    fit,
    micro_sizes,
    next_duel,
    predict_rows,
    with_measured,
)

if TYPE_CHECKING:
    from mmray.config import Config

MIN_STEPS, MAX_STEPS, WINDOW_S = 3, 60, 0.6  # timed steps of a visit
MAX_PAIRS_S = 60.0  # the rounds of a global batch end after about this time
ALL_REDUCES = 5
LABEL_TOKENS = 4  # of a synthetic label name
# of rank 0: status, note, trying (rows of a micro-batch and of a step)
Report = Callable[[dict[str, Any]], Any]


def measure_shapes(task: ShapeTask, group: Group, report: Report) -> Measurements:
    """Measure what `task` asks for; each size is reported before, so that the driver knows which
    one killed a worker.

    Raises OutOfMemoryError if this rank runs out of memory where the others wait for it.
    """
    config, device = task.config, group.device
    torch.set_num_threads(config.cluster.num_threads)
    if device.type == "cpu":
        keep_freed_memory()
    precision.seed_everything(config.train.seed, config.train.deterministic)
    config = config.replace(train=resolve_auto(config.train, group))
    configure_torch(config.train, device)
    report({"status": "building the model"})
    model = build_model(config, group, report)
    stepper = Stepper.create(config, model, group)
    if stepper.inner_collectives:
        stepper = stepper.wrapped()
    found = Measurements(group.world_size, _memory_limit_gib(group), stepper.input_gib())
    found.failed_shapes = list(task.failed_shapes)

    def measure(micro: int, accumulation: int) -> Sample | str:
        first = accumulation == 1 and not found.samples
        if failed := found.find_failure(micro, micro * accumulation):
            return failed.reason
        report(
            {"trying": (micro, micro * accumulation)}
            | ({"status": f"micro-batches of {micro}"} if first else {})
        )
        return stepper.measure(micro * accumulation, micro)

    sizes = micro_sizes(
        task.global_rows, [world for world in task.workers if world <= group.world_size]
    )
    explore(measure, sizes, found)
    if not found.samples:
        return found
    if group.world_size > 1 and not stepper.inner_collectives:
        stepper = _measure_communication(task, stepper, found, report)
    costs = fit(found)
    for global_rows in task.global_rows:
        while duel := next_duel(
            with_measured(predict_rows(task, found, costs), found), found, global_rows
        ):
            _measure_pairs([row["micro"] for row in duel], global_rows, stepper, found, report)
    return found


def build_model(config: Config, group: Group, report: Report) -> nn.Module:
    """Build the model as a run does: with its weights, or in the shape of the settings if these
    cannot be read.
    """
    model, reason = None, ""
    try:
        model = build(config.model, config.model.vocab_size)
    except UsageError as error:
        reason = str(error)
    if group.all_reduce_min(int(model is not None)) == 0:
        model = build(config.model, config.model.vocab_size, architecture={})
        report({"note": f"random weights in the shape of the settings: {reason}"})
    assert model is not None
    label_texts = getattr(model, "label_texts", None)
    if isinstance(label_texts, LabelTexts) and label_texts.token_ids is None:
        ids = lambda names: (np.ones((len(names), LABEL_TOKENS), int), [LABEL_TOKENS] * len(names))  # noqa: E731
        label_texts.tokenize(SimpleNamespace(encode=ids))
    model = apply_transforms(model, config.train, config.optimizer, group.device)
    if config.train.parallel in strategy.SHARDED:
        dtype, sync_once = (
            precision.DTYPES[config.train.precision],
            config.train.fsdp_sync == "step",
        )
        model = strategy.wrap_model(
            model, group, config.train.parallel, shard_dtype=dtype, sync_once=sync_once
        )
    return model.train()


@dataclass
class Stepper:
    """Takes synthetic steps.

    Without inner collectives ranks are independent (`FakeGroup`) until `wrapped`.
    """

    config: Config
    state: TrainState
    group: Group  # of all ranks
    inner_collectives: bool

    @classmethod
    def create(cls, config: Config, model: nn.Module, group: Group) -> Stepper:
        mixed = precision.select_precision(config.train.precision, group.device)
        optimizer = build_optimizer(model, config.optimizer)
        # random rows must not lead to infinite weights, whose updates are skipped
        set_lr(optimizer, 0.0)
        inner = strategy.has_inner_collectives(model)
        step_group = group if inner else FakeGroup(group.rank, group.world_size, group.device)
        state = TrainState(
            model=model,
            objective=objectives.build(config.objective),
            group=step_group,
            precision=mixed,
            optimizer=optimizer,
            scaler=mixed.scaler(),
            timers=PhaseTimers(group.device),
            clip_norm=config.optimizer.clip_norm,
        )
        return cls(config, state, group, inner)

    def wrapped(self) -> Stepper:
        """Return a stepper whose steps communicate, as in training."""
        train = self.config.train
        model = strategy.wrap_model(
            self.state.model, self.group, train.parallel, train.grad_compression
        )
        return replace(self, state=replace(self.state, model=model, group=self.group))

    def make_batch(self, rows: int) -> dict[str, Tensor]:
        spec = self.config.model
        return synthetic_batch(spec.inputs, spec.vocab_size, rows, self.group.device)

    def input_gib(self) -> float:
        """GiB of a row: a GPU holds the rows of two steps (engine/prefetch.py)."""
        return (
            (1 + (self.group.device.type == "cuda"))
            * sum(column.nbytes for column in self.make_batch(1).values())
            / GIB
        )

    def measure(self, rows: int, micro: int) -> Sample | str:
        """Time steps of `rows` rows per rank; return the same on all ranks: a sample, or why it
        does not fit.

        Raises OutOfMemoryError if the other ranks wait for this one.
        """
        timers, device = PhaseTimers(self.group.device), self.group.device
        state = replace(self.state, timers=timers)
        _reset_peak_memory(device)
        error, took_s, batch, reserved = "", 0.0, None, None
        try:
            batch = make_local_batch(
                [self.make_batch(min(micro, rows - first)) for first in range(0, rows, micro)]
            )
            if device.type == "cuda":  # the next batch is copied to it meanwhile
                reserved = [
                    column.clone() for each in batch.micro_batches for column in each.values()
                ]
            took_s = self._time(state, batch)  # the first step allocates
        except (RuntimeError, MemoryError) as raised:
            if not is_out_of_memory(raised):
                raise
            error = first_line(raised)
            if not isinstance(state.group, FakeGroup):
                raise OutOfMemoryError(
                    f"out of memory with micro-batches of {micro} rows: {error}"
                ) from raised
        if error:  # outside `except`: the traceback would keep the step's tensors alive
            batch = reserved = None
            zero_gradients(state)
        outcomes = self.group.all_gather_objects(error or took_s)
        if reasons := [
            f"{outcome} (rank {rank})"
            for rank, outcome in enumerate(outcomes)
            if isinstance(outcome, str)
        ]:
            return reasons[0]
        assert batch is not None
        steps = min(MAX_STEPS, max(MIN_STEPS, ceil(WINDOW_S / max(outcomes))))
        timers.pop_s()
        times_s = [self._time(state, batch) for _ in range(steps)]
        optimizer_s = timers.pop_s()["optimizer"] / steps
        peak_gib = timers.peak_gib()
        # DDP keeps the gradients between steps
        if self.group.world_size > 1 and isinstance(state.group, FakeGroup):
            peak_gib += (
                sum(weight.nbytes for weight in state.model.parameters() if weight.requires_grad)
                / GIB
            )
        ranks = self.group.all_gather_objects((float(np.median(times_s)), optimizer_s, peak_gib))
        del reserved
        return Sample(
            micro, ceil(rows / micro), *(max(column) for column in zip(*ranks, strict=True))
        )

    def _time(self, state: TrainState, batch: LocalBatch) -> float:
        start_s = time.perf_counter()
        optimizer_step(
            state, batch, partial(precision.micro_seed, self.config.train.seed, 0, self.group.rank)
        )
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        return time.perf_counter() - start_s


def _measure_communication(
    task: ShapeTask, stepper: Stepper, found: Measurements, report: Report
) -> Stepper:
    """Measure the communication of a step of all ranks that backward does not hide; scale it to
    fewer workers.

    The scale is the time of an all-reduce of the gradients. Returns the stepper that communicates.
    """
    group, rows = stepper.group, max(task.global_rows) // stepper.group.world_size
    micro = max(size for size in fit(found).micros if size <= max(1, rows))
    report({"status": "communication", "trying": (micro, micro)})
    alone = stepper.measure(micro, micro)  # again, so that both are measured at the same time
    stepper = stepper.wrapped()
    together = stepper.measure(micro, micro)
    if isinstance(alone, str) or isinstance(together, str):
        found.too_large, found.reason = micro, str(together)
        return stepper
    exposed_s = max(0.0, together.step_s - alone.step_s)
    gradients = sum(
        weight.numel() for weight in stepper.state.model.parameters() if weight.requires_grad
    )
    values = torch.zeros(gradients, device=group.device)
    worlds = sorted(
        {world for world in (*task.workers, group.world_size) if 1 < world <= group.world_size}
    )
    reduce_s = {world: min(group.time_all_reduces(values, world, ALL_REDUCES)) for world in worlds}
    found.sync_s = {
        world: exposed_s * seconds / reduce_s[group.world_size]
        for world, seconds in reduce_s.items()
    }
    return stepper


def _measure_pairs(
    micros: Sequence[int], global_rows: int, stepper: Stepper, found: Measurements, report: Report
) -> None:
    """Measure shapes of one global batch in alternating order, with communication, until one does
    not fit.
    """
    rows, pairs = ceil(global_rows / stepper.group.world_size), list[dict[int, float]]()
    peaks = found.peak_gib.setdefault(global_rows, {})
    report(
        {
            "status": f"global batch of {global_rows} in micro-batches of "
            f"{' and '.join(map(str, micros))}"
        }
    )
    while len(pairs) < ROUNDS and sum(sum(pair.values()) for pair in pairs) < MAX_PAIRS_S / (
        1 + MIN_STEPS
    ):
        pair: dict[int, float] = {}
        for micro in micros if len(pairs) % 2 == 0 else reversed(micros):
            report({"trying": (micro, rows)})
            sample = stepper.measure(rows, micro)
            if isinstance(sample, str):
                found.failed[global_rows] = micro, sample
                found.pairs[global_rows] = [
                    each for each in found.pairs.get(global_rows, ()) if micro not in each
                ]
                return
            pair[micro], peaks[micro] = sample.step_s, max(sample.peak_gib, peaks.get(micro, 0.0))
        pairs.append(pair)
    found.pairs[global_rows] = [*found.pairs.get(global_rows, ()), *pairs]


def _reset_peak_memory(device: torch.device) -> None:
    """Release what earlier steps allocated, so that the next peak is that of the next steps."""
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
    if group.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(group.device)
        limit_gib = (free + torch.cuda.memory_reserved(group.device) - HEADROOM * total) / GIB
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", group.world_size))
        limit_gib = (
            PhaseTimers(group.device).peak_gib() + HOST_FRACTION * free_memory() / ranks / GIB
        )
    return min(group.all_gather_objects(limit_gib))
