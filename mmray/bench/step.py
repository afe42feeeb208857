"""`mmray bench step`: overhead of the training loop against a bare PyTorch loop.

Both loops train the same model on the same synthetic batches in the same processes (one per worker, gloo on CPUs, NCCL
on GPUs) in ABBA order. The result is the median ratio over pairs of adjacent windows. Uses no Ray and no data.
"""

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
from mmray.bench.spawn import device_of, idle_gpu_notes, spawn_workers
from mmray.bench.timing import describe_machine
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine import optimizer as optimizers
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.optimizer import lr_at
from mmray.engine.parallel import wrap as parallel
from mmray.engine.parallel.transforms import apply_transforms, compile_branches
from mmray.engine.precision import seed_everything, select_precision
from mmray.engine.run_state import TrainSpec
from mmray.errors import UsageError
from mmray.models.build import build, random_init_architecture
from mmray.models.synthetic import synthetic_batch

if TYPE_CHECKING:
    from mmray.config import Config


Batch = dict[str, Tensor]


def train_baseline(
    model: nn.Module,
    batches: list[Batch],
    config: Config,
    device: torch.device,
    steps: int,
    on_step: Callable[[int], None],
) -> float:
    """Run `steps` steps of the bare loop on this rank's batches; return the last loss.

    Has no accumulation, checkpoints, logging or NaN checks; its losses equal those of engine/loop.py (tested).
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    net = parallel.wrap(model.train(), Group.current(device))  # the same DDP in both loops
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
        image, text = _all_gather_with_grad(torch.cat([image, text], dim=1)).chunk(2, dim=1)
    logits = outputs["logit_scale"] * image @ text.T
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def _all_gather_with_grad(rows: Tensor) -> Tensor:
    """Gather the rows of all ranks, keeping the graph of this rank's rows."""
    world = dist.get_world_size()
    rows.register_hook(lambda gradient: gradient * world)  # undo DDP's averaging: only this rank has the gradient
    parts = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(parts, rows.detach())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


WARM_STEPS = 2  # per window, not timed: allocation, DDP's buckets
NUM_BATCHES = 4  # used in rotation
VOCAB_SIZE = 30522  # of BERT; used if the config has none


def bench_step(config: Config, pairs: int = 10, window_s: float = 3.0) -> dict[str, Any]:
    """Measure samples/s of both loops in `pairs` pairs of windows of about `window_s` seconds.

    Returns {"machine", "batch", "ratios": {"loop_vs_bare": median}, "spread": {"loop_vs_bare": {...}}, "rows"}, one row
    per pair with both last losses. A step is one micro-batch per worker, because a bare loop cannot accumulate a
    contrastive loss. Raises UsageError, ResourceError.
    """
    if config.objective.kind != "contrastive":
        raise UsageError(f"bench step supports objective.kind `contrastive` only, got `{config.objective.kind}`")
    micro, workers = resolve_batch_shape(config.batch, config.cluster.max_workers).micro, config.cluster.max_workers
    rows = spawn_workers(partial(_pairs, micro=micro, pairs=pairs, window_s=window_s), config)
    ratios = [row["loop_vs_bare"] for row in rows]
    return {
        "machine": describe_machine(device_of(config)),
        "batch": f"micro {micro} x accumulation 1 x workers {workers} = {micro * workers} rows per step",
        "ratios": {"loop_vs_bare": statistics.median(ratios)},
        "spread": {"loop_vs_bare": {"min": min(ratios), "max": max(ratios), "pairs": len(ratios)}},
        "rows": rows,
        "notes": idle_gpu_notes(config),
    }


