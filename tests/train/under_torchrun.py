"""A script for `torchrun`: the engine by itself, its rows from memory; rank 0 leaves its weights in the file named."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from mmray.data.order import Plan
from mmray.train import loop
from mmray.train.group import Group
from tests.train import toy


def main(out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = Group.current("cpu")
    plan = Plan(num_rows=33, global_rows=10, world=group.world, micro=2, seed=1, steps=8)
    model = toy.Toy().double()
    loop.run(toy.task(model, plan, group), toy.steps_of(plan, group.rank))
    if group.rank == 0:
        torch.save(toy.flat(model), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
