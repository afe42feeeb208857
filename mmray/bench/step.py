"""`mmray bench step`: cost of the training loop against a bare loop on the same synthetic batches."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mmray import objectives
from mmray.bench.spawn import describe_machine, select_device, spawn_workers
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine import optimizer as optimizers
from mmray.engine.batch import BatchShape, resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.optimizer import lr_at
from mmray.engine.parallel import strategy
from mmray.engine.parallel.device_defaults import configure_torch, resolve_auto
from mmray.engine.parallel.transforms import apply_transforms, compile_branches
from mmray.engine.precision import seed_everything, select_precision
from mmray.engine.run_state import Callback, LoopResult, TrainSpec
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.train.validate import unsupported_reasons

if TYPE_CHECKING:
    from mmray.config import Config

Batch = dict[str, Tensor]
WARMUP_STEPS = 3  # not timed: allocation, DDP's buckets
NUM_BATCHES = 4  # used in rotation
VOCAB_SIZE = 30522  # of BERT; used if the config has none


def train_baseline(
    model: nn.Module,
    batches: list[Batch],
    config: Config,
    device: torch.device,
    steps: int,
    on_step: Callable[[int], None],
) -> float:
    """Run `steps` steps of a bare loop whose losses equal those of engine/loop.py; return the last loss."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    net = strategy.wrap_model(model.train(), Group.current(device))  # the same DDP in both loops
    precision = select_precision(config.train.precision, device)
    optimizer, scaler = optimizers.build_optimizer(model, config.optimizer), precision.scaler()
    for step, batch in enumerate(islice(cycle(batches), steps)):
        optimizers.set_lr(optimizer, lr_at(step, config.optimizer, steps))
        batch = {name: batch[name].to(device, non_blocking=True) for name in ("image", "input_ids", "attention_mask")}
        with precision.autocast():
            outputs = net(batch)
        loss = baseline_loss(outputs, world)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if config.optimizer.clip_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % config.train.log_every == 0:
            loss.item()
        on_step(step + 1)
    return loss.item()


def baseline_loss(outputs: dict[str, Tensor], world: int) -> Tensor:
    """CLIP loss over the rows of all ranks; gradients flow to this rank's rows only."""
    image, text = outputs["image_embed"], outputs["text_embed"]
    if world > 1:
        rows = torch.cat([image, text], dim=1)
        rows.register_hook(lambda gradient: gradient * world)  # undo DDP's averaging: only this rank has the gradient
        parts = [torch.empty_like(rows) for _ in range(world)]
        dist.all_gather(parts, rows.detach())
        parts[dist.get_rank()] = rows
        image, text = torch.cat(parts).chunk(2, dim=1)
    logits = outputs["logit_scale"] * image @ text.T
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def bench_step(config: Config, pairs: int = 10, window_s: float = 3.0) -> dict[str, Any]:
    """Measure both loops in `pairs` pairs of windows with one micro-batch per step. Raises UsageError."""
    if config.objective.kind != "contrastive":
        raise UsageError(f"bench step supports objective.kind `contrastive` only, got `{config.objective.kind}`")
    if reasons := unsupported_reasons(config):
        raise UsageError("\n".join(reasons))
    micro, workers = resolve_batch_shape(config.batch, config.cluster.max_workers).micro, config.cluster.max_workers
    rows = spawn_workers(partial(_measure_pairs, micro=micro, pairs=pairs, window_s=window_s), config)
    ratios = [row["loop_vs_bare"] for row in rows]
    return {
        "machine": describe_machine(select_device(config)),
        "batch": f"micro {micro} x accumulation 1 x workers {workers} = {micro * workers} rows per step",
        "ratios": {"loop_vs_bare": statistics.median(ratios)},
        "spread": {"loop_vs_bare": {"min": min(ratios), "max": max(ratios), "pairs": len(ratios)}},
        "rows": rows,
    }


def _measure_pairs(
    config: Config, group: Group, folder: Path, micro: int, pairs: int, window_s: float
) -> list[dict[str, float]]:
    log = MetricsLog(folder) if group.rank == 0 else None
    rows = time_pairs(build_bench(config, group, micro, log), pairs, window_s)
    if log is not None:
        log.close()
    return rows


