"""Tiny models of each built-in kind, trained on any number of ranks under any strategy."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mmray.config import (
    ChatInputs,
    Clip,
    ClipImage,
    ClipText,
    CrossAttention,
    Decoder,
    Fusion,
    Generative,
    ImageTower,
    Inputs,
    Model,
    Siglip,
    TextTower,
)
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.collectives import Group
from mmray.engine.parallel.transforms import apply_transforms, checkpoint_activations
from mmray.engine.parallel.wrap import ParallelConfig
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from tests.engine import toy

VOCAB, ROWS, STEPS = 40, 8, 2
INPUTS = Inputs(image_side=16, max_tokens=6)
IMAGE, TEXT = ClipImage(width=16, depth=1, heads=2, patch=8), ClipText(width=16, depth=1, heads=2)
MODELS: dict[str, tuple[Model, str]] = {
    "clip": (Clip(inputs=INPUTS, image=IMAGE, text=TEXT, embed_dim=8), "contrastive"),
    "siglip": (Siglip(inputs=INPUTS, image=IMAGE, text=TEXT), "sigmoid"),
    "fusion": (
        Fusion(
            inputs=INPUTS,
            image=ImageTower(name="convnet", width=8, depth=2),
            text=TextTower(width=16, depth=1, heads=2),
            cross=CrossAttention(width=16, depth=1, heads=2),
            embed_dim=8,
            classes=3,
        ),
        "contrastive + 0.5 * matching + classification",
    ),
    "generative": (
        Generative(
            inputs=ChatInputs(image_side=16, max_tokens=8),
            image=IMAGE,
            text=Decoder(width=16, depth=1, heads=2),
        ),
        "language_modelling",
    ),
}


RECOMPUTED = tuple((kind, way) for kind in ("fusion", "generative") for way in ("ddp", "fsdp"))


def weights_of(
    kind: str, group: Group, parallel: str, steps: int = STEPS, again: bool = False, backend: Any = None
) -> torch.Tensor:
    """All weights after some steps in micro-batches of 3 rows; the last row is padding.

    `again`: with activation checkpointing. `backend`: of torch.compile, for the branches.
    """
    spec, objective = MODELS[kind]
    torch.manual_seed(3)
    model = build(spec, VOCAB).double().train()
    for branch in model.branches().values():
        if again:
            checkpoint_activations(branch)
        if backend is not None:
            branch.compile(backend=backend)
    state = toy.train_state(model, group, toy.objective(objective), layout=ParallelConfig(kind=parallel))
    share = ROWS // group.world
    for step in range(steps):
        batch = synthetic_batch(spec.inputs, VOCAB, ROWS, "cpu", seed=step)
        batch["valid"][-1] = False
        mine = {name: column[group.rank * share : (group.rank + 1) * share] for name, column in batch.items()}
        optimizer_step(state, make_local_batch(toy.cut(mine, 3)), lambda index: index)
    return torch.cat([toy.whole(tensor.detach()).flatten() for tensor in model.parameters()])


def as_llava(group: Group, micro: int, group_by_length: bool = True, **settings: Any) -> torch.Tensor:
    """The weights of a run of a generative model as in recipe `llava`: captions of different lengths."""
    plan = SamplePlan(num_rows=20, global_rows=8, world=group.world, micro=micro, seed=1, steps=5)
    train = SimpleNamespace(
        **vars(toy.TRAIN) | {"activation_checkpointing": (), "compile": "none", "channels_last": False} | settings
    )
    torch.manual_seed(3)
    model = apply_transforms(build(MODELS["generative"][0], VOCAB).double(), train, toy.OPTIMIZER, group.device)
    options = {
        "objective": toy.objective("language_modelling"),
        "train": train,
        "group_by_length": group_by_length,
    }
    loop.run(
        toy.task(model, plan, group, **options),
        iter_micro_batches(blocks_of(plan, group.rank), plan, group_by_length),
    )
    return toy.flat(model)


def blocks_of(plan: SamplePlan, rank: int) -> Iterator[dict[str, np.ndarray]]:
    """A rank's blocks of one step each, as data/reader.py creates them of conversations; loss masks are random."""
    draw, spec = np.random.default_rng(2), MODELS["generative"][0]
    side, longest, rows = spec.inputs.image_side, spec.inputs.max_tokens, plan.num_rows
    everything = {
        "image": draw.integers(0, 256, (rows, 3, side, side), dtype=np.uint8),
        "input_ids": draw.integers(1, VOCAB, (rows, longest)).astype(np.int32),
        "num_tokens": draw.integers(2, longest + 1, rows).astype(np.int32),
        "loss_mask": draw.random((rows, longest)) < 0.6,
        "image_pos": np.zeros(rows, np.int32),
        "key": np.arange(rows),
        "label": np.full(rows, -1),
    }
    everything["loss_mask"] &= np.arange(longest) < everything["num_tokens"][:, None]
    for step in range(plan.steps):
        positions = plan.positions(step, rank)
        real = positions >= 0
        block = {name: column[np.where(real, plan.rows_at(positions), 0)] for name, column in everything.items()}
        yield block | {"valid": real, "pos": positions}
