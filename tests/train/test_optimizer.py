"""Who decays, and that frozen weights are left out."""

from __future__ import annotations

from mmray.train import optimizer
from tests.train import toy


def test_matrices_decay_and_nothing_else():
    model = toy.Toy(batch_norm=True)
    adam = optimizer.build(model, toy.OPTIMIZER)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay, rest = ({names[p] for p in group["params"]} for group in adam.param_groups)
    assert decay == {"pixels.2.weight", "pixels.6.weight", "words.weight", "caption.1.weight"}
    assert decay | rest == set(names.values())
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0]
    assert "log_scale" in rest


def test_frozen_weights_are_left_out():
    model = toy.Toy()
    model.pixels.requires_grad_(False)
    kept = sum(len(group["params"]) for group in optimizer.build(model, toy.OPTIMIZER).param_groups)
    assert kept == len(list(model.parameters())) - len(list(model.pixels.parameters()))


def test_the_rate_reaches_every_group():
    adam = optimizer.build(toy.Toy(), toy.OPTIMIZER)
    optimizer.set_lr(adam, 0.125)
    assert [group["lr"] for group in adam.param_groups] == [0.125, 0.125]
