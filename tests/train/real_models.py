"""Tiny models of each built-in kind, and steps of them on any number of ranks under any strategy."""

from __future__ import annotations

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
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.train.feed import share_of
from mmray.train.group import Group
from mmray.train.parallel import Layout
from mmray.train.step import optimizer_step
from tests.train import toy

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
            text=Decoder(width=16, depth=1, heads=2, max_positions=64),
        ),
        "language_modelling",
    ),
}


def weights_of(kind: str, group: Group, parallel: str, steps: int = STEPS) -> torch.Tensor:
    """All weights after some steps in micro-batches of 3 rows; the last row is padding."""
    spec, objective = MODELS[kind]
    torch.manual_seed(3)
    model = build(spec, VOCAB).double().train()
    learner = toy.learner(model, group, toy.objective(objective), layout=Layout(kind=parallel))
    share = ROWS // group.world
    for step in range(steps):
        batch = synthetic_batch(spec.inputs, VOCAB, ROWS, "cpu", seed=step)
        batch["valid"][-1] = False
        mine = {name: column[group.rank * share : (group.rank + 1) * share] for name, column in batch.items()}
        optimizer_step(learner, share_of(toy.cut(mine, 3)), lambda index: index)
    return torch.cat([toy.whole(tensor.detach()).flatten() for tensor in model.parameters()])
