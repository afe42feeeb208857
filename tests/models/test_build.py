"""Properties of every built-in model: independent rows, no effect of padding, gradients,
rebuilding; custom models.

Also what all dual encoders share: pixels, temperature and precision.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmray.config import (
    CustomModel,
    ImageTower,
    Inputs,
    Lora,
    Model,
    TextTower,
    TwoTower,
    model_section,
)
from mmray.errors import UsageError
from mmray.models import protocol
from mmray.models.build import build, build_on
from mmray.models.protocol import PRETRAINED, RANDOM_WEIGHTS, saved_layers
from mmray.models.synthetic import synthetic_batch
from tests.engine.fake_cuda import DEVICES, fake_gpus
from tests.models import test_clip, test_fusion

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 40
INPUTS = Inputs(image_side=32, mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1), max_tokens=12)


def two_tower(image: str = "convnet", **changes: Any) -> TwoTower:
    text = TextTower(width=16, depth=1, heads=2)
    return TwoTower(
        inputs=INPUTS, image=test_fusion.IMAGES[image], text=text, embed_dim=8, **changes
    )


SPECS: dict[str, Model] = {
    **test_clip.SPECS,
    **{image: two_tower(image) for image in test_fusion.IMAGES},
    **{f"fusion-{image}": test_fusion.spec_of(image) for image in test_fusion.IMAGES},
    "fusion without heads": test_fusion.spec_of(matching=False, classes=0),
}


def model_of(spec: Model) -> Any:
    torch.manual_seed(0)
    return build(spec, VOCAB).double()


def batch_of(spec: Model, rows: int = 4) -> dict[str, Tensor]:
    batch = synthetic_batch(spec.inputs, VOCAB, rows, "cpu")
    mask = (torch.arange(spec.inputs.max_tokens) < (torch.arange(rows) % 4 + 3)[:, None]).long()
    negatives = {"negative_ids": batch["input_ids"].flip(1), "negative_mask": mask.flip(0)}
    return (
        batch
        | negatives
        | {"attention_mask": mask, "has_negative": torch.ones(rows, dtype=torch.bool)}
    )


def rows_of(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if value.ndim}


@pytest.mark.parametrize("name", SPECS)
def test_rows_are_independent_of_each_other_and_of_padding(name: str) -> None:
    """A wrong implementation of cross-attention that takes (B, D) for a sequence attends across the
    batch.
    """
    model, batch = model_of(SPECS[name]).eval(), batch_of(SPECS[name])
    before = rows_of(model(batch))
    heads = {"class_logits", "match", "match_negative"} if name.startswith("fusion-") else set()
    assert before.keys() == {"image_embed", "text_embed"} | heads
    changed = {column: value.clone() for column, value in batch.items()}
    for ids, mask in (("input_ids", "attention_mask"), ("negative_ids", "negative_mask")):
        changed[ids][batch[mask] == 0] = 7  # padding
        changed[ids][1, :3] = changed[ids][1, :3].flip(0) + 1
    changed["image"][1] = 255 - changed["image"][1]
    others = torch.tensor([0, 2, 3])
    for output, value in rows_of(model(changed)).items():
        torch.testing.assert_close(
            value[others], before[output][others], rtol=0, atol=1e-9, msg=output
        )
        assert (value[1] - before[output][1]).abs().max() > 1e-6, output
    cut = {
        column: value[:1, :6] if value.ndim == 2 else value[:1] for column, value in batch.items()
    }
    for output, value in rows_of(model(cut)).items():
        torch.testing.assert_close(value, before[output][:1], rtol=0, atol=1e-9, msg=output)
    assert torch.equal(model.embed_image(batch["image"]), before["image_embed"])
    assert torch.equal(
        model.embed_text(batch["input_ids"], batch["attention_mask"]), before["text_embed"]
    )
    torch.testing.assert_close(before["image_embed"].norm(dim=1), torch.ones(4).double())


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    """Some captions are empty. The branches share no weights."""
    model, batch = model_of(SPECS[name]).train(), batch_of(SPECS[name])
    batch["attention_mask"][2:] = 0
    batch["negative_mask"][:] = 0
    outputs = model(batch).values()
    sum(
        (output * torch.arange(output.numel()).view(output.shape)).sum() for output in outputs
    ).backward()
    assert [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.grad is None
    ] == []
    assert all(
        weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None
    )
    branches = [set(branch.parameters()) for branch in model.branches().values()]
    assert sum(map(len, branches)) == len(set().union(*branches))


@pytest.mark.parametrize("name", SPECS)
def test_model_rebuilds_from_its_architecture(name: str) -> None:
    spec = SPECS[name]
    model, batch = model_of(spec), batch_of(spec)
    moved = (
        spec.model_copy(update={"weights": "/no/such/place"}) if hasattr(spec, "weights") else spec
    )
    saved = saved_layers(json.loads(json.dumps(model.architecture())))
    again = build(moved, VOCAB, saved).double().eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(batch), model.eval()(batch), rtol=0, atol=0)
    build(moved, VOCAB, RANDOM_WEIGHTS).load_state_dict(model.state_dict())


HF_TOWERS = {
    "image": {
        "model_type": "dinov2",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    | {"patch_size": 16, "image_size": 32},
    "text": {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    | {"vocab_size": VOCAB},
}
OTHER_SPECS: dict[str, Model] = {
    "lora": two_tower(lora=Lora(rank=2, targets=("text.*",))),
    "transformers": TwoTower(
        inputs=INPUTS,
        image=ImageTower(name="transformers", weights="dinov2"),
        text=TextTower(weights="bert"),
    ),
}


@pytest.mark.parametrize("name", [*SPECS, *OTHER_SPECS])
def test_model_without_weights_has_no_parameter_in_memory_and_the_same_buffers(name: str) -> None:
    """Positions, rotary frequencies and running statistics are values, not garbage; all names and
    shapes are equal.
    """
    spec = (SPECS | OTHER_SPECS)[name]
    model: Any = build(
        spec, VOCAB, saved_layers(HF_TOWERS) if name == "transformers" else PRETRAINED
    )
    saved = saved_layers(json.loads(json.dumps(model.architecture())))
    without = build_on("meta", spec, VOCAB, saved)
    assert {name: value.shape for name, value in without.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    for (name, weight), other in zip(model.named_parameters(), without.parameters(), strict=True):
        assert other.is_meta and (weight.requires_grad, weight.dtype) == (
            other.requires_grad,
            other.dtype,
        ), name
    buffers = dict(without.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, value in model.named_buffers():
        assert torch.equal(buffers[name], value), name
    assert not nn.Linear(1, 1).weight.is_meta  # later models have weights


class Draws(TorchDispatchMode):
    """Devices on which random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[torch.device] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            self.devices.add(args[0].device)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["clip", "fusion-resnet18", "lora"])
