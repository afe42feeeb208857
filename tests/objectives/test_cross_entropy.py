"""The loss of classification equals torch's over the rows that have a label."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmray.objectives.cross_entropy import Classification

# Four rows: the second without a label, the third invalid.
BATCH = {
    "valid": torch.tensor([True, True, False, True]),
    "label": torch.tensor([3, -1, 2, 1]),
}
LABELED = torch.tensor([0, 3])
TARGETS = torch.tensor([3, 1])


def test_loss_equals_torch_over_the_targets() -> None:
    everywhere = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = torch.full_like(everywhere, torch.nan)
    logits[LABELED] = everywhere[LABELED]
    logits.requires_grad_()
    objective = Classification()
    loss, count, parts = objective.compute_loss({"class_logits": logits}, BATCH)
    expected = F.cross_entropy(logits[LABELED], TARGETS, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert int(count) == int(objective.count(BATCH)) == 2
    assert parts["class_accuracy"] == (logits[LABELED].argmax(1) == TARGETS).sum()
    loss.backward()
    assert torch.isfinite(logits.grad).all()


def test_no_targets_give_zero_with_a_gradient() -> None:
    logits = torch.randn(4, 4, requires_grad=True)
    batch = BATCH | {"valid": torch.zeros(4, dtype=torch.bool)}
    loss, count, _ = Classification().compute_loss({"class_logits": logits}, batch)
    loss.backward()
    assert (loss.item(), int(count)) == (0, 0)
    assert not logits.grad.any()