@dataclass
class Window:
    """Callback: time from the end of the warm-up to the last step."""

    last_step: int
    device: torch.device
    began_s: float = field(default=0.0)
    took_s: float = field(default=0.0)

    def on_step(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        if step not in (WARM_STEPS, self.last_step):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # wait for queued kernels
        now_s = time.perf_counter()
        if step == WARM_STEPS:
            self.began_s = now_s
        else:
            self.took_s = now_s - self.began_s


@dataclass(frozen=True)
class Bench:
    """Model and batches of one rank; each window trains a new copy of the model."""

    config: Config
    group: Group
    model: nn.Module
    batches: list[Batch]
    log: MetricsLog | None

    def loop_window(self, steps: int) -> tuple[float, float]:
        """Return (seconds, last loss) of a window of mmray's loop."""
        rows = len(self.batches[0]["valid"])
        every = rows * self.group.world
        plan = SamplePlan(
            num_rows=every * steps,
            global_rows=every,
            world=self.group.world,
            micro=rows,
            seed=self.config.train.seed,
            steps=steps,
        )
        window = Window(steps, self.group.device)
        task = TrainSpec(
            model=self._copy(),
            objective=objectives.build(self.config.objective),
            plan=plan,
            group=self.group,
            train=self.config.train,
            optimizer=self.config.optimizer,
            log=self.log,
            callbacks=(window,),
        )
        outcome = loop.run(task, self._steps(plan))
        return window.took_s, outcome.metrics["train/loss"]

    def bare_window(self, steps: int) -> tuple[float, float]:
        """Return (seconds, last loss) of a window of the bare loop."""
        window = Window(steps, self.group.device)
        model = self._copy().to(self.group.device)
        loss = train_baseline(model, self.batches, self.config, self.group.device, steps, on_step=window.on_step)
        return window.took_s, loss

    def _copy(self) -> nn.Module:
        return compile_branches(deepcopy(self.model), self.config.train)

    def _steps(self, plan: SamplePlan) -> Iterator[list[Batch]]:
        for step in range(plan.steps):
            positions = torch.from_numpy(plan.positions(step, self.group.rank))
            yield [self.batches[step % NUM_BATCHES] | {"pos": positions}]


def measure(bench: Bench, pairs: int, window_s: float) -> list[dict[str, float]]:
    """Return one row per pair; all ranks run the same windows, timed on rank 0."""
    steps = _steps_of_a_window(bench, window_s)
    bench.loop_window(steps)  # the first window imports TensorBoard
    rate = len(bench.batches[0]["valid"]) * bench.group.world * (steps - WARM_STEPS)
    rows = []
    for pair in range(pairs):
        found: dict[str, tuple[float, float]] = {}
        for arm in ("loop", "bare") if pair % 2 == 0 else ("bare", "loop"):
            gc.collect()  # the previous window's DDP is a reference cycle
            found[arm] = bench.loop_window(steps) if arm == "loop" else bench.bare_window(steps)
        row = {f"{arm}_samples_per_s": round(rate / took_s, 2) for arm, (took_s, _) in found.items()}
        row |= {f"{arm}_loss": round(loss, 6) for arm, (_, loss) in found.items()}
        rows.append({"pair": pair, "loop_vs_bare": round(found["bare"][0] / found["loop"][0], 4)} | row)
    return rows


def _steps_of_a_window(bench: Bench, window_s: float) -> int:
    """Return the steps (warm-up included) of a window of about `window_s` seconds, a multiple of the log interval."""
    every = bench.config.train.log_every
    took_s, _ = bench.bare_window(WARM_STEPS + 4)
    wanted = max(4, round(window_s / (took_s / 4)))
    return int(bench.group.broadcast_object(-(-(WARM_STEPS + wanted) // every) * every))


def _pairs(
    config: Config, group: Group, folder: Path, micro: int, pairs: int, window_s: float
) -> list[dict[str, float]]:
    """Entry point of one worker."""
    log = MetricsLog(folder) if group.rank == 0 else None
    rows = measure(build_bench(config, group, micro, log), pairs, window_s)
    if log is not None:
        log.close()
    return rows


def build_bench(config: Config, group: Group, micro: int, log: MetricsLog | None = None) -> Bench:
    """Build the model of `config` as a worker does, with random weights, and this rank's synthetic batches."""
    trained = config.prepare.vocab_size if config.model.inputs.tokenizer == "trained" else 0
    vocab_size = config.model.vocab_size or trained or VOCAB_SIZE
    seed_everything(config.train.seed, config.train.deterministic)
    model = build(config.model, vocab_size, random_init_architecture(config.model, vocab_size))
    model = apply_transforms(model, config.train, config.optimizer, group.device)
    seeds = [group.rank * NUM_BATCHES + number for number in range(NUM_BATCHES)]
    batches = [synthetic_batch(config.model.inputs, vocab_size, micro, "cpu", seed) for seed in seeds]
    if group.device.type == "cuda":
        batches = [{name: column.pin_memory() for name, column in batch.items()} for batch in batches]
    return Bench(config, group, model, batches, log)
