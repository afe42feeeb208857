"""Clipping of all weights as one is torch's own; by branches, a loud branch does not silence the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmray.engine import optimizer as clip
from mmray.errors import UsageError
from tests.train import toy
from tests.train.test_loop import plan_of, train


def model_with_gradients():
    model = toy.Branched()
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    return model


def measured(groups):
    found = clip.grad_norms(groups)
    return dict(zip(groups, found.tolist(), strict=True)), found


def test_global_is_torchs_own():
    ours, theirs = model_with_gradients(), model_with_gradients()
    groups = clip.make_clip_groups(ours, "model")
    norms, found = measured(groups)
    clip.clip_gradients(groups, found, norms, 1.0)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert norms == {"": pytest.approx(expected.item())}
    torch.testing.assert_close(toy.flat_gradient(ours), toy.flat_gradient(theirs), rtol=0, atol=0)


def test_by_branches_each_is_clipped_by_its_own_norm():
    model = model_with_gradients()
    model.log_scale.grad = torch.tensor(0.5)
    groups = clip.make_clip_groups(model, "branch")
    assert list(groups) == ["image", "text", "rest"]
    expected = {name: torch.cat([p.grad.flatten() for p in group]).norm().item() for name, group in groups.items()}
    norms, found = measured(groups)
    assert norms == pytest.approx(expected)
    clip.clip_gradients(groups, found, norms, 1.0)
    after, _ = measured(groups)
    assert after == pytest.approx({"image": 1.0, "text": 1.0, "rest": 0.5}, rel=1e-4)


def test_frozen_branches_are_no_group_and_nothing_is_clipped_at_zero():
    model = model_with_gradients()
    for parameter in model.text.parameters():
        parameter.requires_grad_(False)
    groups = clip.make_clip_groups(model, "branch")
    assert list(groups) == ["image", "rest"]
    before = toy.flat_gradient(model)
    norms, found = measured(groups)
    clip.clip_gradients(groups, found, norms, 0.0)
    assert torch.equal(toy.flat_gradient(model), before)


def test_the_norms_are_logged_apart_and_together():
    log = toy.Lines()
    settings = SimpleNamespace(**vars(toy.OPTIMIZER) | {"clip_per": "branch"})
    with pytest.raises(UsageError, match=r"Toy has no branches\(\); use `model`"):
        train(toy.Toy(), plan_of(2), optimizer=settings)
    train(toy.Branched(), plan_of(2), log=log, optimizer=settings)
    (line,) = log.lines
    parts = [line[f"train/grad_norm_{name}"] for name in ("image", "text", "rest")]
    assert line["train/grad_norm"] == pytest.approx(sum(part**2 for part in parts) ** 0.5)
    assert all(part > 0 for part in parts)
