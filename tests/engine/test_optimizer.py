"""Parameter groups, learning rates, and gradient clipping."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmray.engine import optimizer
from mmray.errors import UsageError
from tests.engine import toy

SECTION = SimpleNamespace(lr=1.0, warmup_steps=4, final_lr_fraction=0.2, schedule="cosine")


def test_only_trainable_matrices_have_weight_decay():
    model = toy.Toy(batch_norm=True)
    model.image.layers[6].requires_grad_(False)
    groups = optimizer.build_optimizer(model, toy.OPTIMIZER).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay, *others = ({names[p] for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    assert decay == {"image.layers.2.weight", "text.words.weight", "text.blocks.0.1.weight", "text.blocks.1.weight"}
    assert decay.union(*others) == set(names.values()) - {"image.layers.6.weight", "image.layers.6.bias"}


def test_last_matching_pattern_sets_the_learning_rate_also_after_resume():
    model = toy.Toy()
    section = toy.optimizer_settings(lr_multipliers=("image.*=0.1", "*.bias=2", "log_scale=1e-2"))
    adam = optimizer.build_optimizer(model, section)
    adam.load_state_dict(optimizer.build_optimizer(model, section).state_dict())
    optimizer.set_lr(adam, 0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[weight]: group["lr"] for group in adam.param_groups for weight in group["params"]}
    assert rates.keys() == set(names.values())
    assert rates["image.layers.2.weight"] == rates["image.layers.3.weight"] == 0.05
    assert rates["image.layers.2.bias"] == rates["text.blocks.1.bias"] == 1.0
    assert (rates["text.words.weight"], rates["log_scale"]) == (0.5, 0.005)
    with pytest.raises(UsageError, match=r"optimizer\.lr_multipliers: `vision\.\*` matches no parameter; .* log_scale"):
        optimizer.build_optimizer(model, toy.optimizer_settings(lr_multipliers=("vision.*=0.1",)))


@pytest.mark.parametrize("patterns", [("vision.*",), ("*",)])
def test_invalid_freeze_pattern_is_refused(patterns):
    with pytest.raises(UsageError, match=r"optimizer\.freeze: .*(matches no parameter|leaves no trainable)"):
        optimizer.freeze_parameters(toy.Toy(), patterns)


@pytest.mark.parametrize(
    ("schedule", "half", "last"),
    [("cosine", 0.6, 0.2), ("linear", 0.6, 0.2), ("constant", 1.0, 1.0), ("cooldown", 1.0, 0.2)],
)
def test_learning_rates_of_each_schedule(schedule, half, last):
    section = SimpleNamespace(**vars(SECTION) | {"schedule": schedule})
    rates = [optimizer.lr_at(step, section, 12) for step in range(13)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert (rates[8], rates[12], optimizer.lr_at(40, section, 12)) == pytest.approx((half, last, last))
    assert rates[4:] == sorted(rates[4:], reverse=True)
    if schedule == "cooldown":
        assert rates[10:12] == pytest.approx([1.0, 0.7])  # it falls in the last fifth of the eight steps


def test_schedule_without_warmup_and_run_shorter_than_warmup():
    assert optimizer.lr_at(0, SimpleNamespace(**vars(SECTION) | {"warmup_steps": 0}), 10) == 1.0
    assert all(0 < optimizer.lr_at(step, SECTION, total) <= 1 for total in (1, 4, 5) for step in range(total))


def model_with_gradients():
    model = toy.Branched()
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    return model


def test_clipping_equals_torch():
    ours, theirs = model_with_gradients(), model_with_gradients()
    norm = optimizer.grad_norm(list(ours.parameters()))
    optimizer.clip_gradients(list(ours.parameters()), norm, 1.0)
    assert torch.equal(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0), norm)
    torch.testing.assert_close(toy.flat_gradient(ours), toy.flat_gradient(theirs), rtol=0, atol=0)
