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
from mmray.config.model import Objective, parse_terms
from mmray.data.stream.collate import Batch
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop, optimizer
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PeakMemory
from mmray.engine.parallel.strategy import strategy_class
from mmray.engine.precision import Precision, fork_seeded_rng, micro_seed
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import LoopResult, TrainSpec, TrainState
from mmray.models.caption_decoder import CaptionDecoder
from mmray.objectives.contrastive import Contrastive, Sigmoid
from mmray.objectives.matching import gumbel_noise

SEED = 7
VOCAB = 23
SIDE = 4
WIDTH, DIM = 16, 8
CLASSES = 5
MAX_TOKENS = 6
MICRO = 3
WITHOUT_TEACHER = slice(3, 4)  # row without embeddings of the teacher
FP32 = Precision("fp32", None, "cpu")


def optimizer_settings(**changes) -> SimpleNamespace:
    """The section `optimizer` of a config."""
    settings = {
        "lr": 0.01,
        "final_lr_fraction": 0.0,
        "warmup_steps": 2,
        "schedule": "cosine",
        "weight_decay": 0.1,
    }
    settings |= {
        "kind": "adamw",
        "settings": {},
        "betas": (0.9, 0.98),
        "clip_norm": 1.0,
    }
    return SimpleNamespace(
        **settings | {"freeze": (), "lr_multipliers": (), "layer_decay": ()} | changes
    )


def train_settings(**changes) -> SimpleNamespace:
    """The section `train` of a config."""
    settings = {"precision": "fp32", "seed": SEED, "log_every": 2, "checkpoint_every": 3}
    settings |= {
        "ema": 0.0,
        "parallel": "ddp",
        "profile": 0,
    }
    settings |= {"activation_checkpointing": (), "compile": "none", "float8": "none"}
    return SimpleNamespace(**settings | changes)


OPTIMIZER, TRAIN = optimizer_settings(), train_settings()


