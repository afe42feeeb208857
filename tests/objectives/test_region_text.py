"""Region-text loss: equals torch's cross-entropy over the labelled boxes of valid rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmray.objectives.region_text import RegionText


def batch_of(boxes: int = 3) -> dict[str, torch.Tensor]:
    """Four rows, among them a padded box, an unlabelled box and an invalid row."""
    return {
        "box_labels": torch.tensor([[0, 3, -1], [2, -1, 1], [1, 1, 1], [3, 0, 2]])[:, :boxes],
        "box_mask": torch.tensor([[True, True, False], [True, True, True], [True] * 3, [True, False, False]])[
            :, :boxes
        ],
        "valid": torch.tensor([True, True, False, True]),
    }


def test_loss_equals_torch_over_labelled_boxes() -> None:
    logits, batch = torch.randn(4, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), batch_of()
    counted = [(0, 0), (0, 1), (1, 0), (1, 2), (3, 0)]
    for row, place in [(row, place) for row in range(4) for place in range(3) if (row, place) not in counted]:
        logits[row, place] = float("nan")
    loss, count, parts = RegionText().compute_loss({"region_logits": logits}, batch)
    rows, places = (torch.tensor(axis) for axis in zip(*counted, strict=True))
    kept, labels = logits[rows, places], batch["box_labels"][rows, places]
    torch.testing.assert_close(loss, F.cross_entropy(kept, labels, reduction="sum"), rtol=0, atol=1e-12)
    assert int(count) == int(RegionText().count(batch)) == 5
    assert parts["region_accuracy"] == (kept.argmax(1) == labels).sum()


def test_no_boxes_give_zero_with_a_gradient() -> None:
    for boxes in (0, 1):
        logits, batch = torch.randn(4, boxes, 4, requires_grad=True), batch_of(boxes)
        batch["valid"][:] = False
        loss, count, _ = RegionText().compute_loss({"region_logits": logits}, batch)
        loss.backward()
        assert (loss.item(), int(count)) == (0, 0)
        assert not logits.grad.any()
