"""Scenarios on two gloo ranks, started once; each returns values that test_two_ranks.py checks."""

from __future__ import annotations

import copy
import faulthandler
import os
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop, memory_probe, optimizer, precision
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group
from mmray.engine.metrics.meters import Meter, reduce_over_ranks, rows_sha
from mmray.engine.metrics.timers import PHASES, PhaseTimers, Throughput
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.parallel import wrap
from mmray.engine.parallel.transforms import compile_branches
from mmray.engine.parallel.wrap import ParallelConfig
from mmray.engine.precision import Precision, micro_seed
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.errors import OutOfMemoryError
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.sigmoid import Sigmoid
from tests.engine import toy

WORLD = 2
ROWS = 21  # the second rank has one row of padding
INVALID = (2, 5, 6, 7)
STEPS = 20
GLOBAL_ROWS = 10
LARGE_SCALE = 2.0**20
KINDS = (
    "sigmoid",
    "0.5 * sigmoid",
    "matching",
    "language_modelling",
    "region_text",
    "contrastive + 0.5 * matching + 0.25 * classification + region_text",
    "sigmoid + 0.5 * contrastive",
)


def play(rank: int, folder: str) -> None:
    """Entry point of a rank: all scenarios in one process group."""
    faulthandler.enable()  # prints a traceback on a native crash
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    group = Group.current()
    results = {scene.__name__: scene(group, Path(folder)) for scene in SCENES}
    torch.save(results, f"{folder}/rank-{rank}.pt")
    # No barrier: the last scenario broke the group.
    # Skip interpreter shutdown: gloo's threads may still release tensors of the last collective, which
    # needs the GIL, and abort the process without it (seen in 1 of 20 runs on a busy machine).
    os._exit(0)


def share_of_rank(batch: dict[str, torch.Tensor], group: Group) -> dict[str, torch.Tensor]:
    """The rank's consecutive rows, padded with invalid ones to the same number on each rank."""
    share = -(-len(batch["valid"]) // group.world)
    mine = {name: tensor[group.rank * share : (group.rank + 1) * share] for name, tensor in batch.items()}
    missing = share - len(mine["valid"])
    padded = {name: torch.cat([tensor, torch.zeros_like(batch[name][:missing])]) for name, tensor in mine.items()}
    padded["attention_mask"][:, 0] = 1
    return padded


def steps_of_a_model(
    group: Group,
    micro: int,
    invalid: tuple[int, ...] = INVALID,
    model: torch.nn.Module | None = None,
    steps: int = STEPS,
    **options: Any,
) -> torch.nn.Module:
    model = model or toy.Toy().double()
    state = toy.train_state(model, group, **options)
    for step in range(steps):
        share = make_local_batch(toy.cut(share_of_rank(toy.rows(ROWS, step, invalid), group), micro))
        optimizer_step(state, share, lambda index, step=step: micro_seed(toy.SEED, step, group.rank, index))
    return model


def whole_shares(group: Group, folder: Path) -> torch.Tensor:
    return toy.flat(steps_of_a_model(group, micro=ROWS))


def accumulated_shares(group: Group, folder: Path) -> torch.Tensor:
    return toy.flat(steps_of_a_model(group, micro=4))


def where_gradients_live(group: Group, folder: Path) -> list[int]:
    """Number of storages of the gradients at each training forward, in three steps."""
    counts, model = [], toy.Toy().double()
    model.register_forward_pre_hook(lambda module, _: counts.append(_pieces(module)))
    steps_of_a_model(group, micro=4, model=model, steps=3, objective=toy.Regression())
    return counts


def _pieces(model: torch.nn.Module) -> int:
    return len({w.grad.untyped_storage().data_ptr() for w in model.parameters() if w.grad is not None})


def formats(group: Group, folder: Path) -> list[str]:
    """The result of `auto` if rank 1 has an older GPU than rank 0, and of an explicit setting."""
    there = replace(group, device=torch.device("cuda", 0))
    with patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0) if group.rank == 0 else (7, 0)):
        return [
            precision.select_precision("auto", there.device).name,
            *(precision.common_precision(s, there) for s in ("auto", "bf16")),
        ]