def test_random_weights_are_drawn_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = (SPECS | OTHER_SPECS)[name]
    torch.manual_seed(0)
    expected = build(spec, VOCAB)  # also imports transformers, before torch.cuda is fake
    with fake_gpus(monkeypatch), Draws() as draws:
        torch.manual_seed(0)
        model = build_on(DEVICES[0], spec, VOCAB)
        weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    assert {weight.device for weight in model.parameters()} == draws.devices == {DEVICES[0]}
    assert all(torch.equal(weights[name], each) for name, each in expected.state_dict().items())


def test_custom_kind_that_computes_with_its_weights_is_built_with_them() -> None:
    for name in ("Scaled", "ScaledByNumpy"):
        kind = f"{__name__}:{name}"
        model = build_on("meta", model_section(kind)(kind=kind), VOCAB)
        assert float(model.scale) == pytest.approx(1.0)
    kind = f"{__name__}:Custom"
    assert isinstance(build_on("meta", model_section(kind)(kind=kind), VOCAB), Custom)


def test_temperature_starts_as_set_and_is_clamped() -> None:
    model: Any = build(two_tower(temperature=0.2), VOCAB)
    model.clamp_parameters()
    assert model.scalar_outputs()["logit_scale"].item() == pytest.approx(5.0)
    with torch.no_grad():
        model.log_scale.fill_(10.0)
    model.clamp_parameters()
    assert model.log_scale.item() == pytest.approx(math.log(100))
    assert model.log_scale.requires_grad


class Custom(nn.Module):
    """A user's model."""

    def __init__(self, spec: CustomModel, vocab_size: int) -> None:
        super().__init__()
        self.seen = (spec.kind, vocab_size)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError


class Scaled(Custom):
    """Computes with its weights."""

    def __init__(self, spec: CustomModel, vocab_size: int) -> None:
        super().__init__(spec, vocab_size)
        self.layer = nn.Linear(3, 3)
        self.scale = self.layer.weight.norm().item() / self.layer.weight.norm().item()


class ScaledByNumpy(Custom):
    """Computes with its weights in NumPy."""

    def __init__(self, spec: CustomModel, vocab_size: int) -> None:
        super().__init__(spec, vocab_size)
        self.layer = nn.Linear(3, 3)
        weight = self.layer.weight.detach().numpy()
        self.scale = (weight / weight).mean()


class WithoutForward(nn.Module):
    """A class without `forward`."""

    def __init__(self, *_: object) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (f"{__name__}:Custom", None),
        ("two_towers", r"unknown kind `two_towers`; use one of two_tower"),
        ("no_such_package:Model", r"cannot load `no_such_package:Model`: No module named"),
        ("mmray.models.build:Missing", r"cannot load `mmray\.models\.build:Missing`"),
        (f"{__name__}:WithoutForward", r"has no forward\(batch\); see mmray/models/protocol\.py"),
        ("operator:is_", r"`operator:is_` built a bool, not a torch\.nn\.Module"),
    ],
)
def test_custom_kind(kind: str, message: str | None) -> None:
    if message is None:
        model: Any = build(model_section(kind)(kind=kind), VOCAB)
        assert model.seen == (kind, VOCAB)
        assert isinstance(model, Custom) and type(model).__name__ == "Custom"
        assert isinstance(copy.deepcopy(model), protocol.Model), "with the optional methods"
        assert (model.branches(), model.architecture(), model.build_notes) == ({}, {}, ())
        return
    with pytest.raises(UsageError, match=rf"^model\.kind: .*{message}"):
        build(model_section(kind)(kind=kind), VOCAB)
