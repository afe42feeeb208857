"""Scenarios on four gloo ranks, then on pairs of ranks whose group breaks; test_four_ranks.py checks the results.

A third pair exists only for its broken group.
"""

from __future__ import annotations

import faulthandler
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.collectives import Group
from mmray.engine.parallel.wrap import ParallelConfig
from mmray.errors import OutOfMemoryError
from mmray.objectives.sigmoid import Sigmoid
from tests.engine import toy, two_ranks

WORLD = 4
PAIRS = 2
STEPS = 20
SHARDED_STEPS = 4
REPLICATED = (
    "0.5 * sigmoid",
    "language_modelling",
    "contrastive + 0.5 * matching + 0.25 * classification + region_text",
)


def play(rank: int, folder: str) -> None:
    """Entry point of a rank: all scenarios in one group, then one in a pair."""
    faulthandler.enable()  # prints a traceback on a native crash
    torch.set_num_threads(1)
    results: dict[str, Any] = together(join(folder, "all", rank, WORLD)) if rank < WORLD else {}
    parting = (sharded_without_room, optimizer_without_room)[rank // 2]
    results["parting"] = parting(join(folder, parting.__name__, rank % 2, 2))
    torch.save(results, f"{folder}/rank-{rank}.pt")
    os._exit(0)  # the groups of the pairs are broken; see two_ranks.py


def together(group: Group) -> dict[str, Any]:
    results = {scene.__name__: scene(group) for scene in SCENES}
    group.barrier()
    dist.destroy_process_group()
    return results


def join(folder: str, name: str, rank: int, world: int) -> Group:
    store, timeout = f"file://{folder}/{name}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    return Group.current()


def ragged(group: Group) -> torch.Tensor:
    """21 rows: 6 rows per rank, of which the last rank has 3; micro-batches of 4 and 2."""
    return toy.flat(two_ranks.steps_of_a_model(group, micro=4, steps=STEPS))


def row_by_row(group: Group) -> torch.Tensor:
    return toy.flat(two_ranks.steps_of_a_model(group, micro=4, steps=STEPS, objective=toy.Regression()))


def replicated(group: Group) -> dict[str, torch.Tensor]:
    return {kind: toy.flat(two_ranks.steps_of_a_kind(group, 4, kind, steps=STEPS)) for kind in REPLICATED}


def sharded(group: Group) -> dict[str, torch.Tensor]:
    """Each objective with sharded weights; some have fewer rows than ranks."""
    options = {"layout": ParallelConfig(kind="fsdp"), "steps": SHARDED_STEPS}
    return {kind: whole(two_ranks.steps_of_a_kind(group, 4, kind, **options)) for kind in two_ranks.KINDS}


def whole(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([toy.whole(tensor).flatten() for tensor in model.state_dict().values()])


def ring(group: Group) -> dict[str, Any]:
    """Sizes that the objective sees at once, and whether anything was gathered."""
    seen, objective = [], toy.objective("0.5 * sigmoid")
    inner = objective.objective_parts.global_loss._terms[0].objective
    objective.objective_parts.global_loss.chunk = 3
    pairs = inner.pairwise_loss
    inner.pairwise_loss = lambda *given: (seen.append((len(given[1]), len(given[3]))), pairs(*given))[1]
    gathers: list[int] = []
    watched = SimpleNamespace(gather=Group.all_gather)
    Group.all_gather = lambda self, rows: (gathers.append(len(rows)), watched.gather(self, rows))[1]  # type: ignore[method-assign]
    try:
        two_ranks.steps_of_a_model(group, 4, model=toy.Toy(kind="sigmoid"), steps=1, objective=objective)
    finally:
        Group.all_gather = watched.gather  # type: ignore[method-assign]
    return {"home": max(seen)[0], "visiting": max(there for _, there in seen), "calls": len(seen), "gathers": gathers}


def bf16(group: Group) -> dict[str, list[float]]:
    """Losses of a sharded run that gathers weights in bf16, and of one in float32."""
    losses = {}
    for precision in ("fp32", "bf16"):
        log, plan = (
            toy.Lines(),
            SamplePlan(num_rows=12, global_rows=12, world=group.world, micro=3, seed=1, steps=6),
        )
        settings = vars(toy.TRAIN) | {"parallel": "fsdp", "precision": precision, "log_every": 1}
        model = toy.Branched(bias=True)
        options = {"objective": Sigmoid(), "log": log, "train": SimpleNamespace(**settings)}
        loop.run(toy.task(model, plan, group, **options), toy.steps_of(plan, group.rank))
        losses[precision] = [line["train/loss"] for line in log.lines]
    return losses


def parted(group: Group, place: str, **settings: Any) -> dict[str, Any]:
    try:
        two_ranks.cramped(group, place, **settings)
    except OutOfMemoryError as error:
        return {"error": str(error), "micro": error.micro}
    except RuntimeError as error:
        return {"error": f"a broken collective: {error}", "micro": -1}
    return {"error": "it went on", "micro": -1}


def sharded_without_room(group: Group) -> dict[str, Any]:
    """Rank 1 runs out of memory in a forward that gathers weights, where rank 0 waits."""
    return parted(group, "last forward", parallel="fsdp")


def optimizer_without_room(group: Group) -> dict[str, Any]:
    """Rank 1 runs out of memory in the optimizer at its third step; rank 0 is a step ahead."""
    steps = iter(range(100))

    def full(*_: Any) -> None:
        if group.rank == 1 and next(steps) == 2:
            raise torch.OutOfMemoryError("no room for a state")

    register_optimizer_step_pre_hook(full)
    return parted(group, "nowhere")


SCENES = (ragged, row_by_row, replicated, sharded, ring, bf16)
