"""Zero-shot accuracy: ties and NaN count as wrong; rows without a label do not count."""

from __future__ import annotations

import pytest
import torch

from mmray.evaluate.evaluator import topk_accuracy, topk_correct

NAN = float("nan")


def test_case_computed_by_hand() -> None:
    scores = torch.tensor([[3.0, 1, 2], [1, 1, 0], [0, NAN, 1], [9, 0, 0], [0, 0, 9], [NAN, 0, 0]])
    label = torch.tensor([0, 0, 2, -1, 7, 0])
    right, in_five, rows = topk_correct(scores, label).tolist()
    # Correct; a tie (wrong); a NaN in another class (wrong); no label; label out of range; a NaN in its own class.
    assert (right, rows) == (1, 4)
    assert in_five == 3
    assert topk_accuracy(topk_correct(scores, label), "zero_shot", 3) == {
        "zero_shot/top_1": 0.25,
        "zero_shot/rows": 4.0,
    }


def test_top_5_equals_naive_search() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, label = torch.randn(50, 9, generator=draw), torch.randint(0, 9, (50,), generator=draw)
    found = topk_accuracy(topk_correct(scores, label), "c", 9)
    naive = [label[row] in scores[row].argsort(descending=True)[:5] for row in range(50)]
    assert found["c/top_5"] == pytest.approx(sum(naive) / 50)
    assert found["c/top_1"] == pytest.approx((scores.argmax(1) == label).double().mean().item())


def test_no_labels_give_no_accuracy() -> None:
    assert topk_accuracy(topk_correct(torch.randn(2, 3), torch.tensor([-1, -1])), "c", 3) == {"c/rows": 0.0}
