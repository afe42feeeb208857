"""Weight decay, learning rates by group, and frozen weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mmray.engine import optimizer
from mmray.errors import UsageError
from tests.engine import toy


def test_only_matrices_have_weight_decay():
    model = toy.Toy(batch_norm=True)
    adam = optimizer.build_optimizer(model, toy.OPTIMIZER)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay, *others = ({names[p] for p in group["params"]} for group in adam.param_groups)
    rest = set().union(*others)
    assert decay == {"pixels.2.weight", "pixels.6.weight", "words.weight", "caption.1.weight"}
    assert decay | rest == set(names.values())
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0, 0.0]
    assert "log_scale" in rest


def test_frozen_weights_are_excluded():
    model = toy.Toy()
    model.pixels.requires_grad_(False)
    kept = sum(len(group["params"]) for group in optimizer.build_optimizer(model, toy.OPTIMIZER).param_groups)
    assert kept == len(list(model.parameters())) - len(list(model.pixels.parameters()))


def test_learning_rate_is_set_in_each_group():
    adam = optimizer.build_optimizer(toy.Toy(), toy.OPTIMIZER)
    optimizer.set_lr(adam, 0.125)
    assert [group["lr"] for group in adam.param_groups] == [0.125] * 3


def test_last_matching_pattern_sets_the_learning_rate():
    model = toy.Toy()
    section = SimpleNamespace(
        **vars(toy.OPTIMIZER) | {"lr_multipliers": ("pixels.*=0.1", "*.bias=2", "log_scale=1e-2")}
    )
    adam = optimizer.build_optimizer(model, section)
    optimizer.set_lr(adam, 0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[weight]: group["lr"] for group in adam.param_groups for weight in group["params"]}
    assert rates.keys() == set(names.values())
    assert rates["pixels.2.weight"] == rates["pixels.3.weight"] == 0.05
    assert rates["pixels.2.bias"] == rates["caption.1.bias"] == 1.0
    assert rates["words.weight"] == 0.5
    assert rates["log_scale"] == 0.005
    decays = {names[weight] for group in adam.param_groups for weight in group["params"] if group["weight_decay"]}
    assert decays == {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    with pytest.raises(UsageError, match=r"optimizer\.lr_multipliers: `image\.\*` matches no parameter .* log_scale"):
        optimizer.build_optimizer(model, SimpleNamespace(**vars(section) | {"lr_multipliers": ("image.*=0.1",)}))


def test_group_keeps_its_factor_after_resume():
    model = toy.Toy()
    section = SimpleNamespace(**vars(toy.OPTIMIZER) | {"lr_multipliers": ("pixels.*=0.1",)})
    again = optimizer.build_optimizer(model, section)
    again.load_state_dict(optimizer.build_optimizer(model, section).state_dict())
    optimizer.set_lr(again, 1.0)
    assert sorted({group["lr"] for group in again.param_groups}) == [0.1, 1.0]
