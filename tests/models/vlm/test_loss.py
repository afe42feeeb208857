"""The chunked cross-entropy against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmray.models.vlm import loss as module
from mmray.models.vlm.loss import chunked_cross_entropy


@pytest.mark.parametrize("size", [0, 1, 7, 8])
def test_loss_and_gradients_equal_those_of_all_logits(size, monkeypatch):
    torch.manual_seed(0)
    hidden = torch.randn(size, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (size,))
    weights = torch.rand(size)
    logits = hidden @ weight.T
    expected = (weights * F.cross_entropy(logits, targets, reduction="none")).sum()
    gradients = torch.autograd.grad(3 * expected, [hidden, weight])
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 11 * 3)  # three rows
    losses = torch.zeros(size)
    loss, correct = chunked_cross_entropy(hidden, weight, targets, weights, losses)
    each = weights * F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, each.detach().float())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert int(correct) == int((logits.argmax(dim=1) == targets).sum())
    for own, plain in zip(torch.autograd.grad(3 * loss, [hidden, weight]), gradients, strict=True):
        torch.testing.assert_close(own, plain, atol=1e-12, rtol=1e-12)


def test_frozen_output_layer_gets_no_gradient():
    hidden = torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(11, 6)
    loss, _ = chunked_cross_entropy(hidden, weight, torch.arange(4), torch.ones(4))
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_half_precision_computes_the_loss_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(100, 32, requires_grad=True)
    targets = torch.randint(0, 100, (64,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = chunked_cross_entropy(hidden, weight, targets, torch.ones(64))
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    plain = torch.autograd.grad(expected, weight)[0]
    loss.backward()
    assert (weight.grad - plain).norm() < 0.02 * plain.norm()
