"""Accuracy of classification, by a head or by the nearest class embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmray.data.stream.blocks import NO_LABEL
from mmray.errors import DataError
from mmray.models.protocol import HeadScores

if TYPE_CHECKING:
    from mmray.engine.collectives import Group

TOP_K = (1, 5)


class HeadHits:
    """Counts the correct predictions of classification heads.

    Args:
        heads: Scores of any rows by the name of the head, for the classes.
    """

    def __init__(self, heads: Mapping[str, HeadScores]) -> None:
        self._heads = heads
        self._hits = {name: torch.zeros(len(TOP_K) + 1, dtype=torch.int64) for name in heads}

    def add(self, heads: Mapping[str, HeadScores]) -> None:
        """Add the scores of a batch. Raises DataError for a label that is none of the classes, and
        not -1.
        """
        for name, head in heads.items():
            label = head.label.cpu()
            unknown = label[(label >= head.num_classes) | (label < NO_LABEL)]
            if len(unknown):
                raise DataError(
                    f"a held-out row has the label {int(unknown[0])}, and the classes of the model "
                    f"are 0 to {head.num_classes - 1}: give held-out rows the classes of the "
                    "training rows"
                )
            self._hits[name] += topk_hits(head.scores.float().cpu(), label)

    def metrics(self, group: Group) -> dict[str, float]:
        """Return the accuracy over the rows of all ranks; a collective call."""
        metrics: dict[str, float] = {}
        for name, head in self._heads.items():
            total = group.all_gather_variable(self._hits[name][None]).sum(0).cpu()
            metrics |= topk_accuracy(total, name, head.num_classes)
        return metrics


def topk_hits(scores: Tensor, label: Tensor) -> Tensor:
    """Count the rows whose class is in the top 1 and in the top 5, and those with a valid label,
    int64 [3]; counts of batches can be added.
    """
    return count_hits(classes_before(scores, label))


def count_hits(before: Tensor) -> Tensor:
    """Return the number of rows in the top 1, in the top 5, and of all, int64 [3]."""
    return torch.stack([*((before < k).sum() for k in TOP_K), torch.tensor(len(before))])


def classes_before(scores: Tensor, label: Tensor, tie: float = 0.0) -> Tensor:
    """Return how many classes rank before the correct one, int64 [M] for the M rows with a label.

    Args:
        scores: Score of each class, float [N, C].
        label: Class of each row, int64 [N], below C; rows with a negative one are omitted.
        tie: Classes whose score is not lower by more than this rank before, and so does NaN.
    """
    labeled = label >= 0
    scores = scores[labeled]
    target = scores.gather(1, label[labeled][:, None])
    before = (~(scores < target - tie)).sum(dim=1) - 1
    return before + target.isnan().squeeze(1) * scores.shape[1]


def zero_shot_metrics(before: Tensor, label: Tensor, num_classes: int) -> dict[str, float]:
    """Return top-1 and top-5 accuracy, mean recall of the classes that occur, and number of rows.

    Args:
        before: Number of classes that rank before the correct one, int64 [N]; 0 is a hit.
        label: The correct classes, int64 [N], 0..num_classes-1.
    """
    metrics = topk_accuracy(count_hits(before), "zero_shot", num_classes)
    if len(label):
        totals = label.bincount(minlength=num_classes)
        hits_of_class = label[before == 0].bincount(minlength=num_classes).double()
        mean = (hits_of_class / totals)[totals > 0].mean()
        metrics["zero_shot/mean_per_class_recall"] = float(mean)
    return metrics


def topk_accuracy(hits: Tensor, name: str, num_classes: int) -> dict[str, float]:
    """Return `NAME/top_1`, `NAME/top_5` (0 to 1; not with at most 5 classes) and `NAME/rows`.

    Args:
        hits: Number of rows in the top 1, in the top 5, and with a valid label, int64 [3].
    """
    *hits_at_k, total = hits.tolist()
    pairs = zip(TOP_K, hits_at_k, strict=True)
    metrics = {
        f"{name}/top_{k}": hit / total for k, hit in pairs if total and (k == 1 or k < num_classes)
    }
    return metrics | {f"{name}/rows": float(total)}