@dataclass
class StepTimer:
    """Callback: seconds of each step after the warm-up, or of all of them together, synchronized with the devices."""

    devices: tuple[torch.device, ...]
    total_until: int | None = None  # measure the total until this step; None: measure each step
    times_s: list[float] = field(default_factory=list)
    _last_s: float = 0.0

    def on_step(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        if self.total_until is not None and step not in (WARMUP_STEPS, self.total_until):
            return
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # wait for queued kernels
        now_s = time.perf_counter()
        if step > WARMUP_STEPS:
            self.times_s.append(now_s - self._last_s)
        self._last_s = now_s


@dataclass(frozen=True)
class Bench:
    """Model and synthetic batches of one rank."""

    config: Config
    group: Group
    model: nn.Module
    batches: list[Batch]  # each is one micro-batch (bench step) or all rows of this rank in a step (bench strategies)
    log: MetricsLog | None = None

    def train(self, model: nn.Module, shape: BatchShape, steps: int, callback: Callback, **options: Any) -> LoopResult:
        """Run `steps` steps of mmray's loop; `options` are fields of TrainSpec."""
        plan = SamplePlan(
            num_rows=2**30,
            global_rows=shape.global_rows,
            world_size=self.group.world_size,
            micro=shape.micro,
            seed=self.config.train.seed,
            steps=steps,
        )
        spec = TrainSpec(
            model=model,
            objective=objectives.build(self.config.objective),
            plan=plan,
            group=self.group,
            train=self.config.train,
            optimizer=self.config.optimizer,
            callbacks=(callback,),
            **options,
        )
        return loop.train_loop(spec, micro_batches(plan, self.group.rank, self.batches))

    def loop_window(self, steps: int) -> tuple[float, float]:
        """Return (seconds, last loss) of a window of mmray's loop on a copy of the model."""
        micro, world = len(self.batches[0]["valid"]), self.group.world_size
        timer = StepTimer((self.group.device,), total_until=steps)
        result = self.train(self._copy(), BatchShape(micro * world, micro, 1, world), steps, timer, log=self.log)
        return sum(timer.times_s), result.metrics["train/loss"]

    def bare_window(self, steps: int) -> tuple[float, float]:
        """Return (seconds, last loss) of a window of the bare loop on a copy of the model."""
        device = self.group.device
        timer = StepTimer((device,), total_until=steps)
        loss = train_baseline(self._copy().to(device), self.batches, self.config, device, steps, timer.on_step)
        return sum(timer.times_s), loss

    def _copy(self) -> nn.Module:
        return compile_branches(deepcopy(self.model), self.config.train)


def micro_batches(plan: SamplePlan, rank: int, batches: list[Batch]) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each step as slices of `batches` in rotation; the last may be smaller."""
    size = len(batches[0]["image"])  # of a micro-batch, or of a step
    for step in range(plan.steps):
        positions = torch.from_numpy(plan.positions(step, rank))
        micros = []
        for start in range(0, plan.rank_rows, plan.micro):
            pos, first = positions[start : start + plan.micro], start % size
            batch = batches[(step + start // size) % len(batches)]
            rows = {name: column[first : first + len(pos)] for name, column in batch.items()}
            micros.append(rows | {"pos": pos, "valid": pos >= 0})
        yield micros


def build_bench(config: Config, group: Group, micro: int, log: MetricsLog | None = None) -> Bench:
    """Build the model of `config` as a worker does, with random weights, and this rank's synthetic batches."""
    trained = config.prepare.vocab_size if config.model.inputs.tokenizer == "trained" else 0
    vocab_size = config.model.vocab_size or trained or VOCAB_SIZE
    seed_everything(config.train.seed, config.train.deterministic)
    config = config.replace(train=resolve_auto(config.train, group))
    configure_torch(config.train, group.device)
    model = build(config.model, vocab_size, architecture={})
    model = apply_transforms(model, config.train, config.optimizer, group.device)
    seeds = [group.rank * NUM_BATCHES + number for number in range(NUM_BATCHES)]
    batches = [synthetic_batch(config.model.inputs, vocab_size, micro, "cpu", seed) for seed in seeds]
    if group.device.type == "cuda":
        batches = [{name: column.pin_memory() for name, column in batch.items()} for batch in batches]
    return Bench(config, group, model, batches, log)


def time_pairs(bench: Bench, pairs: int, window_s: float) -> list[dict[str, float]]:
    """Return one row per pair; all ranks run the same windows, timed on rank 0."""
    log_every = bench.config.train.log_every
    took_s, _ = bench.bare_window(WARMUP_STEPS + 4)
    min_steps = WARMUP_STEPS + max(4, round(window_s / (took_s / 4)))
    steps = int(bench.group.broadcast_object(-(-min_steps // log_every) * log_every))
    bench.loop_window(steps)  # the first window imports TensorBoard
    timed_rows = len(bench.batches[0]["valid"]) * bench.group.world_size * (steps - WARMUP_STEPS)
    rows = []
    for pair in range(pairs):
        results: dict[str, tuple[float, float]] = {}
        for name in ("loop", "bare") if pair % 2 == 0 else ("bare", "loop"):
            gc.collect()  # the previous window's DDP is a reference cycle
            results[name] = bench.loop_window(steps) if name == "loop" else bench.bare_window(steps)
        row = {f"{name}_samples_per_s": round(timed_rows / took_s, 2) for name, (took_s, _) in results.items()}
        row |= {f"{name}_loss": round(loss, 6) for name, (_, loss) in results.items()}
        rows.append({"pair": pair, "loop_vs_bare": round(results["bare"][0] / results["loop"][0], 4)} | row)
    return rows
