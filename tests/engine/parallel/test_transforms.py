"""Activation checkpointing and compiled branches take the steps of the plain model."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from mmray import objectives
from mmray.config import (
    Clip,
    Config,
    CrossAttention,
    Model,
    Objective,
    Siglip,
    TextTower,
    Towers,
    TwoTower,
)
from mmray.config import Optimizer as OptimizerSection
from mmray.engine.bad_rows import _check_labels
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import dry_run
from mmray.engine.parallel.transforms import apply_transforms, checkpoint_activations
from mmray.engine.precision import micro_seed
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.errors import DataError, TrainingError, UsageError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.models.two_tower import TwoTower as TwoTowerModel
from tests.engine import recipe_models, toy
from tests.engine.recipe_models import IMAGE, IMAGE_INPUTS, INPUTS, MODELS, TOWERS, VOCAB

TEXT = TextTower(width=16, depth=2, heads=2, dropout=0.2)
CROSS = CrossAttention(width=16, depth=2, heads=2, dropout=0.2)
VIT, WORDS = (part.model_copy(update={"depth": 2}) for part in (IMAGE, recipe_models.TEXT))
RESNET = TOWERS["image"].model_copy(update={"name": "resnet18"})
SPECS: dict[str, Model] = {
    "convnet": TwoTower(inputs=INPUTS, image=TOWERS["image"], text=TEXT, embed_dim=8),
    "resnet18": TwoTower(inputs=INPUTS, image=RESNET, text=TEXT, embed_dim=8),
    "clip": Clip(inputs=INPUTS, image=VIT, text=WORDS, embed_dim=8, patch_dropout=0.5),
    "siglip": Siglip(inputs=INPUTS, image=VIT, text=WORDS, patch_dropout=0.5),
    "fusion": Towers(
        inputs=IMAGE_INPUTS,
        image=TOWERS["image"],
        text=TEXT,
        cross=CROSS,
        embed_dim=8,
        matching=True,
        classes=3,
    ),
}
CPU = torch.device("cpu")


def build_model(
    name: str, optimizer: OptimizerSection | None = None, **settings: object
) -> nn.Module:
    torch.manual_seed(0)
    train = toy.train_settings(**settings)
    return apply_transforms(
        build(SPECS[name], VOCAB), train, optimizer or OptimizerSection(), Group()
    ).double()


def train(model: nn.Module, name: str, steps: int = 3) -> dict[str, Tensor]:
    """Weights and buffers after some steps of two micro-batches."""
    kind = MODELS[name][1] if name in MODELS else "contrastive"
    state = toy.train_state(model.train(), objective=toy.objective(kind))
    for step in range(steps):
        batch = make_local_batch(
            toy.cut(synthetic_batch(SPECS[name].inputs, VOCAB, 6, CPU, seed=step), 3)
        )
        optimizer_step(state, batch, lambda index, step=step: micro_seed(1, step, 0, index))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@cache
def train_plain(name: str, steps: int) -> dict[str, Tensor]:
    return train(build_model(name), name, steps)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            (name, {"activation_checkpointing": ("image", "text")})
            for name in SPECS
            if name != "fusion"
        ),
        ("fusion", {"activation_checkpointing": ("image", "text", "cross")}),
        pytest.param("convnet", {"compile": "eager"}, marks=pytest.mark.compile),
        # Blocks with running statistics are not compiled and keep them.
        pytest.param(
            *("resnet18", {"activation_checkpointing": ("image",), "compile": "eager"}),
            marks=pytest.mark.compile,
        ),
        pytest.param(
            *("clip", {"activation_checkpointing": ("image", "text"), "compile": "aot_eager"}),
            marks=pytest.mark.compile,
        ),
    ],
)
def test_transformed_model_takes_same_steps(name: str, settings: dict) -> None:
    """With dropout, patch dropout, BatchNorm statistics and cross-attention layers."""
    steps = 1 if "compile" in settings or name == "resnet18" else 3
    start, expected = build_model(name).state_dict(), train_plain(name, steps)
    weights = train(build_model(name, **settings), name, steps)
    assert max(float((expected[key] - start[key]).abs().max()) for key in start) > 0.003
    assert expected.keys() == weights.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-9, msg=key)


@pytest.mark.parametrize(("name", "branch"), [("clip", "text"), ("fusion", "cross")])
def test_activation_checkpointing_keeps_fewer_activations(name: str, branch: str) -> None:
    def saved(*branches: str) -> int:
        sizes: list[int] = []
        model = build_model(name, activation_checkpointing=branches).train()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda it: sizes.append(it.numel()) or it, lambda it: it
        ):
            model(synthetic_batch(SPECS[name].inputs, VOCAB, 6, CPU))
        return sum(sizes)

    others = tuple(other for other in build_model(name).branches() if other != branch)
    all_but_one = saved(*others)
    assert saved(*others, branch) < 0.5 * all_but_one < 0.5 * saved()


class Noise(nn.Module):
    """A user's layer."""


