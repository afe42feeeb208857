"""Classification: equals torch's cross-entropy with label smoothing over the labelled rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmray.objectives.classification import Classification


def test_loss_equals_torch_over_labelled_valid_rows() -> None:
    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = {"label": torch.tensor([0, 3, -1, 2, 1, 3]), "valid": torch.tensor([True, True, True, False, True, True])}
    logits[3] = float("nan")
    loss, count, parts = Classification(0.1).compute_loss({"class_logits": logits}, batch)
    rows = [0, 1, 4, 5]
    expected = F.cross_entropy(logits[rows], batch["label"][rows], label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert int(count) == 4
    assert parts["class_accuracy"] == (logits[rows].argmax(1) == batch["label"][rows]).sum()


def test_no_labels_give_zero_with_a_gradient() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    batch = {"label": torch.tensor([-1, -1]), "valid": torch.tensor([True, True])}
    loss, count, _ = Classification().compute_loss({"class_logits": logits}, batch)
    loss.backward()
    assert (loss.item(), int(count)) == (0, 0)
    assert not logits.grad.any()
