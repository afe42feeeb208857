"""Cross-entropy losses equal torch's over the rows or boxes that have a target."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.objectives.cross_entropy import (
    Classification,
    CrossEntropy,
    RegionText,
)

VALID = torch.tensor([True, True, False, True])
# Four rows: without a label; invalid; padded, unlabeled boxes.
CASES: dict[str, tuple[CrossEntropy, dict[str, Tensor], list[tuple[int, ...]], list[int]]] = {
    "classification": (
        Classification(),
        {"label": torch.tensor([3, -1, 2, 1])},
        [(0,), (3,)],
        [3, 1],
    ),
    "region_text": (
        RegionText(),
        {
            "box_labels": torch.tensor([[0, 3, -1], [2, -1, 1], [1, 1, 1], [3, 0, 2]]),
            "box_mask": torch.tensor(
                [[True, True, False], [True] * 3, [True] * 3, [True, False, False]]
            ),
        },
        [(0, 0), (0, 1), (1, 0), (1, 2), (3, 0)],
        [0, 3, 2, 1, 3],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_equals_torch_over_the_targets(name: str) -> None:
    objective, batch, index, targets = CASES[name]
    positions = tuple(torch.tensor(axis) for axis in zip(*index, strict=True))
    shape = objective.targets(batch | {"valid": VALID}).shape
    everywhere = torch.randn(
        *shape, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    logits = torch.full_like(everywhere, torch.nan)
    logits[positions] = everywhere[positions]
    logits.requires_grad_()
    loss, count, parts = objective.compute_loss(
        {objective.logits: logits}, batch | {"valid": VALID}
    )
    expected = F.cross_entropy(logits[positions], torch.tensor(targets), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert int(count) == int(objective.count(batch | {"valid": VALID})) == len(targets)
    assert parts[objective.accuracy] == (logits[positions].argmax(1) == torch.tensor(targets)).sum()
    loss.backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    ("name", "width"),
    [("classification", 1), ("region_text", 0), ("region_text", 1)],
)
def test_no_targets_give_zero_with_a_gradient(name: str, width: int) -> None:
    objective, columns, _, _ = CASES[name]
    batch = {key: value[:, :width] if value.ndim > 1 else value for key, value in columns.items()}
    batch |= {"valid": torch.zeros(4, dtype=torch.bool)}
    logits = torch.randn(*objective.targets(batch).shape, 4, requires_grad=True)
    loss, count, _ = objective.compute_loss({objective.logits: logits}, batch)
    loss.backward()
    assert (loss.item(), int(count)) == (0, 0)
    assert not logits.grad.any()
