"""`mmray bench step`: the training loop against two loops written by hand, on the same synthetic
batches.

`bare` is the loop without mmray at the same settings: what mmray's loop costs. `best` is the
fastest loop one writes by hand for the device: the whole global batch in one pass, the precision of
the device, compiled blocks, channels last, TF32, fused AdamW, and batches copied from pinned memory
one step ahead. What mmray's defaults leave unused shows there.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmray import objectives
from mmray.bench.hand_loops import (
    Batch,
    baseline_loss,
    compile_blocks,
    copy_ahead,
    copy_to,
    fast_kernels,
    train_by_hand,
)
from mmray.bench.results import compare, describe_machine
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.batch import BatchShape, resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import dry_run
from mmray.engine.metrics.writers import Metrics, MetricsLog
from mmray.engine.optimizer import freeze_parameters
from mmray.engine.parallel.cuda_graphs import graph_branches
from mmray.engine.parallel.device_defaults import configure_torch, resolve_auto
from mmray.engine.parallel.strategy import use_channels_last
from mmray.engine.parallel.transforms import (
    apply_transforms,
    branches_of,
    compile_branches,
)
from mmray.engine.precision import Precision, seed_everything, select_precision
from mmray.engine.run_state import LoopResult, TrainSpec
from mmray.errors import (
    UsageError,
)
from mmray.models.build import build
from mmray.models.protocol import PRETRAINED, RANDOM_WEIGHTS, WeightSource
from mmray.models.synthetic import synthetic_batch
from mmray.training.resolve import with_default_vocab
from mmray.training.workers.local import measure_in_worker

if TYPE_CHECKING:
    from mmray.config import Config
WARMUP_STEPS = 3  # not timed: allocation, compilation
NUM_BATCHES = 4  # used in rotation
NUM_ROWS = 2**30  # so that no step has padding
# steps -> seconds of the timed steps, and the last loss
Window = Callable[[int], tuple[float, float]]


def bench_step(config: Config, pairs: int = 10, window_s: float = 3.0) -> dict[str, Any]:
    """Compare mmray's training loop with two PyTorch loops written by hand, on synthetic batches.

    `bare` has the settings of the config. `best` has the settings that are fastest on this device.
    One worker is measured, with its share of the global batch.

    Args:
        config: The model and the batch; the objective must be `contrastive`.
        pairs: Number of rounds, in each of which every loop is timed once.
        window_s: Approximate seconds of each timing.

    Returns:
        `machine`, `batch` (text), `ratios` (samples/s of mmray's loop relative to the others:
        `loop_vs_bare`, `loop_vs_best`; medians over the rounds), `spread` (by ratio `min` and `max`
        over the rounds, and `pairs`, their number), and `rows`: a dict per loop with its name as
        `arm`, and medians of `samples_per_s` (with `lowest` and `highest`) and of the last `loss`.

    Raises:
        UsageError: The objective or the settings are not supported.
        ResourceError: `cluster.accelerator` is `gpu`, and there is none.
        TrainingError: The worker process failed.
    """
    from mmray.training.validate import unsupported_reasons

    if config.objective.kind != "contrastive":
        raise UsageError(
            f"bench step supports objective.kind `contrastive` only, got `{config.objective.kind}`"
        )
    if reasons := unsupported_reasons(config):
        raise UsageError("\n".join(reasons))
    shape = resolve_batch_shape(config.batch, config.cluster.max_workers)
    shape = replace(shape, global_batch_size=shape.rank_batch_size, world_size=1)
    with tempfile.TemporaryDirectory(prefix="mmray-bench-") as folder:
        measure = partial(
            _measure, folder=Path(folder), shape=shape, pairs=pairs, window_s=window_s
        )
        measured = measure_in_worker(measure, config.with_cluster(workers=1))
    micro = measured.pop("micro")
    batch = f"micro {micro} x accumulation 1 = {micro} rows per step"
    if micro < shape.global_batch_size:
        batch += f"; loop_vs_best: {shape.global_batch_size} rows per step"
    return measured | {"batch": batch}


def _measure(
    config: Config,
    group: Group,
    _report: object,
    folder: Path,
    shape: BatchShape,
    pairs: int,
    window_s: float,
) -> dict[str, Any]:
    log = MetricsLog(folder)
    bench = build_bench(config, group, shape.micro_batch_size, log, shape.global_batch_size)
    if shape.auto:
        bench = replace(bench, micro=bench.probe_memory(shape)[0].micro_batch_size)
    result = measure_loops(bench, pairs, window_s)
    log.close()
    return {"machine": describe_machine(group.device)} | result


def measure_loops(bench: Bench, pairs: int, window_s: float) -> dict[str, Any]:
    """Time mmray's loop and two loops written by hand, in several rounds.

    The loops are `loop` (mmray's), and two written by hand: `bare` with the settings of the config,
    and `best` with the fastest settings of the device. If `micro` is less than the rows of a step,
    `accumulated` is mmray's loop on whole steps, and `best` is compared with it, because both see
    all rows.

    Args:
        bench: Model and batches of this rank.
        pairs: Number of rounds, in each of which every loop is timed once.
        window_s: Approximate seconds of each timing.

    Returns:
        `micro` (rows of a micro-batch), `ratios` (samples/s of mmray's loop relative to the others:
        `loop_vs_bare`, `loop_vs_best`; medians over the rounds), `spread` (by ratio `min` and `max`
        over the rounds, and `pairs`, their number), and `rows`: a dict per loop with its name as
        `arm`, and medians of `samples_per_s` (with `lowest` and `highest`) and of the last `loss`.
    """
    took_s, _ = bench.bare_window(WARMUP_STEPS + 4)
    row_s = took_s / 4 / bench.micro
    best_rows = bench.best_rows()

    def steps_of(rows: int) -> int:
        return WARMUP_STEPS + max(4, round(window_s / (row_s * rows)))

    def measure(window: Window, rows: int, steps: int) -> dict[str, float]:
        took_s, loss = window(steps)
        rate = rows * (steps - WARMUP_STEPS) / took_s
        return {"samples_per_s": rate, "loss": loss}

    log_every = bench.config.train.log_every
    steps = -(-steps_of(bench.micro) // log_every) * log_every
    best = partial(bench.best_window, rows=best_rows)
    arms = {
        "loop": partial(measure, bench.loop_window, bench.micro, steps),
        "bare": partial(measure, bench.bare_window, bench.micro, steps),
        "best": partial(measure, best, best_rows, steps_of(best_rows)),
    }
    ratios = {"loop_vs_bare": ("loop", "bare"), "loop_vs_best": ("loop", "best")}
    if bench.micro < bench.rank_rows:
        whole = partial(bench.loop_window, accumulated=True)
        whole_steps = steps_of(bench.rank_rows)
        arms["accumulated"] = partial(measure, whole, bench.rank_rows, whole_steps)
        ratios["loop_vs_best"] = ("accumulated", "best")
    bench.loop_window(steps)  # the first window imports TensorBoard
    return {"micro": bench.micro} | compare(arms, pairs, "samples_per_s", ratios)


@dataclass
class StepTimer:
    """Callback of a training loop that measures the seconds of the steps after the warm-up.

    Args:
        device: Its kernels must have finished before a time is taken.
        until: Last step that is measured.
        took_s: Filled after the last step.
    """

    device: torch.device
    until: int
    took_s: float = 0.0
    _start_s: float = 0.0

    def on_step(self, step: int, metrics: Metrics | None = None) -> None:
        if step not in (WARMUP_STEPS, self.until):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # wait for queued kernels
        self.took_s = time.perf_counter() - self._start_s
        if step == WARMUP_STEPS:
            self._start_s = time.perf_counter()


@dataclass(frozen=True)
class Bench:
    """Model and synthetic batches of one rank; `build_bench` makes it.

    `train(model, shape, steps)` runs mmray's loop, and `loop_window`, `bare_window` and
    `best_window` time a loop and return (seconds, last loss).

    Attributes:
        config: The config, without `auto` in `train`.
        group: This rank and its process group.
        model: The model, not wrapped.
        batches: Columns by name on the CPU, each with at least `micro` rows.
        micro: Rows of a micro-batch.
        log: Receives the metrics of mmray's loop; None: they are not written.
    """

    config: Config
    group: Group
    model: nn.Module
    batches: list[Batch]  # each has at least `micro` rows, at most all rows of this rank in a step
    micro: int
    log: MetricsLog | None = None

    @property
    def rank_rows(self) -> int:
        """Rows of this rank in a step."""
        return len(self.batches[0]["valid"])

    def train(self, model: nn.Module, shape: BatchShape, steps: int, **options: Any) -> LoopResult:
        """Run mmray's training loop on the synthetic batches.

        Args:
            options: Other fields of TrainSpec, such as `callbacks`.
        """
        plan = SamplePlan(
            num_rows=NUM_ROWS,
            global_batch_size=shape.global_batch_size,
            world_size=1,
            seed=self.config.train.seed,
            steps=steps,
        )
        spec = synthetic_run(self.config, self.group, model, plan, shape, **options)
        return loop.train_loop(spec, micro_batches(plan, shape, self.batches))

    def probe_memory(self, shape: BatchShape) -> tuple[BatchShape, dict[str, float]]:
        """Search the largest micro-batch that fits if `shape.auto`, and measure its memory, as a
        run does.
        """
        objective = objectives.build(self.config.objective)
        return dry_run(self.config, self.model, objective, self.group, shape, steps=1)

    def loop_window(self, steps: int, accumulated: bool = False) -> tuple[float, float]:
        """Time steps of mmray's loop on a copy of the model; the first WARMUP_STEPS are not timed.

        Args:
            accumulated: Whether a step has all rows of this rank, or else one micro-batch.
        """
        rows = self.rank_rows if accumulated else self.micro
        shape = BatchShape(rows, self.micro, world_size=1)
        timer = StepTimer(self.group.device, until=steps)
        model = self.copy_of_model(shape)
        metrics = self.train(model, shape, steps, callbacks=(timer,), log=self.log).metrics
        return timer.took_s, metrics["train/loss"]

    def bare_window(self, steps: int) -> tuple[float, float]:
        """Time the loop written by hand with the settings of the config, on a copy of the model.

        Args:
            steps: Number of steps of one micro-batch; the first WARMUP_STEPS (3) are not timed.
        """
        device = self.group.device
        precision = select_precision(self.config.train.precision, device)
        batches = copy_to(device, self._rows(self.micro))
        shape = BatchShape(self.micro, self.micro, world_size=1)
        model = self.copy_of_model(shape).to(device)
        return self._window_by_hand(model, batches, precision, steps)

    def best_window(self, steps: int, rows: int) -> tuple[float, float]:
        """Time the loop written by hand with the fastest settings of the device, on a copy of the
        model.

        Args:
            steps: Number of steps; the first WARMUP_STEPS (3) are not timed.
            rows: Rows of this rank in a step, which are computed in one pass.

        Returns:
            Seconds of the timed steps, and the last loss.
        """
        device = self.group.device
        spec = self.config.model
        # A new model, because the other one has the transforms of the config.
        model = build(spec, spec.vocab_size, RANDOM_WEIGHTS)
        model.load_state_dict(self.model.state_dict())
        freeze_parameters(model, self.config.optimizer.freeze)
        model.to(device)
        use_channels_last(model)
        batches = (copy_ahead if device.type == "cuda" else copy_to)(device, self._rows(rows))
        compile_blocks(model, device)
        self._use_graphs(model, BatchShape(rows, rows, world_size=1))
        with fast_kernels():
            return self._window_by_hand(model, batches, select_precision("auto", device), steps)

    def best_rows(self) -> int:
        """Return the number of rows of this rank in a step of the fastest loop written by hand: all
        of them, or as many as fit into memory in one pass.
        """
        shape = BatchShape(self.rank_rows, self.rank_rows, world_size=1, auto=True)
        return self.probe_memory(shape)[0].micro_batch_size

    def _window_by_hand(
        self, model: nn.Module, batches: Iterator[Batch], precision: Precision, steps: int
    ) -> tuple[float, float]:
        timer = StepTimer(self.group.device, until=steps)

        def loss_of(batch: Batch) -> torch.Tensor:
            return baseline_loss(model(batch))

        steps_of_one = ([batch] for batch in batches)
        loss = train_by_hand(
            model, steps_of_one, loss_of, self.config, precision, steps, timer.on_step
        )
        return timer.took_s, loss

    def _rows(self, rows: int) -> Iterator[Batch]:
        """Yield the first `rows` rows of each batch, in rotation."""
        return (
            {name: column[:rows] for name, column in batch.items()} for batch in cycle(self.batches)
        )

    def copy_of_model(self, shape: BatchShape) -> nn.Module:
        """Return a copy of the model, compiled and with CUDA graphs if the config has them."""
        model = compile_branches(deepcopy(self.model), self.config.train)
        self._use_graphs(model, shape)
        return model

    def _use_graphs(self, model: nn.Module, shape: BatchShape) -> None:
        # Frees the graphs of an earlier window: a branch and its graphs are a reference cycle.
        gc.collect()
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()
        branches = branches_of(model)
        graph_branches(branches, self.config.train, shape, self.group.device, lambda *_: None)


def synthetic_run(
    config: Config,
    group: Group,
    model: nn.Module,
    plan: SamplePlan,
    shape: BatchShape,
    **options: Any,
) -> TrainSpec:
    """Return the arguments of mmray's training loop for a run on synthetic batches.

    Args:
        options: Other fields of TrainSpec, such as `callbacks`.
    """
    return TrainSpec(
        model=model,
        objective=objectives.build(config.objective),
        plan=plan,
        batch_shape=shape,
        group=group,
        train=config.train,
        optimizer=config.optimizer,
        **options,
    )


def micro_batches(
    plan: SamplePlan, shape: BatchShape, batches: list[Batch], first: int = 0
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, as slices of the same few batches.

    Args:
        shape: Rows of a micro-batch; the last one of a step may be smaller.
        batches: Synthetic batches (tensors [B, ...] by column) with equal numbers of rows, used in
            rotation.
        first: First step, from 0.

    Yields:
        The micro-batches of a step. Each has the columns of the batches, with `pos` int64 [B]
        (position of the row in the sample order) and `valid` bool [B] replaced.
    """
    size = len(batches[0]["image"])  # rows of a micro-batch, or of a step
    for step in range(first, plan.steps):
        positions = torch.from_numpy(plan.positions(step, 0))
        micros = []
        for start in range(0, plan.rank_rows, shape.micro_batch_size):
            pos = positions[start : start + shape.micro_batch_size]
            row = start % size
            batch = batches[(step + start // size) % len(batches)]
            rows = {name: column[row : row + len(pos)] for name, column in batch.items()}
            micros.append(rows | {"pos": pos, "valid": (pos >= 0) & (pos < plan.num_rows)})
        yield micros


def build_model(
    config: Config,
    group: Group,
    source: WeightSource = PRETRAINED,
    double: bool = False,
) -> tuple[Config, nn.Module]:
    """Build the model of a config as a worker does.

    Args:
        source: Where weights come from.
        double: Whether the model is in float64.
    """
    seed_everything(config.train.seed, config.train.deterministic)
    config = config.replace(train=resolve_auto(config.train, group))
    configure_torch(config.train, group.device)
    model = build(config.model, config.model.vocab_size, source)
    if double:
        model.double()
    return config, apply_transforms(model, config.train, config.optimizer, group)


def build_bench(
    config: Config,
    group: Group,
    micro: int,
    log: MetricsLog | None = None,
    rank_rows: int | None = None,
    double: bool = False,
) -> Bench:
    """Build the model of a config with random weights, and four synthetic batches for this rank.

    Args:
        log: Receives the metrics of mmray's loop; None: they are not written.
        rank_rows: Rows of this rank in a step, and of each batch; None: `micro`.
        double: Whether the model is in float64.
    """
    config, model = build_model(with_default_vocab(config), group, RANDOM_WEIGHTS, double)
    inputs = config.model.inputs
    batches = [
        synthetic_batch(inputs, config.model.vocab_size, rank_rows or micro, "cpu", seed)
        for seed in range(NUM_BATCHES)
    ]
    if group.device.type == "cuda":
        batches = [
            {name: column.pin_memory() for name, column in batch.items()} for batch in batches
        ]
    return Bench(config, group, model, batches, micro, log)
