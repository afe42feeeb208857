"""Scenes played by two gloo ranks; each returns values that test_two_ranks.py judges. Started once for all of them."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmray.data.order import Plan
from mmray.train import loop
from mmray.train.feed import share_of
from mmray.train.group import Group
from mmray.train.seeding import micro_seed
from mmray.train.step import optimizer_step
from mmray.train.telemetry import MetricsLog
from tests.train import toy

WORLD = 2
ROWS = 21  # the second rank gets one row of padding
INVALID = (2, 5, 6, 7)
STEPS = 20
GLOBAL_ROWS = 10


def play(rank: int, folder: str) -> None:
    """Entry of a rank: all scenes, one process group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    group = Group.current()
    results = {scene.__name__: scene(group, Path(folder)) for scene in SCENES}
    torch.save(results, f"{folder}/rank-{rank}.pt")
    group.barrier()
    # Past the interpreter's own end: gloo's threads may still be giving back the tensors of the last collective, for
    # which they need the GIL, and where that is gone they abort the process (seen in 1 of 20 runs on a busy machine).
    os._exit(0)


def share_of_rank(batch: dict[str, torch.Tensor], group: Group) -> dict[str, torch.Tensor]:
    """The rank's consecutive rows, padded with invalid ones to the same number on every rank."""
    share = -(-len(batch["valid"]) // group.world)
    mine = {name: tensor[group.rank * share : (group.rank + 1) * share] for name, tensor in batch.items()}
    missing = share - len(mine["valid"])
    padded = {name: torch.cat([tensor, torch.zeros_like(batch[name][:missing])]) for name, tensor in mine.items()}
    padded["attention_mask"][:, 0] = 1
    return padded


def steps_of_a_model(group: Group, micro: int, invalid: tuple[int, ...] = INVALID, **options: Any) -> torch.nn.Module:
    model = toy.Toy().double()
    learner = toy.learner(model, group, **options)
    for step in range(STEPS):
        share = share_of(toy.cut(share_of_rank(toy.rows(ROWS, step, invalid), group), micro))
        optimizer_step(learner, share, lambda index, step=step: micro_seed(toy.SEED, step, group.rank, index))
    return model


def whole_shares(group: Group, folder: Path) -> torch.Tensor:
    return toy.flat(steps_of_a_model(group, micro=ROWS))


def accumulated_shares(group: Group, folder: Path) -> torch.Tensor:
    return toy.flat(steps_of_a_model(group, micro=4))


def a_rank_without_rows(group: Group, folder: Path) -> torch.Tensor:
    """Rank 1 has padding only, and fewer micro-batches than rank 0."""
    return toy.flat(steps_of_a_model(group, micro=4, invalid=tuple(range(11, ROWS))))


def row_by_row(group: Group, folder: Path) -> torch.Tensor:
    return toy.flat(steps_of_a_model(group, micro=4, objective=toy.Regression()))


def not_a_number_on_one_rank(group: Group, folder: Path) -> dict[str, Any]:
    model = toy.Toy()
    learner = toy.learner(model, group)
    before = toy.flat(model)
    share = share_of(toy.cut(share_of_rank(toy.rows(ROWS, 0), group), 4))
    poison = model.caption[1].register_forward_hook(lambda module, given, out: out * float("nan"))
    if group.rank == 0:
        poison.remove()
    result = optimizer_step(learner, share, lambda index: index)
    return {"finite": result.finite, "unchanged": torch.equal(toy.flat(model), before)}


def gathering(group: Group, folder: Path) -> dict[str, Any]:
    """Each rank weighs all rows by its own number; a row's gradient is the sum of the weights."""
    rows = torch.arange(6.0).reshape(3, 2) + 10 * group.rank
    rows.requires_grad_()
    everyone = group.gather(rows)
    (everyone.sum() * (group.rank + 1)).backward()
    uneven = group.gather_plain(torch.full((2 + group.rank,), group.rank))
    return {
        "everyone": everyone.detach(),
        "gradient": rows.grad,
        "uneven": uneven,
        "told": group.broadcast_object({"rank": group.rank}),
    }


def whole_loop(group: Group, folder: Path) -> dict[str, Any]:
    """The loop; the wish to stop is rank 1's alone, at its seventh step."""
    log = MetricsLog(folder) if group.rank == 0 else None
    plan = Plan(num_rows=33, global_rows=GLOBAL_ROWS, world=WORLD, micro=2, seed=1, steps=12)
    asked = iter(range(100))
    model = toy.Toy().double()
    task = toy.task(model, plan, group, log=log, stop=lambda: group.rank == 1 and next(asked) == 6)
    outcome = loop.run(task, toy.steps_of(plan, group.rank))
    if log is not None:
        log.close()
    return {"status": outcome.status, "steps": outcome.steps, "weights": toy.flat(model), "metrics": outcome.metrics}


SCENES = (
    gathering,
    whole_shares,
    accumulated_shares,
    a_rank_without_rows,
    row_by_row,
    not_a_number_on_one_rank,
    whole_loop,
)