def a_rank_without_rows(group: Group, folder: Path) -> torch.Tensor:
    """Rank 1 has only padding, and fewer micro-batches than rank 0."""
    return toy.flat(steps_of_a_model(group, micro=4, invalid=tuple(range(11, ROWS))))


def row_by_row(group: Group, folder: Path) -> torch.Tensor:
    return toy.flat(steps_of_a_model(group, micro=4, objective=toy.Regression()))


def not_a_number_on_one_rank(group: Group, folder: Path) -> dict[str, Any]:
    model = toy.Toy()
    state = toy.train_state(model, group)
    before = toy.flat(model)
    share = make_local_batch(toy.cut(share_of_rank(toy.rows(ROWS, 0), group), 4))
    poison = model.caption[1].register_forward_hook(lambda module, given, out: out * float("nan"))
    if group.rank == 0:
        poison.remove()
    result = optimizer_step(state, share, lambda index: index)
    return {"finite": result.finite, "unchanged": torch.equal(toy.flat(model), before)}


CLIPPED = ("ddp", "fsdp")


def clipped(group: Group, way: str) -> torch.Tensor:
    model = toy.Branched().double()
    options = {"layout": ParallelConfig(kind=way), "clipped": "branch"}
    return toy.flat(steps_of_a_model(group, 4, model=model, **options))


def clipped_by_branches(group: Group, folder: Path) -> dict[str, torch.Tensor]:
    return {way: clipped(group, way) for way in CLIPPED}


class NanAtStep:
    """A hook that makes a module's output NaN on the last rank at one step."""

    def __init__(self, group: Group, at_step: int):
        self.poisons, self.at_step, self.step = group.rank == group.world - 1, at_step, 1

    def __call__(self, module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out * float("nan") if self.poisons and self.step == self.at_step else out

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        self.step = step + 1


def skipping(group: Group, folder: Path | None) -> dict[str, Any]:
    """The loop with clipping per branch; the third step is not finite on the last rank."""
    model, poison, log = toy.Branched().double(), NanAtStep(group, 3), toy.Lines()
    model.text.register_forward_hook(poison)
    plan = SamplePlan(num_rows=33, global_rows=GLOBAL_ROWS, world=group.world, micro=2, seed=1, steps=8)
    train = SimpleNamespace(**vars(toy.TRAIN) | {"log_every": 1})
    settings = SimpleNamespace(**vars(toy.OPTIMIZER) | {"clip_per": "branch"})
    options = {"train": train, "optimizer": settings, "callbacks": (poison,), "log": log}
    outcome = loop.run(toy.task(model, plan, group, **options), toy.steps_of(plan, group.rank))
    norms = [line["train/grad_norm_text"] for line in log.lines]
    return {"skipped": outcome.skipped_steps, "weights": toy.flat(model), "norms": norms}


def gathering(group: Group, folder: Path) -> dict[str, Any]:
    """Each rank weights all rows by its own number, so a row's gradient is the sum of the weights."""
    rows = torch.arange(6.0).reshape(3, 2) + 10 * group.rank
    everyone = group.all_gather(rows)
    gradient = group.reduce_scatter(torch.full_like(everyone, group.rank + 1.0))
    uneven = group.all_gather_variable(torch.full((2 + group.rank,), group.rank))
    return {
        "everyone": everyone,
        "gradient": gradient,
        "uneven": uneven,
        "told": group.broadcast_object({"rank": group.rank}),
    }


def whole_loop(group: Group, folder: Path) -> dict[str, Any]:
    """The loop; only rank 1 requests a stop, at its seventh step."""
    log = MetricsLog(folder) if group.rank == 0 else None
    plan = SamplePlan(num_rows=33, global_rows=GLOBAL_ROWS, world=WORLD, micro=2, seed=1, steps=12)
    asked = iter(range(100))
    model = toy.Toy().double()
    task = toy.task(model, plan, group, log=log, stop=lambda: group.rank == 1 and next(asked) == 6)
    outcome = loop.run(task, toy.steps_of(plan, group.rank))
    if log is not None:
        log.close()
    return {
        "status": outcome.status,
        "steps": outcome.steps,
        "weights": toy.flat(model),
        "metrics": outcome.metrics,
    }


class Weights:
    """A callback that keeps the weights after each step."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.seen = [toy.flat(model)]

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        self.seen.append(toy.flat(self.model))


def overflow(group: Group, folder: Path) -> dict[str, Any]:
    """The loop in fp16 with a loss scale so high that the first gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=LARGE_SCALE)
    train = SimpleNamespace(**{**vars(toy.TRAIN), "precision": "fp16", "max_nonfinite_steps": STEPS})
    plan = SamplePlan(num_rows=33, global_rows=GLOBAL_ROWS, world=WORLD, micro=2, seed=1, steps=STEPS)
    model = toy.Toy()
    weights = Weights(model)
    with patch.object(Precision, "scaler", lambda _: scaler):
        task = toy.task(model, plan, group, train=train, callbacks=(weights,))
        outcome = loop.run(task, toy.steps_of(plan, group.rank))
    stood = [torch.equal(one, after) for one, after in pairwise(weights.seen)]
    return {
        "stood": stood,
        "skipped": outcome.skipped_steps,
        "scale": scaler.get_scale(),
        "weights": toy.flat(model),
    }


