"""Scenarios on two and four gloo ranks, started once; test_ranks.py and test_strategies.py check
the results.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch._inductor
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from mmray import config
from mmray.data.stream.order import SamplePlan
from mmray.engine import grad_cache
from mmray.engine import step as engine_step
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group, join_process_group
from mmray.engine.metrics.meters import reduce_over_ranks
from mmray.engine.parallel import ddp, device_defaults, sharding
from mmray.engine.parallel.branches import place_branches
from mmray.engine.parallel.device_defaults import resolve_auto
from mmray.engine.parallel.transforms import compile_branches
from mmray.engine.precision import Precision, micro_seed, select_precision
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import accumulate_gradients, forward_micro_batch, optimizer_step
from mmray.errors import OutOfMemoryError, UsageError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.contrastive import Contrastive, Sigmoid
from tests.checkpoints import save_checkpoint
from tests.engine import recipe_models, toy

ROWS = 21  # the second of two ranks has one row of padding, the last of four has three rows
INVALID = (2, 5, 6, 7)
STEPS = 3
LARGE_SCALE = 2.0**20
KINDS = (
    "sigmoid",
    "0.5 * sigmoid",
    "matching",
    "contrastive + 2 * distillation + 0.5 * feature_distillation",
    "contrastive + 0.5 * captioning",
    "contrastive + 0.5 * matching + 0.25 * classification",
    "sigmoid + 0.5 * contrastive",
)
Train = Callable[[Group], torch.Tensor]


def main_two(rank: int, folder: str) -> None:
    """Entry point of one of two ranks: all scenarios in one process group."""
    group = join_group(folder, "two", rank, 2)
    results = {name: train(group) for name, (train, _) in TWO_RANKS.items()}
    torch.save(
        results | {scenario.__name__: scenario(group) for scenario in SCENARIOS},
        f"{folder}/rank-{rank}.pt",
    )
    # No barrier: the last scenario broke the group. Skip interpreter shutdown: gloo's threads may
    # still release tensors of the last collective, which needs the GIL, and abort the process
    # without it (seen in 1 of 20 runs on a busy machine).
    os._exit(0)


def main_four(rank: int, folder: str) -> None:
    """Entry point of one of four ranks: all scenarios in one group, then one in a pair."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes of two ranks, for hsdp
    group = join_group(folder, "four", rank, 4)
    results: dict[str, Any] = {name: train(group) for name, (train, _) in FOUR_RANKS.items()}
    results["timeouts_of_hsdp"] = timeouts_of_hsdp(group)
    group.all_gather_objects(None)
    dist.destroy_process_group()
    scenario = (oom_in_sharded_forward, oom_in_optimizer)[rank // 2]
    results["oom"] = scenario(join_group(folder, scenario.__name__, rank % 2, 2))
    torch.save(results, f"{folder}/rank-{rank}.pt")
    os._exit(0)  # the groups of the pairs are broken


def main_compiled(rank: int, folder: str, has_compiler: bool) -> None:
    """Entry point of one of two ranks that compile; with inductor only if there is a compiler."""
    group = join_group(folder, "compiled", rank, 2)
    results = {"branches": compiled(group)}
    if has_compiler:
        results["inductor"] = inductor(group)
    torch.save(results, f"{folder}/rank-{rank}.pt")
    os._exit(0)


def join_group(folder: str | Path, name: str, rank: int, world: int) -> Group:
    faulthandler.enable()  # prints a traceback on a native crash
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{name}"
    join_process_group("gloo", 120, init_method=store, rank=rank, world_size=world)
    return Group.current()


def rows_of_rank(batch: dict[str, torch.Tensor], group: Group) -> dict[str, torch.Tensor]:
    """The rank's consecutive rows, padded with invalid ones to the same number on each rank."""
    share = -(-len(batch["valid"]) // group.world_size)
    own_rows = {
        name: tensor[group.rank * share : (group.rank + 1) * share]
        for name, tensor in batch.items()
    }
    missing = share - len(own_rows["valid"])
    padded = {
        name: torch.cat([tensor, torch.zeros_like(batch[name][:missing])])
        for name, tensor in own_rows.items()
    }
    padded["attention_mask"][:, 0] = 1
    return padded


def train_toy(
    group: Group,
    micro: int = ROWS,
    invalid: tuple[int, ...] = INVALID,
    model: type[torch.nn.Module] = toy.Toy,
    kind: str = "contrastive",
    steps: int = STEPS,
    rows: int = ROWS,
    dropout: float = 0.0,
    backend: str = "none",
    **options: Any,
) -> torch.Tensor:
    """The weights after some steps; `backend`: of torch.compile, for the branches."""
    module = model(dropout, kind=kind).double()
    if kind == "matching":
        # unused there, and DDP waits for each trainable weight
        module.log_scale.requires_grad_(False)
    if backend != "none":
        module = compile_branches(module, SimpleNamespace(compile=backend))
    state = toy.train_state(module, group, **{"objective": toy.objective(kind, chunk=5)} | options)
    for step in range(steps):
        batch = make_local_batch(toy.cut(rows_of_rank(toy.rows(rows, step, invalid), group), micro))
        optimizer_step(
            state, batch, lambda index, step=step: micro_seed(toy.SEED, step, group.rank, index)
        )
    return toy.flat(module)


def variant(train: Train, **on_ranks: Any) -> tuple[Train, Train]:
    """A run on ranks with these options, and in one process without them."""
    return partial(train, **on_ranks), train


def train_objective(kind: str) -> Train:
    # some ranks have no rows
    return partial(train_toy, kind=kind, invalid=(*INVALID, 11, 12, 13, 14))


def gather_in_parts(group: Group, **options: Any) -> torch.Tensor:
    """A sigmoid loss that gathers 3 rows of each of two ranks at once, or one of each of four."""
    with patch.object(grad_cache, "GATHERED_BYTES", 900):
        return train_objective("sigmoid")(group, **options)


IN_PARTS: tuple[Train, Train] = partial(gather_in_parts, micro=4), train_objective("sigmoid")
ROW_WISE: dict[str, Any] = {"objective": toy.Regression()}
CLIPPED = partial(train_toy, model=toy.Branched, micro=4)
STREAM = partial(recipe_models.train_stream, micro=3, group_by_length=False, parallel="single")

# Weights of two or four ranks, and those of one process that they must equal to 1e-9.
TWO_RANKS: dict[str, tuple[Train, Train]] = {
    "accumulated": variant(train_toy, micro=4),
    "rank without rows": variant(partial(train_toy, invalid=tuple(range(11, ROWS))), micro=4),
    "row-wise": variant(partial(train_toy, **ROW_WISE), micro=4),
    "sigmoid, gathered in parts": IN_PARTS,
    **{kind: variant(train_objective(kind), micro=4) for kind in KINDS},
    **{f"clipped, {way}": variant(CLIPPED, parallel=way) for way in ("ddp", "fsdp")},
    "captioner, fsdp": variant(
        partial(recipe_models.train_kind, "captioner", parallel="single"),
        parallel="fsdp",
        checkpointing=True,
    ),
    "resnet18, fsdp": variant(
        partial(recipe_models.train_kind, "resnet18", parallel="single", steps=1), parallel="fsdp"
    ),
    **{
        f"{kind}, {way}{', activation checkpointing' * checkpointing}": variant(
            partial(recipe_models.train_kind, kind, parallel="single"),
            parallel=way,
            checkpointing=checkpointing,
        )
        for kind in recipe_models.MODELS
        for way in ("ddp", "fsdp")
        if (kind, way) != ("siglip", "fsdp")  # the captioner has it
        for checkpointing in [(kind, way) in (("fusion", "ddp"), ("clip", "fsdp"))]
    },
    **{
        f"{kind}, rows without audio on one rank, {way}": variant(
            partial(recipe_models.train_kind, kind, parallel="single"), parallel=way
        )
        for kind, way in (
            ("towers with heads", "ddp"),
            ("towers with heads", "fsdp"),
            ("towers of Whisper", "fsdp"),
            ("towers of CLAP", "ddp"),
        )
    },
    "sharded, checkpointed and bucketed": variant(
        STREAM,
        micro=2,
        group_by_length=True,
        parallel="fsdp",
        activation_checkpointing=("text", "image"),
    ),
}
FOUR_RANKS: dict[str, tuple[Train, Train]] = {
    "accumulated": variant(train_toy, micro=4),
    "row-wise": variant(partial(train_toy, **ROW_WISE), micro=4),
    "sigmoid, gathered in parts": IN_PARTS,
    **{kind: variant(train_objective(kind), micro=4) for kind in ("sigmoid", KINDS[-2])},
    **{
        f"{key}, sharded": variant(partial(train_objective(key), steps=4), micro=4, parallel="fsdp")
        for key in KINDS[-2:]
    },
    **{
        f"{key}, hsdp": variant(
            partial(train_objective(key), model=toy.Branched), micro=2, parallel="hsdp"
        )
        for key in ("contrastive", "sigmoid")
    },
    "clip, hsdp": variant(
        partial(recipe_models.train_kind, "clip", parallel="single"), parallel="hsdp"
    ),
}


def common_defaults(group: Group) -> list[str]:
    """The results of `auto` if rank 1 has an older GPU than rank 0, those of explicit settings, and
    the error of explicit inductor if rank 1 cannot compile.
    """
    problem = "no Python.h" if group.rank == 1 else ""
    with (
        patch.object(device_defaults, "compile_problem", lambda _: problem),
        pytest.raises(UsageError) as refused,
    ):
        resolve_auto(config.Train(compile="inductor"), group)
    on_gpu = replace(group, device=torch.device("cuda", 0))
    with patch.object(
        torch.cuda, "get_device_capability", lambda _: (9, 0) if group.rank == 0 else (7, 0)
    ):
        own = select_precision("auto", on_gpu.device).name
        given = config.Train(), config.Train(precision="bf16", compile="eager")
        trains = [resolve_auto(train, on_gpu) for train in given]
        values = [value for train in trains for value in (train.precision, train.compile)]
        return [own, *values, str(refused.value).rpartition(". ")[2]]


def skipped_step(group: Group) -> dict[str, Any]:
    """The loop; the third step is not finite on the last rank."""
    model, log = (
        toy.NanAtSteps((3,) if group.rank == group.world_size - 1 else ()).double(),
        toy.Lines(),
    )
    plan = SamplePlan(
        num_rows=33, global_batch_size=10, world_size=group.world_size, seed=1, steps=8
    )
    settings = toy.train_settings(log_every=1)
    outcome = toy.run(model, plan, group, micro=2, callbacks=(model,), log=log, train=settings)
    return {
        "skipped": outcome.skipped_steps,
        "weights": toy.flat(model),
        "norms": log.of("train/grad_norm"),
    }


def collectives(group: Group) -> dict[str, Any]:
    """Rows of different numbers, and metrics of both ranks."""
    names = (
        "time/step_s",
        "time/step_p95_s",
        "time/first_step_s",
        "memory/peak_gib",
        "host/memory_gib",
        "gpu/busy",
    )
    own = {name: float(1 + 2 * group.rank) for name in names}
    return {
        "uneven": group.all_gather_variable(torch.full((2 + group.rank,), group.rank)),
        "reduced": reduce_over_ranks(group, [torch.tensor(1.0 + group.rank)], own),
    }


def stopped_loop(group: Group) -> dict[str, Any]:
    """The loop; only the last rank requests a stop, at its seventh step."""
    log, polls, model = toy.Lines(), iter(range(100)), toy.Toy().double()
    plan = SamplePlan(
        num_rows=33,
        global_batch_size=10,
        world_size=group.world_size,
        seed=1,
        steps=12,
    )
    stop = lambda: group.rank == group.world_size - 1 and next(polls) == 6  # noqa: E731
    micro = 4 // group.world_size
    outcome = toy.run(model, plan, group, micro=micro, log=log, stop=stop)
    return {"end": (outcome.status, outcome.steps), "weights": toy.flat(model), "lines": list(log)}


def overflow(group: Group) -> dict[str, Any]:
    """The loop in fp16 with a loss scale so high that the first gradients overflow."""
    scaler, model = torch.amp.GradScaler("cpu", init_scale=LARGE_SCALE), toy.Toy()
    plan = SamplePlan(num_rows=33, global_batch_size=10, world_size=2, seed=1, steps=20)
    history = [toy.flat(model)]
    callback = SimpleNamespace(on_step=lambda step, metrics: history.append(toy.flat(model)))
    train = toy.train_settings(precision="fp16")
    with patch.object(Precision, "scaler", lambda _: scaler):
        outcome = toy.run(model, plan, group, micro=2, train=train, callbacks=(callback,))
    unchanged = [torch.equal(before, after) for before, after in pairwise(history)]
    state = {"skipped": outcome.skipped_steps, "scale": scaler.get_scale()}
    return {"unchanged": unchanged, "weights": toy.flat(model), **state}


OBJECTIVES = {
    "contrastive": Contrastive,
    "sigmoid": partial(Sigmoid, chunk_rows=3),
    "row-wise": toy.Regression,
}
OOM_PLAN = SamplePlan(num_rows=60, global_batch_size=16, world_size=2, seed=1, steps=8)


def oom_error(group: Group, point: str, **settings: Any) -> dict[str, Any]:
    """The error that ends a run in which only rank 1 runs out of memory, at `point` of step 3: its
    own, or that of a broken collective.
    """
    fault = toy.MemoryFault(point if group.rank == 1 else "", at_step=3)
    model = toy.MemoryLimitedToy(fault).double()
    train = toy.train_settings(**settings)
    try:
        toy.run(model, OOM_PLAN, group, micro=4, train=train, callbacks=(fault,))
    except OutOfMemoryError as error:
        assert error.retry_shape is not None
        return {"error": str(error), "micro": error.retry_shape.micro_batch_size}
    except RuntimeError as error:
        return {"error": f"a broken collective: {error}", "micro": -1}
    return {"error": "no error", "micro": -1}


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def sources(group: Group) -> torch.Tensor:
    """The sums of the sets of a mixture over all ranks, in which each rank averages gradients."""
    kind = "sigmoid + 0.5 * contrastive + 0.5 * matching"
    rows = toy.rows(ROWS, 0, INVALID)
    rows["source"] = torch.arange(ROWS) % 3
    batch = make_local_batch(toy.cut(rows_of_rank(rows, group), 4))
    state = toy.train_state(toy.Toy(kind=kind).double(), group, toy.objective(kind))
    cache = accumulate_gradients(state, replace(batch, num_sources=3), lambda index: 0)
    scale = torch.tensor([[1], [1], [1 / group.world_size]], dtype=torch.float64)
    return group.all_reduce_sum(cache.by_source * scale)


def collectives_of_a_step(group: Group) -> dict[str, list[str]]:
    """Collectives of a step in order, except those of DDP."""
    results = {}
    for kind, make_objective in OBJECTIVES.items():
        state = toy.train_state(toy.Toy(kind=kind).double(), group, make_objective())
        batch, calls = make_local_batch(toy.cut(rows_of_rank(toy.rows(ROWS, 0), group), 4)), Mock()
        with ExitStack() as stack:
            for name in COLLECTIVES:
                spy = stack.enter_context(patch.object(dist, name, side_effect=getattr(dist, name)))
                calls.attach_mock(spy, name)
            optimizer_step(state, batch, lambda index: index)
        results[kind] = [call[0] for call in calls.mock_calls]
    return results


def oom_in_synchronizing_backward(group: Group) -> dict[str, Any]:
    """Rank 0 waits there. The last scenario of all."""
    return oom_error(group, "synchronizing backward")


def sharded_bf16(group: Group) -> dict[str, list[float]]:
    """Losses of a sharded run that gathers weights in bf16, of one in float32, and of models with
    BatchNorm.
    """
    losses = {}
    plan = SamplePlan(
        num_rows=12, global_batch_size=12, world_size=group.world_size, seed=1, steps=6
    )
    for parallel, number, norm in (
        ("fsdp", "fp32", 0),
        ("fsdp", "bf16", 0),
        ("fsdp", "bf16", 1),
        ("ddp", "bf16", 1),
    ):
        log, train = (
            toy.Lines(),
            toy.train_settings(parallel=parallel, precision=number, log_every=1),
        )
        model = toy.Branched(kind="sigmoid", batch_norm=bool(norm))
        toy.run(model, plan, group, micro=3, objective=Sigmoid(), log=log, train=train)
        losses[f"{parallel}, {number}{', norm' * norm}"] = log.of("train/loss")
    return losses


def timeouts_of_hsdp(group: Group) -> list[float]:
    """Timeout of the collectives within and across nodes, in seconds."""
    groups: list[Any] = sharding._device_mesh(
        replace(group, timeout_s=77.0), hybrid=True
    ).get_all_groups()
    return [part._get_backend(group.device).options._timeout.total_seconds() for part in groups]


def oom_in_sharded_forward(group: Group) -> dict[str, Any]:
    """Rank 1 runs out of memory in a forward that gathers weights, where rank 0 waits."""
    return oom_error(group, "last forward", parallel="fsdp")


def oom_in_optimizer(group: Group) -> dict[str, Any]:
    """Rank 1 runs out of memory in the optimizer at its third step; rank 0 is a step ahead."""
    steps = iter(range(100))

    def fail(*_: Any) -> None:
        if group.rank == 1 and next(steps) == 2:
            raise torch.OutOfMemoryError("allocation failed in the optimizer")

    register_optimizer_step_pre_hook(fail)
    return oom_error(group, "")


SMALL_BUCKETS = "ddp, small buckets"
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{way}, {kind}": (kind, {"parallel": way})
        for way in ("ddp", "fsdp")
        for kind in OBJECTIVES
    },
    SMALL_BUCKETS: ("contrastive", {}),
}


