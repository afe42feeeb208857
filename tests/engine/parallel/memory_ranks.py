"""Builds and resumes a sharded model of 300 MB on two gloo ranks; test_sharded_memory.py checks the
memory.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mmray.config import Config, ImageTower, Inputs, TextTower, Train, TwoTower
from mmray.engine import run_state
from mmray.engine.build import build_model
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group, to_local
from mmray.engine.parallel.strategy import strategy_class
from mmray.engine.parallel.transforms import apply_transforms
from mmray.models.protocol import PRETRAINED, RANDOM_WEIGHTS, find_blocks
from mmray.storage.ranges import RangeReader
from tests.engine.ranks import join_group

MIB = 2**20
DEPTH, WIDTH = 6, 1024  # a block has 12 x width^2 weights


def config_of(depth: int, width: int) -> Config:
    inputs = Inputs(image_side=16, max_tokens=8)
    towers = {
        "image": ImageTower(name="convnet", width=8, depth=1),
        "text": TextTower(width=width, depth=depth),
    }
    return Config(
        model=TwoTower(inputs=inputs, **towers, embed_dim=8, vocab_size=64),
        train=Train(parallel="fsdp", compile="none"),
    )


def main(rank: int, folder: str, scenario: str) -> None:
    """Entry point of a rank: `start` also saves the checkpoint that `resume` reads."""
    group = join_group(folder, scenario, rank, 2)
    checkpoint = Path(folder) / "step-1"
    build(config_of(1, 8), group, None)  # imports
    before = reset_peak()
    model = build(config_of(DEPTH, WIDTH), group, checkpoint if scenario == "resume" else None)
    result: dict[str, Any] = {"peak": status("VmHWM") - before, "read": 0}
    if scenario == "start":
        state = {"model": dict(model.state_dict())}
        state_io.stage_save(checkpoint, state, {"architecture": {}}, group.new_cpu_group(60))()
    else:
        before, reads = reset_peak(), []
        read = partial(count_read, reads, RangeReader.read)
        with patch.object(RangeReader, "read", lambda *args: read(*args)):
            saved = state_io.load(checkpoint, run_state.load_destinations(model))
        model.load_state_dict(saved["model"])
        result |= {"peak of load": status("VmHWM") - before, "read": sum(reads)}
    weights = list(model.parameters())
    result["full"] = sum(weight.nbytes for weight in weights)
    result["shard"] = sum(to_local(weight).nbytes for weight in weights)
    result["block"] = max(sum(w.nbytes for w in block.parameters()) for block in find_blocks(model))
    result["sum"] = sum(
        float(to_local(weight.detach()).double().square().sum()) for weight in weights
    )
    torch.save(result, f"{folder}/rank-{rank}.pt")
    group.all_gather_objects(None)
    os._exit(0)  # see ranks.main_two


def build(config: Config, group: Group, checkpoint: Path | None) -> torch.nn.Module:
    """A sharded model, as in a worker."""
    model = build_model(config, group, PRETRAINED if checkpoint is None else RANDOM_WEIGHTS)
    model = apply_transforms(model, config.train, config.optimizer, group)
    return strategy_class(config.train)(group).wrap(model)


def count_read(reads: list[int], read: Any, *args: Any) -> bytes:
    data: bytes = read(*args)
    reads.append(len(data))
    return data


def reset_peak() -> int:
    """Reset the peak of the resident memory, and return the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return 1024 * int(line.split()[1])