def cramped(
    group: Group, place: str, objective: Any = None, micro: int = 4, kind: str = "contrastive", **settings: Any
) -> dict[str, Any]:
    """A run in which only rank 1 runs out of memory once, at `place`; its results and messages."""
    fault = toy.Fault(place if group.rank == 1 else "nowhere", at_step=3)
    log, told = toy.Lines(), []
    plan = SamplePlan(num_rows=60, global_rows=16, world=group.world, micro=micro, seed=1, steps=8)
    model = toy.Cramped(fault, kind=kind).double()
    task = toy.task(
        model,
        plan,
        group,
        objective=toy.crampable(objective or Contrastive(), fault),
        log=log,
        train=SimpleNamespace(**vars(toy.TRAIN) | settings),
        callbacks=(fault,),
        note=lambda text, label: told.append(text),
    )
    outcome = loop.run(task, toy.steps_of(plan, group.rank))
    micro_batches = [line["batch/micro"] for line in log.lines]
    return {"weights": toy.flat(model), "status": outcome.status, "micros": micro_batches, "told": told}


def without_room(group: Group, folder: Path) -> dict[str, Any]:
    scenes = {place: cramped(group, place) for place in toy.PLACES}
    scenes |= {f"ring: {place}": cramped(group, place, Sigmoid(chunk=3), kind="sigmoid") for place in toy.PLACES}
    scenes["ring at once: loss"] = cramped(group, "loss", Sigmoid(chunk=3), micro=8, kind="sigmoid")
    return scenes | {f"row by row: {place}": cramped(group, place, toy.Regression()) for place in ROW_BY_ROW_PLACES}


def without_room_for_one_row(group: Group, folder: Path) -> str:
    try:
        cramped(group, "forward", micro=1)
    except OutOfMemoryError as error:
        return f"{error.micro} {error}"
    return "it went on"


def rehearsals(group: Group, folder: Path) -> dict[str, int]:
    """Fewer rows fit on rank 1 than on rank 0."""
    found = {}
    for name, limits in {"both": (6, 3), "all": (99, 99)}.items():
        model = toy.Cramped(toy.Fault("nowhere", most_rows=limits[group.rank]))
        state = replace(
            toy.train_state(toy.Toy(), group),
            model=model,
            optimizer=optimizer.build_optimizer(model, toy.OPTIMIZER),
        )
        found[name] = memory_probe.probe_memory(state, lambda rows: toy.rows(rows, 0), share=12, micro=None).micro
    return found


def parting(group: Group, folder: Path) -> dict[str, Any]:
    """Rank 1 runs out of memory in the synchronizing backward, where rank 0 waits. The last scenario of all."""
    try:
        cramped(group, "synchronising backward")
    except OutOfMemoryError as error:
        return {"error": str(error), "micro": error.micro}
    except RuntimeError as error:
        return {"error": f"a broken collective: {error}", "micro": -1}
    return {"error": "it went on", "micro": -1}