def train_strategy(
    group: Group, objective: str, first: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Four steps under a strategy (the last two, from `first`): weights, losses, and the state
    after the second.
    """
    log, states, model = toy.Lines(), {}, toy.Branched(kind=objective).double()
    plan = SamplePlan(
        num_rows=30, global_batch_size=12, world_size=group.world_size, seed=1, steps=4
    )
    if settings.get("parallel") == "branches":
        place_branches(model, group.device)

    def evaluate(step: int, _: Any) -> dict[str, float]:
        """Forwards whose weights must not be left gathered for the next step."""
        for _ in range(2):
            model(toy.rows(2, 0))
        return {"scored": 1.0}

    def save(step: int, state: dict[str, Any], metrics: dict[str, Any], last: bool) -> None:
        states[step] = copy.deepcopy(tree_map_only(torch.Tensor, toy.whole, state))

    train = toy.train_settings(**{"log_every": 1, "checkpoint_every": 2} | settings)
    options = {"objective": OBJECTIVES[objective](), "train": train, "log": log, "save": save}
    options |= {"evaluate": evaluate, "evaluate_every": 3}
    stored = first and partial(
        state_io.load, save_checkpoint(Path(tempfile.mkdtemp()), 2, first, {})
    )
    toy.run(model, plan, group, stored, 2 if first else 0, micro=3, **options)
    weights = torch.cat([tensor.flatten() for tensor in states[4]["model"].values()])
    return {"weights": weights, "losses": log.of("train/loss"), "state": states.get(2)}


def strategies(group: Group) -> dict[str, Any]:
    """Each strategy, and a replicated checkpoint that resumes sharded and the reverse."""
    results = {}
    for name, (objective, settings) in STRATEGIES.items():
        with patch.object(ddp, "BUCKET_MB", 0.001 if name == SMALL_BUCKETS else ddp.BUCKET_MB):
            results[name] = train_strategy(group, objective, **settings)
    for before, after in (("ddp", "fsdp"), ("fsdp", "ddp")):
        state = results[f"{before}, contrastive"]["state"]
        results[f"{before} to {after}"] = train_strategy(
            group, "contrastive", state, parallel=after
        )
    return results


COMPILED = {"ddp": {}, "ddp, row-wise": ROW_WISE, "fsdp": {}}


def compiled(group: Group) -> dict[str, Any]:
    """Weights with compiled and eager branches and dropout, and the number of graphs."""
    results = {}
    for name, options in COMPILED.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # all of one shape
        train = partial(train_toy, group, 3, (), toy.Branched, rows=12, dropout=0.3, **options)
        train = partial(train, parallel=name.split(",")[0])
        # otherwise it would fall back to eager code
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            weights = train(backend="aot_eager")
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        results[name] = {
            "weights": weights,
            "graphs": graphs,
            "eager": train(),
            "start": train(steps=0),
        }
    return results


def inductor(group: Group) -> dict[str, Any]:
    """Weights with compiled and eager blocks and equal dropout, and a micro-batch's outputs of both
    passes of GradCache.
    """
    results = {}
    with patch.object(ddp, "BUCKET_MB", 0.001):  # DDP would split the graphs of each block
        for name, backend in (("eager", "none"), ("compiled", "inductor")):
            torch._dynamo.reset()
            with torch._inductor.config.patch(fallback_random=True):
                results[name] = train_with_dropout(group, backend)
    return results | {"start": train_with_dropout(group, "none", steps=0)}


def train_with_dropout(group: Group, backend: str, steps: int = 3) -> dict[str, Any]:
    """Two micro-batches a step, with shorter captions in later steps; the passes are those of the
    second one.
    """
    spec, passes = recipe_models.WITH_DROPOUT, []
    torch.manual_seed(3)
    module = compile_branches(
        build(spec, recipe_models.VOCAB).double().train(), toy.train_settings(compile=backend)
    )

    def forward(*args: Any) -> Any:
        outputs = forward_micro_batch(*args)
        if args[3] == second_seed:
            passes.append(outputs["text_embed"].detach())
        return outputs

    state = toy.train_state(module, group)
    for step in range(steps):
        second_seed = micro_seed(toy.SEED, step, group.rank, 1)
        batch = synthetic_batch(spec.inputs, recipe_models.VOCAB, 8, "cpu", seed=step)
        batch["attention_mask"][:, 6 - step :] = 0
        with patch.object(engine_step, "forward_micro_batch", forward):
            local = make_local_batch(toy.cut(rows_of_rank(batch, group), 2))
            optimizer_step(
                state, local, lambda index, step=step: micro_seed(toy.SEED, step, group.rank, index)
            )
    return {"weights": toy.flat(module), "passes": passes}


SCENARIOS = (
    collectives,
    common_defaults,
    skipped_step,
    stopped_loop,
    overflow,
    collectives_of_a_step,
    sources,
    strategies,
    sharded_bf16,
    oom_in_synchronizing_backward,
)