class Linear(nn.Linear):
    """A layer that every version of torch compiles: torch 2.11 skips blocks of its own classes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ImageTower(nn.Module):
    def __init__(self, dropout: float, batch_norm: bool):
        super().__init__()
        first = (
            nn.BatchNorm2d(3) if batch_norm else nn.Identity(),
            nn.Flatten(),
            Linear(3 * SIDE * SIDE, WIDTH),
        )
        last = (nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(dropout), Linear(WIDTH, DIM))
        self.layers = nn.Sequential(*first, *last)

    def forward(self, image: Tensor) -> Tensor:
        return F.normalize(self.layers(image.to(self.layers[2].weight.dtype) / 255 - 0.5), dim=-1)


class TextTower(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Dropout(dropout), Linear(WIDTH, WIDTH)), Linear(WIDTH, DIM)]
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.words.weight.dtype)
        pooled = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        return F.normalize(self.blocks[1](F.gelu(self.blocks[0](pooled))), dim=-1)


class Toy(nn.Module):
    """Two small towers with optional dropout, BatchNorm in the image tower, and the outputs that
    `kind` reads.
    """

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False, kind: str = "contrastive"):
        super().__init__()
        with fork_seeded_rng(1, torch.device("cpu")):
            self.image, self.text = ImageTower(dropout, batch_norm), TextTower(dropout)
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))
            if "sigmoid" in kind:
                self.bias = nn.Parameter(torch.tensor(-1.0))
            if "matching" in kind:
                layers = (
                    nn.Linear(2 * DIM, WIDTH),
                    nn.GELU(),
                    nn.Dropout(dropout),
                    nn.Linear(WIDTH, 1),
                )
                self.fuse = nn.Sequential(*layers)
            if "classification" in kind:
                self.classifier = nn.Linear(DIM, CLASSES)
            if "captioning" in kind:
                shape = SimpleNamespace(width=WIDTH, depth=1, heads=2, dropout=dropout)
                self.decoder = CaptionDecoder(shape, DIM // 2, VOCAB, MAX_TOKENS)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image, ids = self.image(batch["image"]), batch["input_ids"]
        text = self.text(ids, batch["attention_mask"])
        outputs = {"image_embed": image, "text_embed": text, **self.scalar_outputs()}
        if hasattr(self, "classifier"):
            outputs["class_logits"] = self.classifier(image)
        if hasattr(self, "decoder"):
            features = image.unflatten(1, (2, -1))
            outputs["caption_losses"] = self.decoder(features, ids, batch["attention_mask"])
        if "negative_ids" in batch:
            negative = self.text(batch["negative_ids"], batch["negative_mask"])
            outputs["match"] = self.fuse(torch.cat([image, text], dim=1))[:, 0]
            outputs["match_negative"] = self.fuse(torch.cat([image, negative], dim=1))[:, 0]
        return outputs

    def scalar_outputs(self) -> dict[str, Tensor]:
        scalars = {"logit_scale": self.log_scale.exp()}
        return scalars | {"logit_bias": self.bias * 1} if hasattr(self, "bias") else scalars

    def clamp_parameters(self) -> None:
        with torch.no_grad():
            self.log_scale.clamp_(max=math.log(100))


class Branched(Toy):
    """The toy with two independent branches, for the parallel strategies."""

    def branches(self) -> dict[str, nn.Module]:
        return {"image": self.image, "text": self.text}


class MemoryFault:
    """Raise an OOM error once, at `point` of step `at_step`, and for any micro-batch of more than
    `max_rows` rows.
    """

    def __init__(
        self, point: str = "", at_step: int = 1, max_rows: int = 10**9, error=torch.OutOfMemoryError
    ):
        self.point, self.at_step, self.max_rows, self.error = point, at_step, max_rows, error
        self.step, self.forwards, self.raised = 1, 0, False

    def on_step(self, step, metrics):
        self.step, self.forwards = step + 1, 0

    def reach(self, point: str, rows: int = 0) -> None:
        if rows > self.max_rows or (
            point == self.point and self.step == self.at_step and not self.raised
        ):
            self.raised = True
            raise self.error(f"allocation failed at {point}")

    def add_to_loss(self, objective):
        """Fail in the loss of the objective; of pairs, in a chunk."""
        name = "pairwise_loss" if isinstance(objective, Sigmoid) else "compute_loss"
        original = getattr(objective, name)
        setattr(objective, name, lambda *args: (self.reach("loss"), original(*args))[1])
        return objective


class MemoryLimitedToy(Branched):
    """A toy that runs out of memory according to its fault."""

    def __init__(self, fault: MemoryFault, kind: str = "contrastive"):
        super().__init__(kind=kind)
        self.fault = fault

    def forward(self, batch):
        rows = len(batch["valid"])
        if not torch.is_grad_enabled():
            self.fault.reach("embedding", rows)
            return super().forward(batch)
        self.fault.forwards += 1
        first = self.fault.forwards == 1
        self.fault.reach("forward" if first else "last forward", rows)
        outputs = super().forward(batch)
        point = "backward" if first else "synchronizing backward"
        outputs["image_embed"].register_hook(lambda gradient: self.fault.reach(point))
        return outputs


def rows(num: int, step: int, invalid: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """`num` rows of a step, random with (SEED, step)."""
    draw = torch.Generator().manual_seed(SEED * 1000 + step)
    num_tokens = torch.randint(1, MAX_TOKENS + 1, (num,), generator=draw)
    valid = torch.ones(num, dtype=torch.bool)
    valid[list(invalid)] = False
    ids = torch.randint(1, VOCAB, (num, MAX_TOKENS), generator=draw)
    mask = torch.arange(MAX_TOKENS) < num_tokens[:, None]
    teacher = torch.randn(2, num, DIM, dtype=torch.float64, generator=torch.Generator())
    teacher[:, WITHOUT_TEACHER] = 0
    return {
        "teacher_image": 9 * F.normalize(teacher[0], dim=1),
        "teacher_text": F.normalize(teacher[1], dim=1),
        "image": torch.randint(0, 256, (num, 3, SIDE, SIDE), dtype=torch.uint8, generator=draw),
        "input_ids": ids,
        "attention_mask": mask.long(),
        "key": torch.randint(-(2**62), 2**62, (num,), generator=draw),
        "valid": valid,
        "label": torch.randint(-1, CLASSES, (num,), generator=draw),
        "pos": torch.arange(num) + step * num,
    }


def cut(batch: dict[str, Tensor], micro: int) -> list[Batch]:
    """Micro-batches of `micro` rows, the last possibly smaller; captions trimmed to the longest."""
    micro_batches = []
    for first in range(0, len(batch["valid"]), micro):
        part = {name: tensor[first : first + micro] for name, tensor in batch.items()}
        length = int(part["attention_mask"].sum(1).max())
        part |= {name: part[name][:, :length] for name in ("attention_mask", "input_ids")}
        micro_batches.append(part)
    return micro_batches


def train_state(
    model,
    group: Group | None = None,
    objective=None,
    scaler=None,
    parallel="ddp",
    precision=FP32,
) -> TrainState:
    """A TrainState as loop.py creates it."""
    group = group or Group()
    strategy = strategy_class(train_settings(parallel=parallel))(group)
    return TrainState(
        module=model,
        model=strategy.wrap(model),
        strategy=strategy,
        objective=objective or Contrastive(),
        group=group,
        precision=precision,
        optimizer=optimizer.build_optimizer(model, OPTIMIZER),
        scaler=scaler or FP32.scaler(),
        memory=PeakMemory(torch.device("cpu")),
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


def naive_distillation(
    image: Tensor, text: Tensor, scale: Tensor, teacher_image: Tensor, teacher_text: Tensor
) -> Tensor:
    """The plain formula: the mean over rows of KL(teacher, student), in both directions."""
    own, teacher = scale * image @ text.T, teacher_image @ teacher_text.T
    total = 0
    for student_logits, teacher_logits in ((own, teacher), (own.T, teacher.T)):
        p, q = (each.exp() / each.exp().sum(1, True) for each in (teacher_logits, student_logits))
        total = total + (p * (p / q).log()).sum() / 2
    return total / len(image)


def naive_feature_distillation(*embeddings: Tensor) -> Tensor:
    """Half the mean squared distance, of image and text."""
    image, text, *teacher = embeddings
    pairs = zip((image, text), teacher, strict=True)
    return (
        sum(((own - F.normalize(other, dim=1)) ** 2).sum() for own, other in pairs) / 4 / len(image)
    )


def naive_matching(match: Tensor, negative: Tensor, has_negative: Tensor) -> Tensor:
    negative = negative[has_negative]
    positives = F.binary_cross_entropy_with_logits(match, torch.ones_like(match), reduction="sum")
    negatives = F.binary_cross_entropy_with_logits(
        negative, torch.zeros_like(negative), reduction="sum"
    )
    return (positives + negatives) / (2 * len(match))


def naive_negatives(outputs: list[Batch], micro_batches: list[Batch]) -> list[Batch]:
    """The micro-batches with a hard negative for each row, selected row by row in Python."""
    captions = [
        tuple(ids[mask.bool()].tolist())
        for micro in micro_batches
        for ids, mask in zip(micro["input_ids"], micro["attention_mask"], strict=True)
    ]
    valid, pos = (torch.cat([micro[name] for micro in micro_batches]) for name in ("valid", "pos"))
    image, text = (
        torch.cat([out[name] for out in outputs]) for name in ("image_embed", "text_embed")
    )
    noise = gumbel_noise(pos, pos)
    ids, mask = (torch.zeros(len(captions), MAX_TOKENS, dtype=torch.long) for _ in range(2))
    has_negative = torch.zeros(len(captions), dtype=torch.bool)
    mask[:, 0] = 1
    for row, own in enumerate(captions):
        others = [
            other for other in range(len(captions)) if valid[other] and captions[other] != own
        ]
        if others:
            scores = (
                outputs[0]["logit_scale"] * image[row] @ text[others].T + noise[row, others]
            ).tolist()
            caption = captions[others[scores.index(max(scores))]]
            ids[row, : len(caption)], mask[row, : len(caption)] = torch.tensor(caption), 1
            has_negative[row] = True
    sizes = [len(micro["valid"]) for micro in micro_batches]
    parts = zip(ids.split(sizes), mask.split(sizes), has_negative.split(sizes), strict=True)
    names = ("negative_ids", "negative_mask", "has_negative")
    return [
        micro | dict(zip(names, part, strict=True))
        for micro, part in zip(micro_batches, parts, strict=True)
    ]


def naive_loss(kind: str, outputs: list[Batch], micro_batches: list[Batch]) -> Tensor:
    """The plain formulas of objective `kind`, each term the mean over its own count."""

    def column(name: str, parts: list[Batch] = outputs) -> Tensor:
        """A column of all valid rows, or a scalar."""
        if parts[0][name].ndim == 0:
            return parts[0][name]
        return torch.cat(
            [part[name][micro["valid"]] for part, micro in zip(parts, micro_batches, strict=True)]
        )

    def classification() -> Tensor:
        labels = column("label", micro_batches)
        return F.cross_entropy(column("class_logits")[labels >= 0], labels[labels >= 0])

    def with_teacher(formula, *names: str) -> Tensor:
        teacher = [column(name, micro_batches) for name in ("teacher_image", "teacher_text")]
        kept = teacher[0].any(dim=1)
        own = [each[kept] if each.ndim else each for each in map(column, names)]
        return formula(*own, *(each[kept] for each in teacher))

    def captioning() -> Tensor:
        lengths = [micro["attention_mask"].sum(1)[micro["valid"]] for micro in micro_batches]
        return column("caption_losses").sum() / torch.cat(lengths).sum()

    pair = ("image_embed", "text_embed", "logit_scale")
    formulas = {
        "contrastive": lambda: naive_contrastive(*map(column, pair)),
        "sigmoid": lambda: naive_sigmoid(*map(column, (*pair, "logit_bias"))),
        "matching": lambda: naive_matching(
            column("match"), column("match_negative"), column("has_negative", micro_batches)
        ),
        "classification": classification,
        "captioning": captioning,
        "distillation": lambda: with_teacher(naive_distillation, *pair),
        "feature_distillation": lambda: with_teacher(naive_feature_distillation, *pair[:2]),
    }
    return sum(weight * formulas[name]() for name, weight in parse_terms(kind).items())


def reference_gradients(
    model: nn.Module, micro_batches: list[Batch], step: int, kind: str = "contrastive"
) -> Tensor:
    """Forward micro-batches one by one with the same RNG, keep all graphs, one loss, one backward;
    return the loss.
    """

    def forward(micro_batches: list[Batch]) -> list[Batch]:
        outputs = []
        for index, micro in enumerate(micro_batches):
            with fork_seeded_rng(micro_seed(SEED, step, 0, index), torch.device("cpu")):
                outputs.append(model(micro))
        return outputs

    micro_batches = make_local_batch(micro_batches).micro_batches
    if "matching" in kind:
        with torch.no_grad():
            micro_batches = naive_negatives(forward(micro_batches), micro_batches)
    loss = naive_loss(kind, forward(micro_batches), micro_batches)
    loss.backward()
    return loss.detach()


def objective(kind: str, chunk: int = 4):
    """An objective from objectives/build.py;

    `chunk` is small, so that sigmoid uses several chunks.
    """
    built = objectives.build(Objective(kind=kind))
    if hasattr(built, "chunk_rows"):
        built.chunk_rows = chunk
    return built


def flat(model: nn.Module) -> Tensor:
    """All weights in one vector on the CPU; collective if they are sharded."""
    return torch.cat([whole(p.detach()).flatten().cpu() for p in model.parameters()])


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_equal_weights(weights: Tensor, expected: Tensor, start: Tensor | None = None) -> None:
    """Equal to 1e-9, and different from `start`."""
    assert start is None or (expected - start).abs().max() > 0.005, (
        "training did not change the weights"
    )
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


class NanAtSteps(Branched):
    """Returns NaN at the given steps, counted from 1."""

    def __init__(self, steps: tuple[int, ...], first: int = 0):
        super().__init__()
        self.steps, self.step = steps, first

    def forward(self, batch):
        outputs = super().forward(batch)
        outputs["image_embed"] = outputs["image_embed"] * (
            float("nan") if self.step + 1 in self.steps else 1.0
        )
        return outputs

    def on_step(self, step, metrics):
        self.step = step


class Regression:
    """A row-wise objective that counts tokens, so that micro-batches have different weights."""

    gathered_outputs = ()
    scalar_output_names = ("logit_scale",)

    def count(self, batch):
        return (batch["attention_mask"].sum(1) * batch["valid"]).sum()

    def compute_loss(self, outputs, batch, gathered=None):
        weight = batch["attention_mask"].sum(1) * batch["valid"]
        loss = ((outputs["image_embed"] - outputs["text_embed"]).square().sum(1) * weight).sum()
        return loss * outputs["logit_scale"], self.count(batch), {"distance": loss.detach()}


class Lines(list):
    """Replaces MetricsLog: a list of the logged lines."""

    write = list.append

    def of(self, name: str) -> list:
        """The values of a metric, by line."""
        return [line[name] for line in self]


def train_spec(
    model: nn.Module, plan: SamplePlan, group: Group | None = None, micro: int = MICRO, **options
) -> TrainSpec:
    """A run of the loop with the settings above, in micro-batches of `micro` rows."""
    options = {"objective": Contrastive(), "train": TRAIN, "optimizer": OPTIMIZER} | options
    shape = BatchShape(plan.global_batch_size, min(micro, plan.rank_rows), plan.world_size)
    return TrainSpec(model=model, plan=plan, batch_shape=shape, group=group or Group(), **options)


def run(
    model: nn.Module,
    plan: SamplePlan,
    group: Group | None = None,
    load=None,
    first=0,
    micro: int = MICRO,
    **options,
) -> LoopResult:
    """Run the loop with the settings above on the rows of `steps_of`."""
    group = group or Group()
    spec = train_spec(model, plan, group, micro, **options)
    return loop.train_loop(spec, steps_of(plan, group.rank, first, micro), load)


def steps_of(
    plan: SamplePlan, rank: int, first: int = 0, micro: int = MICRO
) -> Iterator[list[Batch]]:
    """The micro-batches of each step that the stream yields to a rank."""
    columns = rows(plan.num_rows, 0)
    for step in range(first, plan.steps):
        positions = plan.positions(step, rank)
        real = torch.from_numpy(positions >= 0)
        indices = torch.from_numpy(np.where(positions >= 0, plan.row_ids_at(positions), 0))
        batch = {name: tensor[indices] for name, tensor in columns.items()}
        yield cut(batch | {"valid": real, "pos": torch.from_numpy(positions)}, micro)
