"""A script for `torchrun`: the engine without Ray, with rows from memory; rank 0 saves the weights
of each strategy.

Uses NCCL if there is a GPU for each rank, otherwise gloo on CPUs.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from mmray.builtin import BACKENDS
from mmray.data.stream.order import SamplePlan
from mmray.engine.collectives import Group
from tests.engine import toy


def main(out: str, *strategies: str) -> None:
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device.type], timeout=timedelta(seconds=60))
    group = Group.current(device)
    plan = SamplePlan(
        num_rows=33, global_batch_size=10, world_size=group.world_size, seed=1, steps=8
    )
    weights = {}
    for parallel in strategies:
        model = toy.Branched().double()
        toy.run(model, plan, group, micro=2, train=toy.train_settings(parallel=parallel))
        weights[parallel] = toy.flat(model)
    if group.rank == 0:
        torch.save(weights, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # see ranks.main_two
