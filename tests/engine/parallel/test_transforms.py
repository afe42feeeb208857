"""Activation checkpointing, compiled branches and channels-last weights take the steps of the plain model."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from mmray import objectives
from mmray.config import (
    ChatInputs,
    Clip,
    ClipImage,
    ClipText,
    Config,
    CrossAttention,
    Decoder,
    Fusion,
    Generative,
    ImageTower,
    Inputs,
    Model,
    Objective,
    Siglip,
    TextTower,
    TwoTower,
)
from mmray.config import Optimizer as OptimizerSection
from mmray.engine import optimizer
from mmray.engine.bad_samples import _check_labels
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import dry_run
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.precision import micro_seed, seeded
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.errors import DataError, UsageError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from tests.engine import recipe_models, toy

VOCAB = 40
INPUTS = Inputs(image_side=32, max_tokens=8)
TEXT = TextTower(width=16, depth=2, heads=2, dropout=0.2)
CONVNET = ImageTower(name="convnet", width=8, depth=2)
IMAGE, WORDS = ClipImage(width=16, depth=2, heads=2, patch=16), ClipText(width=16, depth=2, heads=2)
SPECS: dict[str, Model] = {
    "convnet": TwoTower(inputs=INPUTS, image=CONVNET, text=TEXT, embed_dim=8),
    "resnet18": TwoTower(inputs=INPUTS, image=ImageTower(name="resnet18"), text=TEXT, embed_dim=8),
    "clip": Clip(inputs=INPUTS, image=IMAGE, text=WORDS, embed_dim=8, patch_dropout=0.5),
    "siglip": Siglip(inputs=INPUTS, image=IMAGE, text=WORDS, patch_dropout=0.5),
    "fusion": Fusion(
        inputs=INPUTS,
        image=CONVNET,
        text=TEXT,
        cross=CrossAttention(width=16, depth=2, heads=2, dropout=0.2),
        embed_dim=8,
        classes=3,
    ),
    "generative": Generative(
        inputs=ChatInputs(image_side=32, max_tokens=8),
        image=IMAGE,
        text=Decoder(width=16, depth=2, heads=2),
    ),
}
OBJECTIVES = {
    "siglip": "sigmoid",
    "fusion": "contrastive + 0.5 * matching + classification",
    "generative": "language_modelling",
}
CPU = torch.device("cpu")


def settings(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(
        **{"activation_checkpointing": (), "compile": "none", "channels_last": False, "parallel": "ddp"} | changes
    )


def shaped(name: str, **changes: object) -> nn.Module:
    torch.manual_seed(0)
    return apply_transforms(build(SPECS[name], VOCAB), settings(**changes), OptimizerSection(), CPU).double()


def trained(model: nn.Module, steps: int = 3, name: str = "") -> dict[str, Tensor]:
    """Weights and buffers after some steps of two micro-batches."""
    state = toy.train_state(model.train(), objective=toy.objective(OBJECTIVES.get(name, "contrastive")))
    inputs = SPECS[name].inputs if name else INPUTS
    for step in range(steps):
        batch = synthetic_batch(inputs, VOCAB, 6, CPU, seed=step)
        share = make_local_batch(toy.cut(batch, 3))
        optimizer_step(state, share, lambda index, step=step: micro_seed(1, step, 0, index))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", SPECS)
def test_activation_checkpointing_takes_same_steps(name: str) -> None:
    """With dropout, patch dropout, BatchNorm statistics and cross-attention layers."""
    branches = tuple(shaped(name).branches())
    plain, again = trained(shaped(name), name=name), trained(shaped(name, activation_checkpointing=branches), name=name)
    start = shaped(name).state_dict()
    assert max(float((plain[key] - start[key]).abs().max()) for key in start) > 0.01
    assert plain.keys() == again.keys()
    for key, value in plain.items():
        torch.testing.assert_close(again[key], value, rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize(("name", "branch"), [("clip", "text"), ("fusion", "cross"), ("generative", "text")])
def test_activation_checkpointing_keeps_fewer_activations(name: str, branch: str) -> None:
    def kept(model: nn.Module) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t
        ):
            model.train()(synthetic_batch(SPECS[name].inputs, VOCAB, 6, CPU))
        return sum(sizes)

    others = tuple(other for other in shaped(name).branches() if other != branch)
    all_but_one = kept(shaped(name, activation_checkpointing=others))
    assert kept(shaped(name, activation_checkpointing=(*others, branch))) < 0.5 * all_but_one < 0.5 * kept(shaped(name))


def test_compiled_branches_take_same_steps() -> None:
    plain, compiled = trained(shaped("convnet"), 1), trained(shaped("convnet", compile="eager"), 1)
    assert plain.keys() == compiled.keys()
    for key, value in plain.items():
        torch.testing.assert_close(compiled[key], value, rtol=0, atol=1e-9, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_inductor_takes_same_steps(kind: str) -> None:
    plain = recipe_models.weights_of(kind, Group(), "ddp")
    compiled = recipe_models.weights_of(kind, Group(), "ddp", backend="inductor")
    within = (
        1e-5 if kind == "generative" else 1e-9
    )  # language models of transformers normalize in float32 in any precision
    assert (compiled - plain).abs().max() < within


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "clip"])
def test_inductor_dropout_is_equal_with_and_without_gradients(name: str) -> None:
    """Cached accumulation forwards a micro-batch twice; different dropout would change the gradient."""
    model, batch = shaped(name, compile="inductor").train(), synthetic_batch(INPUTS, VOCAB, 3, CPU)
    with seeded(5, CPU), torch.no_grad():
        first = model(batch)
    with seeded(5, CPU):
        second = model(batch)
    with seeded(6, CPU):
        other = model(batch)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.allclose(other[key], second[key]) for key in first)


@pytest.mark.parametrize("kind", ["clip", "generative"])
def test_later_steps_do_not_recompile(kind: str) -> None:
    compiled = []
    for steps in (1, 3):
        torch._dynamo.reset()  # graphs of other tests count toward a limit
        counted = CompileCounter()
        recipe_models.weights_of(kind, Group(), "ddp", steps, backend=counted)
        compiled.append(counted.frame_count)
    assert compiled[0] == compiled[1] > 0


@pytest.mark.parametrize("name", ["clip", "resnet18"])
def test_copy_of_checkpointed_model_learns_independently(name: str) -> None:
    model = shaped(name, activation_checkpointing=("image",))
    copied = copy.deepcopy(model)
    copied.image(synthetic_batch(INPUTS, VOCAB, 2, CPU)["image"])[:, 0].sum().backward()
    assert all(weight.grad is None for weight in model.parameters())
    assert all(weight.grad is not None for weight in copied.image.parameters())


@pytest.mark.parametrize("name", ["clip", "resnet18"])
def test_activation_checkpointing_with_compile_takes_same_steps(name: str) -> None:
    """Patch dropout is equal; blocks with running statistics are not compiled and keep them."""
    plain, compiled = (
        trained(shaped(name, activation_checkpointing=("image",), compile=backend), 1)
        for backend in ("none", "aot_eager")
    )
    assert plain.keys() == compiled.keys()
    for key, value in plain.items():
        torch.testing.assert_close(compiled[key], value, rtol=0, atol=1e-9, msg=key)


def test_channels_last_has_the_same_gradient() -> None:
    models = [shaped("resnet18", channels_last=True), shaped("resnet18")]
    assert models[0].image.tower.net.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    for model in models:
        model.image(synthetic_batch(INPUTS, VOCAB, 6, CPU)["image"])[:, 0].sum().backward()
    for (name, one), other in zip(models[0].image.named_parameters(), models[1].image.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-9, msg=name)


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"train\.activation_checkpointing: the model has no branch `vision`; it has image, text"
    ):
        shaped("clip", activation_checkpointing=("vision",))
    synced = SPECS["resnet18"].model_copy(update={"batch_norm": "synced"})
    with pytest.raises(UsageError, match=r"model\.batch_norm: `synced` needs GPUs"):
        apply_transforms(build(synced, VOCAB), settings(), OptimizerSection(), CPU)


def test_weights_frozen_by_pattern_stay_and_others_learn() -> None:
    torch.manual_seed(0)
    given = OptimizerSection(freeze=("image.tower.*", "log_scale"))
    model = apply_transforms(build(SPECS["clip"], VOCAB), settings(), given, CPU)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trained(model)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if not name.startswith("image.tower.") and name != "log_scale"}


@pytest.mark.parametrize("patterns", [("vision.*",), ("*",)])
def test_invalid_freeze_pattern_is_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"optimizer\.freeze: .*(matches no parameter|leaves no trainable)"):
        optimizer.freeze_parameters(toy.Toy(), patterns)


def rehearsed(spec: Model, kind: str) -> None:
    config = Config(model=spec.model_copy(update={"vocab_size": VOCAB}), objective=Objective(kind=kind))
    state = toy.train_state(build(spec, VOCAB), objective=objectives.build(config.objective))
    dry_run(config, state, lambda rows: synthetic_batch(INPUTS, VOCAB, rows, CPU), 3, 3)


def test_probe_names_weights_without_gradient() -> None:
    rehearsed(SPECS["convnet"], "contrastive")
    with_bias = SPECS["convnet"].model_copy(update={"logit_bias": -10.0})
    rehearsed(with_bias, "sigmoid")
    with pytest.raises(UsageError, match=r"gives no gradient to 1 parameters .* --optimizer\.freeze logit_bias"):
        rehearsed(with_bias, "contrastive")


@pytest.mark.parametrize(
    ("kind", "missing"), [("sigmoid", "logit_bias"), ("matching", "match"), ("classification", "class_logits")]
)
def test_probe_names_missing_model_output(kind: str, missing: str) -> None:
    with pytest.raises(UsageError, match=rf"objective\.kind: `{kind}` reads `{missing}`, .*model\.kind `two_tower`"):
        rehearsed(SPECS["convnet"], kind)


def test_label_without_class_ends_the_run() -> None:
    job = SimpleNamespace(config=Config(model=Fusion(classes=3)))
    _check_labels({"label": np.array([2, -1])}, job.config)
    with pytest.raises(DataError, match=r"has label 3, but model\.classes is 3: .* --model\.classes to 4"):
        _check_labels({"label": np.array([0, 3])}, job.config)
    _check_labels({"label": np.array([9])}, Config())
