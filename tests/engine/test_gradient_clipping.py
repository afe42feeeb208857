"""Global clipping equals torch; with clipping per branch, large gradients of one do not scale down others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmray.engine import optimizer as clip
from mmray.errors import UsageError
from tests.engine import toy
from tests.engine.test_loop import plan_of, train


def model_with_gradients():
    model = toy.Branched()
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    return model


def measured(groups):
    found = clip.grad_norms(groups)
    return dict(zip(groups, found.tolist(), strict=True)), found


def test_global_clipping_equals_torch():
    ours, theirs = model_with_gradients(), model_with_gradients()
    groups = clip.make_clip_groups(ours, "model")
    norms, found = measured(groups)
    clip.clip_gradients(groups, found, norms, 1.0)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert norms == {"": pytest.approx(expected.item())}
    torch.testing.assert_close(toy.flat_gradient(ours), toy.flat_gradient(theirs), rtol=0, atol=0)


def test_branches_are_clipped_by_their_own_norms():
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


def test_frozen_branches_are_ignored_and_zero_disables_clipping():
    model = model_with_gradients()
    for parameter in model.text.parameters():
        parameter.requires_grad_(False)
    groups = clip.make_clip_groups(model, "branch")
    assert list(groups) == ["image", "rest"]
    before = toy.flat_gradient(model)
    norms, found = measured(groups)
    clip.clip_gradients(groups, found, norms, 0.0)
    assert torch.equal(toy.flat_gradient(model), before)


def test_total_norm_and_norm_of_each_branch_are_logged():
    log = toy.Lines()
    settings = SimpleNamespace(**vars(toy.OPTIMIZER) | {"clip_per": "branch"})
    with pytest.raises(UsageError, match=r"Toy has no branches\(\); use `model`"):
        train(toy.Toy(), plan_of(2), optimizer=settings)
    train(toy.Branched(), plan_of(2), log=log, optimizer=settings)
    (line,) = log.lines
    parts = [line[f"train/grad_norm_{name}"] for name in ("image", "text", "rest")]
    assert line["train/grad_norm"] == pytest.approx(sum(part**2 for part in parts) ** 0.5)
    assert all(part > 0 for part in parts)