@pytest.mark.parametrize(
    ("block", "draws"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), Noise()), True),
        (nn.TransformerEncoderLayer(8, 2, dropout=0.0), False),
        (nn.TransformerEncoderLayer(8, 2, dropout=0.1), True),
    ],
)
def test_random_state_is_kept_only_for_blocks_that_may_draw(block: nn.Module, draws: bool) -> None:
    branch = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    checkpoint_activations(branch)
    assert block.forward.args[1]["preserve_rng_state"] is draws


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_inductor_takes_same_steps(kind: str) -> None:
    plain = recipe_models.train_kind(kind, Group(), "ddp")
    compiled = recipe_models.train_kind(kind, Group(), "ddp", backend="inductor")
    assert (compiled - plain).abs().max() < 1e-9


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["siglip", "naflex"])
def test_later_steps_do_not_recompile(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # graphs of other tests count toward a limit
    counter, counts = CompileCounter(), []

    def counted_step(*args: Any) -> None:
        optimizer_step(*args)
        counts.append(counter.frame_count)

    monkeypatch.setattr(recipe_models, "optimizer_step", counted_step)
    recipe_models.train_kind(kind, Group(), "ddp", 3, backend=counter)
    assert len(counts) == 3
    assert counts[0] == counts[2] > 0


def test_unsupported_combinations_are_refused() -> None:
    message = (
        r"train\.activation_checkpointing: the model has no branch `vision`; it has image, text"
    )
    with pytest.raises(UsageError, match=message):
        build_model("clip", activation_checkpointing=("vision",))


def run_probe(spec: Model, kind: str) -> None:
    config = Config(
        model=spec.model_copy(update={"vocab_size": VOCAB}), objective=Objective(kind=kind)
    )
    shape = BatchShape(3, 3, world_size=1)
    dry_run(config, build(spec, VOCAB), objectives.build(config.objective), Group(), shape, steps=1)


def test_probe_names_weights_without_gradient() -> None:
    run_probe(SPECS["convnet"], "contrastive")
    with_bias = SPECS["convnet"].model_copy(update={"logit_bias": -10.0})
    run_probe(with_bias, "sigmoid")
    with pytest.raises(
        UsageError, match=r"gives no gradient to 1 parameters .* --optimizer\.freeze logit_bias"
    ):
        run_probe(with_bias, "contrastive")


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("sigmoid", "logit_bias"), ("matching", "match"), ("classification", "class_logits")],
)
def test_probe_names_missing_model_output(kind: str, missing: str) -> None:
    with pytest.raises(
        UsageError, match=rf"objective\.kind: `{kind}` reads `{missing}`, .*model\.kind `two_tower`"
    ):
        run_probe(SPECS["convnet"], kind)


def test_probe_tells_key_errors_of_the_model_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoTowerModel, "forward", lambda _, batch: batch["caption"])
    with pytest.raises(TrainingError, match="the model's forward raised KeyError 'caption'"):
        run_probe(SPECS["convnet"], "contrastive")


def test_label_without_class_ends_the_run() -> None:
    config = Config(model=Towers(classes=3))
    _check_labels({"label": np.array([2, -1])}, config)
    for label, fix in ((3, r"set --model\.classes to 4"), (-100, "number the classes from 0")):
        with pytest.raises(
            DataError, match=rf"has label {label}, but model\.classes is 3, .*: {fix}"
        ):
            _check_labels({"label": np.array([0, label])}, config)
    _check_labels({"label": np.array([9])}, Config())
