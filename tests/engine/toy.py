"""A two-tower toy model, its rows, and a plain reference step that optimized steps must equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmray import objectives
from mmray.data.stream.collate import IGNORE_INDEX
from mmray.data.stream.order import SamplePlan
from mmray.engine import optimizer
from mmray.engine import optimizer as clip
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.parallel import wrap as parallel
from mmray.engine.precision import Precision, micro_seed, seeded
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainSpec, TrainState
from mmray.objectives.build import parse_terms
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.matching import gumbel_noise
from mmray.objectives.sigmoid import Sigmoid

SEED = 7
VOCAB = 23
SIDE = 4
CLASSES = 5
MOST_BOXES = 3
OPTIMIZER = SimpleNamespace(
    lr=0.01,
    final_lr_fraction=0.0,
    warmup_steps=2,
    weight_decay=0.1,
    betas=(0.9, 0.98),
    eps=1e-6,
    clip_norm=1.0,
    freeze=(),
    lr_multipliers=(),
)
vars(OPTIMIZER).update(clip_per="model", schedule="cosine")

TRAIN = SimpleNamespace(precision="fp32", seed=SEED, log_every=2, checkpoint_every=3, max_nonfinite_steps=3, ema=0.0)
STRATEGY = {
    "parallel": "ddp",
    "grad_compression": "none",
    "profile": 0,
}
vars(TRAIN).update(STRATEGY)
FP32 = Precision("fp32", None, "cpu")


class Toy(nn.Module):
    """Two small towers with optional dropout, BatchNorm in the image tower, and the outputs that objectives read."""

    def __init__(
        self, dropout: float = 0.0, batch_norm: bool = False, width: int = 16, dim: int = 8, kind: str = "contrastive"
    ):
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
            if "sigmoid" in kind:
                self.bias = nn.Parameter(torch.tensor(-1.0))
            if "matching" in kind:
                both = nn.Linear(2 * dim, width)
                self.fuse = nn.Sequential(both, nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 1))
            if "classification" in kind:
                self.classes = nn.Linear(dim, CLASSES)
            if "region_text" in kind:
                self.region = nn.Linear(dim + 4, dim)
            if "language_modelling" in kind:
                self.says = nn.Linear(dim, VOCAB)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        kind = self.log_scale.dtype
        image = self.pixels(batch["image"].to(kind) / 255 - 0.5)
        text = self.read(batch["input_ids"], batch["attention_mask"])
        outputs = {
            "image_embed": F.normalize(image, dim=-1),
            "text_embed": F.normalize(text, dim=-1),
            "logit_scale": self.log_scale.exp(),
        }
        if hasattr(self, "bias"):
            outputs["logit_bias"] = self.bias * 1
        if hasattr(self, "classes"):
            outputs["class_logits"] = self.classes(image)
        if hasattr(self, "region"):
            outputs["region_logits"] = self.name(image, batch["boxes"].to(kind), outputs["logit_scale"])
        if hasattr(self, "says"):
            outputs["logits"] = self.says(image[:, None] + self.caption(self.words(batch["input_ids"])))
        if "negative_ids" in batch:
            other = self.read(batch["negative_ids"], batch["negative_mask"])
            outputs["match"] = self.fuse(torch.cat([image, text], dim=1))[:, 0]
            outputs["match_negative"] = self.fuse(torch.cat([image, other], dim=1))[:, 0]
        return outputs

    def read(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.log_scale.dtype)
        text: Tensor = self.caption((self.words(input_ids) * mask).sum(1) / mask.sum(1))
        return text

    def name(self, image: Tensor, boxes: Tensor, scale: Tensor) -> Tensor:
        """Scores of each box with the texts of the labels, one token each."""
        regions = self.region(torch.cat([image[:, None].expand(-1, boxes.shape[1], -1), boxes], dim=2))
        ids = torch.arange(1, CLASSES + 1, device=boxes.device)[:, None]
        return scale * F.normalize(regions, dim=-1) @ F.normalize(self.read(ids, torch.ones_like(ids)), dim=-1).T

    def constrain(self) -> None:
        with torch.no_grad():
            self.log_scale.clamp_(max=math.log(100))


class ToyPixels(nn.Module):
    def __init__(self, width: int, dim: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, width), nn.GELU(), nn.Linear(width, dim))

    def forward(self, image: Tensor) -> Tensor:
        return F.normalize(self.layers(image.to(self.layers[1].weight.dtype) / 255 - 0.5), dim=-1)


class ToyWords(nn.Module):
    def __init__(self, width: int, dim: int):
        super().__init__()
        self.words = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, dim)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.words.weight.dtype)
        pooled = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        return F.normalize(self.blocks[1](F.gelu(self.blocks[0](pooled))), dim=-1)


class Branched(nn.Module):
    """A toy with two independent branches, as strategies require."""

    def __init__(self, width: int = 16, dim: int = 8, bias: bool = False):
        super().__init__()
        with seeded(1, torch.device("cpu")):
            self.image, self.text = ToyPixels(width, dim), ToyWords(width, dim)
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))
            self.bias = nn.Parameter(torch.tensor(-1.0)) if bias else None

    def branches(self) -> dict[str, nn.Module]:
        return {"image": self.image, "text": self.text}

    def scalar_outputs(self) -> dict[str, Tensor]:
        return {"logit_scale": self.log_scale.exp()} | ({} if self.bias is None else {"logit_bias": self.bias * 1})

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        text = self.text(batch["input_ids"], batch["attention_mask"])
        return {"image_embed": self.image(batch["image"]), "text_embed": text, **self.scalar_outputs()}


# Where rank 1 can run out of memory in a step with two or more micro-batches.
PLACES = ("forward", "embedding", "loss", "backward", "last forward")


class Fault:
    """Raise torch's OutOfMemoryError once, at `place` of step `at_step`, and at any size above `most_rows`.

    `as_what` creates another error with the same message.
    """

    def __init__(self, place: str, at_step: int = 1, most_rows: int = 10**9, as_what=torch.OutOfMemoryError):
        self.place, self.at_step, self.most_rows, self.as_what = place, at_step, most_rows, as_what
        self.step, self.forwards, self.raised = 1, 0, False

    def on_step(self, step, metrics):
        self.step, self.forwards = step + 1, 0

    def at(self, place: str, rows: int = 0) -> None:
        if rows > self.most_rows or (place == self.place and self.step == self.at_step and not self.raised):
            self.raised = True
            raise self.as_what(f"no room at {place}")


class Cramped(Toy):
    """A toy that runs out of memory according to its fault."""

    def __init__(self, fault: Fault, micro_batches: int = 2, kind: str = "contrastive"):
        super().__init__(kind=kind)
        self.fault, self.micro_batches = fault, micro_batches

    def forward(self, batch):
        rows = len(batch["valid"])
        if not torch.is_grad_enabled():
            self.fault.at("embedding", rows)
            return super().forward(batch)
        self.fault.forwards += 1
        first = self.fault.forwards == 1
        self.fault.at("forward" if first else "last forward", rows)
        outputs = super().forward(batch)
        place = "backward" if first else "synchronising backward"
        outputs["image_embed"].register_hook(lambda gradient: self.fault.at(place))
        return outputs


def crampable(objective, fault: Fault):
    """The objective, whose loss runs out of memory according to the fault; on the ring, in the sum over pairs."""
    name = "pairwise_loss" if isinstance(objective, Sigmoid) else "compute_loss"
    plain = getattr(objective, name)

    def cramped(*given):
        fault.at("loss")
        return plain(*given)

    setattr(objective, name, cramped)
    return objective


def rows(num: int, step: int, invalid: tuple[int, ...] = (), longest: int = 6) -> dict[str, Tensor]:
    """`num` rows of a step, random with (SEED, step); `longest` pads the captions."""
    draw = torch.Generator().manual_seed(SEED * 1000 + step)
    num_tokens = torch.randint(1, 7, (num,), generator=draw)
    valid = torch.ones(num, dtype=torch.bool)
    valid[list(invalid)] = False
    batch = {
        "image": torch.randint(0, 256, (num, 3, SIDE, SIDE), dtype=torch.uint8, generator=draw),
        "input_ids": torch.randint(1, VOCAB, (num, longest), generator=draw),
        "attention_mask": (torch.arange(longest) < num_tokens[:, None]).long(),
        "key": torch.randint(-(2**62), 2**62, (num,), generator=draw),
        "valid": valid,
        "label": torch.randint(-1, CLASSES, (num,), generator=draw),
        "pos": torch.arange(num) + step * num,
    }
    learned = batch["attention_mask"].bool() & (torch.rand(num, longest, generator=draw) < 0.6)  # some rows have none
    num_boxes = torch.randint(0, MOST_BOXES + 1, (num,), generator=draw)
    boxed = {
        "boxes": torch.rand(num, MOST_BOXES, 4, generator=draw),
        "box_labels": torch.randint(-1, CLASSES, (num, MOST_BOXES), generator=draw),
        "box_mask": torch.arange(MOST_BOXES) < num_boxes[:, None],
    }
    return batch | boxed | {"labels": torch.where(learned, batch["input_ids"], IGNORE_INDEX)}


def cut(batch: dict[str, Tensor], micro: int) -> list[dict[str, Tensor]]:
    """Micro-batches of `micro` rows, the last possibly smaller; captions and boxes trimmed to the longest of each."""
    micro_batches = []
    for first in range(0, len(batch["valid"]), micro):
        part = {name: tensor[first : first + micro] for name, tensor in batch.items()}
        longest = int(part["attention_mask"].sum(1).max())
        for name in {"input_ids", "attention_mask", "labels"} & part.keys():
            part[name] = part[name][:, :longest]
        most = int(part["box_mask"].sum(1).max()) if "box_mask" in part else 0
        for name in {"boxes", "box_labels", "box_mask"} & part.keys():
            part[name] = part[name][:, :most]
        micro_batches.append(part)
    return micro_batches


def train_state(
    model: nn.Module,
    group: Group | None = None,
    objective=None,
    precision=FP32,
    scaler=None,
    layout=None,
    clipped=OPTIMIZER.clip_per,
) -> TrainState:
    """A TrainState as loop.py creates it."""
    group = group or Group()
    return TrainState(
        model=parallel.wrap(model, group, layout),
        objective=objective or Contrastive(),
        group=group,
        precision=precision,
        optimizer=optimizer.build_optimizer(model, OPTIMIZER),
        scaler=scaler or precision.scaler(),
        clip_groups=clip.make_clip_groups(model, clipped),
        timers=PhaseTimers(torch.device("cpu")),
        clip_norm=OPTIMIZER.clip_norm,
    )


def naive_contrastive(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The plain formula: the mean over rows, in both directions."""
    logits = scale * image @ text.T
    to_text = -(logits.diagonal() - logits.exp().sum(1).log()).mean()
    to_image = -(logits.diagonal() - logits.exp().sum(0).log()).mean()
    return (to_text + to_image) / 2


