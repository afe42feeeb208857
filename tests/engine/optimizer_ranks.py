"""Optimizers on two gloo ranks; test_own_optimizer.py checks the results."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group
from tests.engine import toy
from tests.engine.ranks import join_group

STEPS, RESUMED_AT = 6, 3
OWN = {
    "kind": "my_pkg:Momentum",
    "settings": {"decay": 0.5},
    "schedule": "my_pkg:inverse_sqrt",
    "lr": 0.05,
}
KINDS: dict[str, dict[str, Any]] = {
    "own": OWN,
    "muon": {"kind": "muon"},
    "lion": {"kind": "timm.optim:Lion", "lr": 1e-3},
}


def main(rank: int, folder: str) -> None:
    """Entry point of a rank. `folder` has my_pkg.py."""
    sys.path.insert(0, folder)
    group, results = join_group(folder, "optimizers", rank, 2), dict[str, Any]()
    for name in ("own", "muon"):
        results[name] = train_twice(group, Path(folder) / name, KINDS[name], parallel="fsdp")
    torch.save(results, f"{folder}/rank-{rank}.pt")
    os._exit(0)  # see ranks.main_two


def train_twice(
    group: Group, folder: Path, optimizer: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """All weights after six steps, also when the last three resume from the files of a
    checkpoint.
    """
    plan = SamplePlan(
        num_rows=30, global_batch_size=12, world_size=group.world_size, seed=1, steps=STEPS
    )
    train = toy.train_settings(checkpoint_every=RESUMED_AT, **settings)
    options = {"optimizer": toy.optimizer_settings(**optimizer), "train": train}
    sharded = settings.get("parallel") == "fsdp" and group.world_size > 1
    cpu_group = group.new_cpu_group(60) if sharded else None

    def save(step: int, state: dict[str, Any], metrics: dict[str, Any], last: bool) -> None:
        if sharded or group.rank == 0:
            path = folder / f"step-{step}"
            state_io.stage_save(path, state, {"step": step}, cpu_group)()

    log, whole, resumed = toy.Lines(), toy.Branched().double(), toy.Branched().double()
    toy.run(whole, plan, group, micro=4, save=save, log=log, **options)
    group.all_gather_objects(None)
    toy.run(
        resumed,
        plan,
        group,
        partial(state_io.load, folder / f"step-{RESUMED_AT}"),
        RESUMED_AT,
        micro=4,
        **options,
    )
    return {"whole": toy.flat(whole), "resumed": toy.flat(resumed), "losses": log.of("train/loss")}
