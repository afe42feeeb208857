"""`train.float8`: wide layers train in float8, and everything else is as without it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmray import plugins
from mmray.config import Batch, Clip, ClipImage, ClipText, Inputs, Lora, Train
from mmray.engine import build as build_module
from mmray.engine.collectives import Group
from mmray.engine.metrics.meters import model_flops_of_row
from mmray.engine.parallel import device_defaults
from mmray.engine.parallel.float8 import check_device, convert_branches
from mmray.engine.parallel.transforms import (
    apply_transforms,
    branches_of,
    may_draw_random_numbers,
    num_compiled_graphs,
)
from mmray.engine.precision import Precision
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.protocol import RANDOM_WEIGHTS
from mmray.models.synthetic import synthetic_batch
from tests.engine import toy
from tests.engine.recipe_models import VOCAB
from tests.engine.single_worker import make_prepared, run_config
from tests.training import runs

CPU = torch.device("cpu")
BF16 = Precision("bf16", torch.bfloat16, "cpu")
WIDE = ClipImage(width=1040, depth=1, heads=13, patch=8)
NARROW_IMAGE = ClipImage(width=1008, depth=1, heads=9, patch=8)
NARROW = ClipText(width=16, depth=1, heads=2)
SPEC = Clip(inputs=Inputs(image_side=16, max_tokens=8), image=WIDE, text=NARROW, embed_dim=8)
LINE = "float8 tensorwise: 6 of 6 linear layers of image"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of values in float8 are computed in float32: CPUs have slow kernels for float8."""
    settings = pytest.importorskip("torchao.float8").Float8LinearConfig
    from_name = settings.from_recipe_name

    def emulated(name: str) -> Any:
        return replace(from_name(name), emulate=True)

    monkeypatch.setattr(settings, "from_recipe_name", staticmethod(emulated))


def model_of(spec: Any = SPEC, notes: list[str] | None = None, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build(spec, VOCAB, RANDOM_WEIGHTS)
    train = toy.train_settings(**settings)

    def notify(label: str, text: str) -> None:
        if notes is not None:
            notes.append(text)

    return apply_transforms(model, train, toy.OPTIMIZER, Group(), notify).train()


def rows() -> dict[str, Tensor]:
    return synthetic_batch(SPEC.inputs, VOCAB, 3, CPU)


def gradients(model: nn.Module) -> Tensor:
    """Gradients of a loss of 3 rows, which have 15 tokens of images, in one vector."""
    outputs = model(rows())
    scores = outputs["image_embed"] @ outputs["text_embed"].T
    scores.square().sum().backward()
    return torch.cat(
        [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    )


def difference(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference, relative to that of the reference."""
    return float((value - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    "settings", [{}, {"compile": "eager", "activation_checkpointing": ("image",)}]
)
def test_gradients_are_near_those_without_float8(torchao: None, settings: dict) -> None:
    """By 9 % for these few rows, whose gradients partly cancel; a wrong scale changes them all."""
    notes: list[str] = []
    converted = model_of(notes=notes, float8="tensorwise", **settings)
    assert notes == [LINE]
    assert 0.01 < difference(gradients(converted), gradients(model_of())) < 0.15


@pytest.mark.compile
def test_blocks_share_a_graph(torchao: None) -> None:
    graphs = []
    for depth in (1, 2):
        torch.compiler.reset()
        before = num_compiled_graphs()
        spec = SPEC.replace(image=WIDE.replace(depth=depth))
        gradients(model_of(spec, float8="tensorwise", compile="eager"))
        graphs.append(num_compiled_graphs() - before)
    assert graphs[0] == graphs[1] > 0


def test_only_training_is_in_float8(torchao: None) -> None:
    plain = model_of()
    converted = model_of(float8="tensorwise")
    assert list(converted.state_dict()) == list(plain.state_dict())
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in converted.named_parameters()] == names
    flops = model_flops_of_row(plain, rows(), BF16)
    assert model_flops_of_row(converted, rows(), BF16) == flops
    assert not may_draw_random_numbers(converted)  # otherwise no CUDA graphs
    average = copy.deepcopy(converted)
    with torch.no_grad(), BF16.autocast():
        trained = plain(rows())["image_embed"]
        for model in (converted, average):  # the second one as EMA has it
            assert difference(model(rows())["image_embed"].float(), trained.float()) > 0.01
        expected = plain.eval()(rows())["image_embed"]
        for model in (converted.eval(), average.eval()):
            assert torch.equal(model(rows())["image_embed"], expected)


@pytest.mark.compile
def test_run_continues_without_float8_and_with_it(
    torchao: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker on a GPU does it, up to torch.compile."""
    monkeypatch.setattr(device_defaults, "check_device", lambda *_: None)
    monkeypatch.setattr(build_module, "unsupported_reasons", lambda _: [])
    prepared = make_prepared(tmp_path / "set")
    config = runs.config("made", tmp_path, "run", precision="bf16", ema=0.5)
    config = config.replace(
        model=SPEC, batch=Batch(micro=4, global_=4), optimizer=config.optimizer.replace(lr=1e-4)
    )
    checkpoint = None
    for steps, float8 in ((1, "tensorwise"), (2, "none"), (3, "tensorwise")):
        run = config.replace(train=config.train.replace(steps=steps, float8=float8))
        result, messages = run_config(run, prepared, tmp_path / "run", prepared, checkpoint)
        notes = [message["note"] for message in messages if "note" in message]
        assert (LINE in notes) == (float8 != "none")
        assert (result["status"], result["steps"]) == ("finished", steps)
        checkpoint = tmp_path / "run" / "checkpoints" / f"step-{steps}"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            SPEC.replace(image=WIDE.replace(width=1024, heads=16)),
            "image, text is so wide that float8",
        ),
        (
            SPEC.replace(lora=Lora(rank=2, targets=("image.*.fc1",))),
            "train.float8 rowwise: no trainable linear layer",
        ),
    ],
)
def test_model_without_wide_trainable_layers_is_refused(
    torchao: None, spec: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        model_of(spec, float8="rowwise")


@pytest.mark.parametrize(
    ("recipe", "converted"),
    [
        ("tensorwise", ["k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"]),
        ("rowwise", ["fc1"]),  # a scale per row takes more time
    ],
)
def test_torchao_decides_which_layers_gain(
    torchao: None, recipe: str, converted: list[str]
) -> None:
    model = build(SPEC, VOCAB, RANDOM_WEIGHTS)
    convert_branches(branches_of(model), recipe)
    classes = {name: type(layer).__name__ for name, layer in model.named_modules()}
    names = [name.rpartition(".")[2] for name, kind in classes.items() if "Float8" in kind]
    assert names == converted


@pytest.mark.parametrize(
    ("capability", "given", "message"),
    [
        (None, {}, "tensorwise needs GPUs of compute capability 8.9 or higher, not a CPU"),
        ((8, 0), {}, "8.9 or higher, not one of 8.0"),
        ((8, 9), {"float8": "rowwise"}, "rowwise needs GPUs of compute capability 9.0 or higher"),
    ],
)
def test_devices_on_which_it_does_not_pay_are_refused(
    capability: tuple[int, int] | None, given: dict, message: str
) -> None:
    settings = {"float8": "tensorwise", "precision": "bf16", "compile": "inductor"}
    check_device(Train(**settings), (8, 9))
    with pytest.raises(UsageError, match=f"^train.float8 .*{message}.*; set --train.float8 none$"):
        check_device(Train(**settings | given), capability)


def test_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r'train.float8: needs torchao.*"mmray\[float8\]"'):
        model_of(float8="tensorwise")