def naive_sigmoid(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The plain formula: z is 1 for a matching pair, otherwise -1."""
    z = 2 * torch.eye(len(image), dtype=image.dtype) - 1
    return -(1 / (1 + (-z * (scale * image @ text.T + bias)).exp())).log().sum() / len(image)


def naive_matching(match: Tensor, negative: Tensor, asked: Tensor) -> Tensor:
    own = F.binary_cross_entropy_with_logits(match, torch.ones_like(match), reduction="sum")
    other = F.binary_cross_entropy_with_logits(negative[asked], torch.zeros_like(negative[asked]), reduction="sum")
    return (own + other) / (2 * len(match))


def naive_language_modelling(outputs: list[dict[str, Tensor]], micro_batches: list[dict[str, Tensor]]) -> Tensor:
    """Token by token in Python: mean negative log-likelihood of the next token."""
    losses = [
        -out["logits"][row, place].log_softmax(0)[label]
        for out, micro in zip(outputs, micro_batches, strict=True)
        for row, labels in enumerate(micro["labels"].tolist())
        for place, label in enumerate(labels[1:])
        if label != IGNORE_INDEX and micro["valid"][row]
    ]
    return torch.stack(losses).mean()


def naive_region_text(outputs: list[dict[str, Tensor]], micro_batches: list[dict[str, Tensor]]) -> Tensor:
    """Box by box in Python: mean negative log-likelihood of the label's text."""
    losses = [
        -out["region_logits"][row, place].log_softmax(0)[label]
        for out, micro in zip(outputs, micro_batches, strict=True)
        for row, labels in enumerate(micro["box_labels"].tolist())
        for place, label in enumerate(labels)
        if label >= 0 and micro["box_mask"][row, place] and micro["valid"][row]
    ]
    return torch.stack(losses).mean()


def naive_negatives(
    outputs: list[dict[str, Tensor]], micro_batches: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """The micro-batches with a hard negative for each row, selected row by row in Python."""
    captions = [
        tuple(ids[mask.bool()].tolist())
        for micro in micro_batches
        for ids, mask in zip(micro["input_ids"], micro["attention_mask"], strict=True)
    ]
    valid, pos = (torch.cat([micro[name] for micro in micro_batches]) for name in ("valid", "pos"))
    image, text = (torch.cat([out[name] for out in outputs]) for name in ("image_embed", "text_embed"))
    noise = gumbel_noise(pos, pos)
    chosen = []
    for row, own in enumerate(captions):
        others = [other for other in range(len(captions)) if valid[other] and captions[other] != own]
        scores = (outputs[0]["logit_scale"] * image[row] @ text[others].T + noise[row, others]).tolist()
        chosen.append(captions[others[scores.index(max(scores))]] if others else None)
    found, first = [], 0
    for micro in micro_batches:
        mine, first = chosen[first : first + len(micro["valid"])], first + len(micro["valid"])
        ids = torch.zeros(len(mine), 6, dtype=torch.long)
        for target, caption in zip(ids, mine, strict=True):
            target[: len(caption or ())] = torch.tensor(caption or (), dtype=torch.long)
        mask = (torch.arange(6) < torch.tensor([len(caption or (1,)) for caption in mine])[:, None]).long()
        asked = torch.tensor([caption is not None for caption in mine])
        found.append(micro | {"negative_ids": ids, "negative_mask": mask, "has_negative": asked})
    return found


def naive_loss(kind: str, outputs: list[dict[str, Tensor]], micro_batches: list[dict[str, Tensor]]) -> Tensor:
    """The plain formulas of objective `kind`, each term the mean over its own count."""
    valid = torch.cat([micro["valid"] for micro in micro_batches])
    out = {
        name: outputs[0][name] if value.ndim == 0 else torch.cat([some[name] for some in outputs])[valid]
        for name, value in outputs[0].items()
        if name not in ("logits", "region_logits")  # whose micro-batches differ in length
    }
    columns = {
        name: torch.cat([micro[name] for micro in micro_batches])[valid]
        for name in ("label", "has_negative")
        if name in micro_batches[0]
    }
    formulas = {
        "contrastive": lambda: naive_contrastive(out["image_embed"], out["text_embed"], out["logit_scale"]),
        "sigmoid": lambda: naive_sigmoid(*(out[n] for n in ("image_embed", "text_embed", "logit_scale", "logit_bias"))),
        "matching": lambda: naive_matching(out["match"], out["match_negative"], columns["has_negative"]),
        "classification": lambda: F.cross_entropy(
            out["class_logits"][columns["label"] >= 0], columns["label"][columns["label"] >= 0], label_smoothing=0.1
        ),
        "region_text": lambda: naive_region_text(outputs, micro_batches),
        "language_modelling": lambda: naive_language_modelling(outputs, micro_batches),
    }
    return sum(weight * formulas[name]() for name, weight in parse_terms(kind).items())


def reference_gradients(
    model: nn.Module, micro_batches: list[dict[str, Tensor]], step: int, kind: str = "contrastive"
) -> Tensor:
    """Forward micro-batches one by one with the same RNG, keep all graphs, one loss, one backward; return the loss."""

    def forward(given: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        outputs = []
        for index, micro in enumerate(given):
            with seeded(micro_seed(SEED, step, 0, index), torch.device("cpu")):
                outputs.append(model(micro))
        return outputs

    kept = make_local_batch(micro_batches).micro_batches
    if "matching" in kind:
        with torch.no_grad():
            kept = naive_negatives(forward(kept), kept)
    loss = naive_loss(kind, forward(kept), kept)
    loss.backward()
    return loss.detach()


def objective(kind: str, chunk: int = 4):
    """An objective from objectives/build.py; `chunk` is small, so that sigmoid uses several chunks."""
    built = objectives.build(SimpleNamespace(kind=kind, label_smoothing=0.1))
    if hasattr(built, "chunk"):
        built.chunk = chunk
    return built


def flat(model: nn.Module) -> Tensor:
    """All weights in one vector."""
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()])


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class Regression:
    """A row-wise objective that counts tokens, so that micro-batches have different weights."""

    gathered_outputs = ()
    scalar_outputs = ("logit_scale",)

    def count(self, batch):
        return (batch["attention_mask"].sum(1) * batch["valid"]).sum()

    def compute_loss(self, outputs, batch, gathered=None):
        weight = batch["attention_mask"].sum(1) * batch["valid"]
        loss = ((outputs["image_embed"] - outputs["text_embed"]).square().sum(1) * weight).sum()
        return loss * outputs["logit_scale"], self.count(batch), {"distance": loss.detach()}


class Lines:
    """Replaces MetricsLog."""

    def __init__(self):
        self.lines = []

    def write(self, metrics):
        self.lines.append(metrics)


def task(model: nn.Module, plan: SamplePlan, group: Group | None = None, **options) -> TrainSpec:
    """A loop task with the settings above."""
    given = {"objective": Contrastive(), "train": TRAIN, "optimizer": OPTIMIZER} | options
    return TrainSpec(recover_cpu_oom=True, model=model, plan=plan, group=group or Group(), **given)


def steps_of(plan: SamplePlan, rank: int, first: int = 0) -> Iterator[list[dict[str, Tensor]]]:
    """The micro-batches of each step that the stream yields to a rank."""
    everything = rows(plan.num_rows, 0)
    for step in range(first, plan.steps):
        positions = plan.positions(step, rank)
        real = torch.from_numpy(positions >= 0)
        which = torch.from_numpy(np.where(positions >= 0, plan.rows_at(positions), 0))
        batch = {name: tensor[which] for name, tensor in everything.items()}
        yield cut(batch | {"valid": real, "pos": torch.from_numpy(positions)}, plan.micro)