OBJECTIVES = (Contrastive, Sigmoid, toy.Regression)
SMALL_BUCKETS = "ddp, small buckets"
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    SMALL_BUCKETS: {},
    "fsdp": {"parallel": "fsdp"},
    "ddp, bf16 on the way": {"grad_compression": "bf16"},
    "ddp, fp16 on the way": {"grad_compression": "fp16"},
}


def strategy(group: Group, objective: Any, first: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Eight steps under a strategy (the last six, from `first`): weights, losses, and the state after the second."""
    log, states, model = (
        toy.Lines(),
        {},
        toy.Branched(bias="logit_bias" in objective.scalar_outputs).double(),
    )
    plan = SamplePlan(num_rows=30, global_rows=12, world=group.world, micro=3, seed=1, steps=8)
    train = SimpleNamespace(**vars(toy.TRAIN) | {"log_every": 1, "checkpoint_every": 2} | settings)

    def evaluate(step: int, _: Any) -> dict[str, float]:
        """Each rank forwards only as often as its own rows need: no rank may wait for another."""
        for _ in range(1 + group.rank):
            model(toy.rows(2, 0))
        return {"scored": 1.0}

    def save(step: int, state: dict[str, Any], metrics: dict[str, Any], last: bool) -> None:
        states[step] = copy.deepcopy(tree_map_only(torch.Tensor, toy.whole, state))

    options = {"objective": objective, "train": train, "log": log, "save": save, "evaluate": evaluate}
    task = toy.task(model, plan, group, **options, evaluate_every=3, devices=(group.device, group.device))
    stored = first and partial(state_io.load, state_io.save(Path(tempfile.mkdtemp()), 2, first, {}))
    loop.run(task, toy.steps_of(plan, group.rank, 2 if first else 0), stored)
    weights = torch.cat([tensor.flatten() for tensor in states[8]["model"].values()])
    return {"weights": weights, "losses": [line["train/loss"] for line in log.lines], "state": states.get(2)}


def strategies(group: Group, folder: Path) -> dict[str, Any]:
    states = {}
    for name, settings in STRATEGIES.items():
        with patch.object(wrap, "BUCKET_MB", 0.001 if name == SMALL_BUCKETS else wrap.BUCKET_MB):
            for objective in OBJECTIVES:
                states[f"{name}: {objective.__name__}"] = strategy(group, objective(), **settings)
    return states


COMPILED = {
    "ddp": ("ddp", Contrastive),
    "ddp, row by row": ("ddp", toy.Regression),
    "fsdp": ("fsdp", Contrastive),
}


def branches_compiled(group: Group, folder: Path) -> dict[str, Any]:
    """Weights with compiled branches, in forwards with and without gradient, and the number of graphs."""
    found = {}
    for name, (way, objective) in COMPILED.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # otherwise it would fall back to eager code
            weights = of_compiled(group, way, objective(), "aot_eager")
        found[name] = {"weights": weights, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}
    return found


def of_compiled(group: Group, way: str, objective: Any, backend: str) -> torch.Tensor:
    """The weights after steps of two micro-batches per rank, all of one shape, which limits the number of graphs."""
    model = compile_branches(toy.Branched().double(), SimpleNamespace(compile=backend))
    state = toy.train_state(model, group, objective, layout=ParallelConfig(kind=way))
    for step in range(STEPS):
        batch = share_of_rank(toy.rows(12, step), group)
        micro = len(batch["valid"]) // 2
        micro_batches = [{name: rows[at : at + micro] for name, rows in batch.items()} for at in (0, micro)]
        optimizer_step(
            state,
            make_local_batch(micro_batches),
            lambda index, step=step: micro_seed(toy.SEED, step, 0, index),
        )
    return toy.flat(model)


def resharded(group: Group, folder: Path) -> dict[str, Any]:
    """A replicated checkpoint resumes sharded, and the reverse."""
    states = {kind: strategy(group, Contrastive(), parallel=kind)["state"] for kind in ("ddp", "fsdp")}
    return {
        "ddp to fsdp": strategy(group, Contrastive(), states["ddp"], parallel="fsdp")["weights"],
        "fsdp to ddp": strategy(group, Contrastive(), states["fsdp"], parallel="ddp")["weights"],
    }


ROW_BY_ROW_PLACES = ("forward", "backward", "last forward")


def every_kind(group: Group, folder: Path) -> dict[str, torch.Tensor]:
    """Each objective that couples rows or has several counts, with missing rows on rank 1."""
    return {kind: toy.flat(steps_of_a_kind(group, 4, kind)) for kind in KINDS}


def steps_of_a_kind(group: Group, micro: int, kind: str, **options: Any) -> torch.nn.Module:
    model = toy.Toy(kind=kind).double()
    model.log_scale.requires_grad_(
        kind not in ("matching", "language_modelling")
    )  # unused there, and DDP waits for each trainable weight
    return steps_of_a_model(
        group, micro, (*INVALID, 11, 12, 13, 14), model, objective=toy.objective(kind, chunk=5), **options
    )


def over_the_ranks(group: Group, folder: Path) -> tuple[list[float], dict[str, float]]:
    """Metrics of which rank 1 has the larger values, and a sum."""
    names = ("time/step_s", "time/step_p95_s", "time/first_step_s", "memory/peak_gib", "host/memory_gib", "gpu/busy")
    own = {name: float(1 + 2 * group.rank) for name in names}
    return reduce_over_ranks(group, [torch.tensor(1.0 + group.rank)], own)


def cost_of_a_line(group: Group, folder: Path) -> float:
    """CPU seconds per logged line: metrics of a rank, their reduction, and the row hash."""
    timers, state = PhaseTimers(group.device), toy.train_state(toy.Toy(), group)
    meter, keys, took_s = Meter(Throughput(timers)), torch.arange(128), []
    for step in range(41):  # enough lines to outlast bursts of other load
        for _ in range(10):
            for name in PHASES:
                with timers(name):
                    pass
            meter.rates.add(0.05, 0.01, 256, 999)
        began_s = time.process_time()
        means, own = reduce_over_ranks(group, [torch.ones(1, dtype=torch.float64)] * 3, meter.compute(state))
        assert (
            len(rows_sha(group.all_gather_variable(keys + step))) == 16 and len(means) == 3 and own["time/step_s"] > 0
        )
        took_s.append(time.process_time() - began_s)
    return statistics.median(took_s)


def around_the_ring(group: Group, folder: Path) -> torch.Tensor:
    return group.ring_shift(torch.full((2,), group.rank))


def real_models(group: Group, folder: Path) -> dict[str, torch.Tensor]:
    """Each built-in kind of model, replicated and sharded."""
    from tests.engine.recipe_models import MODELS, weights_of  # importing transformers takes seconds

    return {f"{kind}, {way}": weights_of(kind, group, way) for kind in MODELS for way in ("ddp", "fsdp")}


def recomputed(group: Group, folder: Path) -> dict[str, torch.Tensor]:
    """Activation checkpointing in each branch, and as in recipe `llava`."""
    from tests.engine.recipe_models import RECOMPUTED, as_llava, weights_of

    found = {f"{kind}, {way}": weights_of(kind, group, way, again=True) for kind, way in RECOMPUTED}
    return found | {"llava": as_llava(group, 2, parallel="fsdp", activation_checkpointing=("text",))}


SCENES = (
    gathering,
    around_the_ring,
    over_the_ranks,
    cost_of_a_line,
    real_models,
    recomputed,
    every_kind,
    whole_shares,
    accumulated_shares,
    where_gradients_live,
    formats,
    a_rank_without_rows,
    row_by_row,
    not_a_number_on_one_rank,
    clipped_by_branches,
    skipping,
    whole_loop,
    overflow,
    without_room,
    without_room_for_one_row,
    rehearsals,
    strategies,
    branches_compiled,
    resharded,
    parting,
)
