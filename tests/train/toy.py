"""A two-tower toy that follows the model seam, its rows, and the plain reference step that clever steps must equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.data.order import Plan
from mmray.objectives.contrastive import Contrastive
from mmray.train import loop, optimizer, parallel
from mmray.train.feed import share_of
from mmray.train.group import Group
from mmray.train.precision import Precision
from mmray.train.seeding import micro_seed, seeded
from mmray.train.step import Learner

SEED = 7
VOCAB = 23
SIDE = 4
OPTIMIZER = SimpleNamespace(
    lr=0.01, final_lr_fraction=0.0, warmup_steps=2, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6, clip_norm=1.0
)
TRAIN = SimpleNamespace(precision="fp32", seed=SEED, log_every=2, checkpoint_every=3, max_nonfinite=3)
FP32 = Precision("fp32", None, "cpu")


class Toy(nn.Module):
    """Two small towers; dropout, and BatchNorm in the image tower, where asked for."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False, width: int = 16, dim: int = 8):
        super().__init__()
        with seeded(1, torch.device("cpu")):
            self.pixels = nn.Sequential(
                nn.BatchNorm2d(3) if batch_norm else nn.Identity(),
                nn.Flatten(),
                nn.Linear(3 * SIDE * SIDE, width),
                nn.LayerNorm(width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(width, dim),
            )
            self.words = nn.Embedding(VOCAB, width)
            self.caption = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, dim))
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        kind = self.log_scale.dtype
        image = self.pixels(batch["image"].to(kind) / 255 - 0.5)
        mask = batch["attention_mask"][..., None].to(kind)
        text = self.caption((self.words(batch["input_ids"]) * mask).sum(1) / mask.sum(1))
        return {
            "image_embed": F.normalize(image, dim=-1),
            "text_embed": F.normalize(text, dim=-1),
            "logit_scale": self.log_scale.exp(),
        }

    def constrain(self) -> None:
        with torch.no_grad():
            self.log_scale.clamp_(max=math.log(100))


def rows(num: int, step: int, invalid: tuple[int, ...] = (), longest: int = 6) -> dict[str, Tensor]:
    """`num` rows of a step, drawn from (SEED, step); `longest` pads the captions."""
    draw = torch.Generator().manual_seed(SEED * 1000 + step)
    num_tokens = torch.randint(1, 7, (num,), generator=draw)
    valid = torch.ones(num, dtype=torch.bool)
    valid[list(invalid)] = False
    return {
        "image": torch.randint(0, 256, (num, 3, SIDE, SIDE), dtype=torch.uint8, generator=draw),
        "input_ids": torch.randint(1, VOCAB, (num, longest), generator=draw),
        "attention_mask": (torch.arange(longest) < num_tokens[:, None]).long(),
        "key": torch.randint(-(2**62), 2**62, (num,), generator=draw),
        "valid": valid,
        "pos": torch.arange(num) + step * num,
    }


def cut(batch: dict[str, Tensor], micro: int) -> list[dict[str, Tensor]]:
    """Micro-batches of `micro` rows, the last maybe ragged, captions trimmed to each one's longest."""
    micros = []
    for first in range(0, len(batch["valid"]), micro):
        part = {name: tensor[first : first + micro] for name, tensor in batch.items()}
        longest = int(part["attention_mask"].sum(1).max())
        for name in ("input_ids", "attention_mask"):
            part[name] = part[name][:, :longest]
        micros.append(part)
    return micros


def learner(model: nn.Module, group: Group | None = None, objective=None, precision=FP32, scaler=None) -> Learner:
    """A learner as loop.py makes it."""
    group = group or Group()
    return Learner(
        model=parallel.wrap(model, group),
        objective=objective or Contrastive(),
        group=group,
        precision=precision,
        optimizer=optimizer.build(model, OPTIMIZER),
        scaler=scaler or precision.scaler(),
        clip_norm=OPTIMIZER.clip_norm,
    )


def naive_contrastive(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The formula, with nothing clever: the mean over rows, both ways."""
    logits = scale * image @ text.T
    to_text = -(logits.diagonal() - logits.exp().sum(1).log()).mean()
    to_image = -(logits.diagonal() - logits.exp().sum(0).log()).mean()
    return (to_text + to_image) / 2


def reference_gradients(model: nn.Module, micros: list[dict[str, Tensor]], step: int) -> Tensor:
    """Forward the micro-batches singly under the same RNG, keep all graphs, one loss, one backward; the loss."""
    outputs, kept = [], share_of(micros).micros
    for index, micro in enumerate(kept):
        with seeded(micro_seed(SEED, step, 0, index), torch.device("cpu")):
            outputs.append(model(micro))
    valid = torch.cat([micro["valid"] for micro in kept])
    image, text = (torch.cat([out[name] for out in outputs])[valid] for name in ("image_embed", "text_embed"))
    loss = naive_contrastive(image, text, outputs[0]["logit_scale"])
    loss.backward()
    return loss.detach()


def flat(model: nn.Module) -> Tensor:
    """All weights in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class Regression:
    """An objective whose rows stand alone, and whose count is tokens, so that micro-batches weigh differently."""

    coupled = ()
    shared = ("logit_scale",)

    def count(self, batch):
        return (batch["attention_mask"].sum(1) * batch["valid"]).sum()

    def measure(self, outputs, batch, everyone=None):
        weight = batch["attention_mask"].sum(1) * batch["valid"]
        loss = ((outputs["image_embed"] - outputs["text_embed"]).square().sum(1) * weight).sum()
        return loss * outputs["logit_scale"], self.count(batch), {"distance": loss.detach()}


class Lines:
    """Stands in for MetricsLog."""

    def __init__(self):
        self.lines = []

    def write(self, metrics):
        self.lines.append(metrics)


def task(model: nn.Module, plan: Plan, group: Group | None = None, **options) -> loop.Task:
    """A task for the loop with the settings above."""
    given = {"objective": Contrastive(), "train": TRAIN, "optimizer": OPTIMIZER} | options
    return loop.Task(model=model, plan=plan, group=group or Group(), **given)


def steps_of(plan: Plan, rank: int, first: int = 0) -> Iterator[list[dict[str, Tensor]]]:
    """What the stream yields to a rank: the rows of each step, by their place in the set, in micro-batches."""
    everything = rows(plan.num_rows, 0)
    for step in range(first, plan.steps):
        positions = plan.positions(step, rank)
        real = torch.from_numpy(positions >= 0)
        which = torch.from_numpy(np.where(positions >= 0, plan.rows_at(positions), 0))
        batch = {name: tensor[which] for name, tensor in everything.items()}
        yield cut(batch | {"valid": real, "pos": torch.from_numpy(positions)}, plan.micro)
