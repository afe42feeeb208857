"""Accuracy over classes: zero-shot from prompts, or by a classification head. Pure, on tensors.

score.py brings embeddings (or logits) and labels; rows without a label, or with one beyond the classes, do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

TOP_K = (1, 5)


def fill_prompts(classes: tuple[str, ...], prompts: tuple[str, ...]) -> list[str]:
    """Each class in each prompt, the prompts of a class side by side."""
    return [prompt.replace("{}", name) for name in classes for prompt in prompts]


def class_embeddings(embeddings: Tensor, num_prompts: int) -> Tensor:
    """Text embeddings [C x P, D] -> one of length 1 for each class [C, D], the mean over its prompts.

    Source: Radford et al. 2021 (CLIP), section 3.1.4: the ensemble is taken over embeddings, not probabilities.
    """
    by_class = embeddings.view(-1, num_prompts, embeddings.shape[1])
    return functional.normalize(by_class.mean(dim=1), dim=1)


def topk_correct(scores: Tensor, label: Tensor) -> Tensor:
    """How many of the labelled rows have their class among the top 1, the top 5, and how many are labelled: int64 [3].

    scores [N, C], label int64 [N]. A class that ties with the right one stands before it, and so does a NaN.
    """
    num_classes = scores.shape[1]
    labelled = (label >= 0) & (label < num_classes)
    scores, label = scores[labelled], label[labelled]
    own = scores.gather(1, label[:, None])
    better = (~(scores < own)).sum(dim=1) - 1 + own.isnan().squeeze(1) * num_classes
    return torch.stack([*((better < k).sum() for k in TOP_K), labelled.sum()])


def topk_accuracy(right: Tensor, name: str, num_classes: int, judged: str = "rows") -> dict[str, float]:
    """`NAME/top_1`, `NAME/top_5` (with more than 5 classes) and `NAME/rows` from the sums of `right_at`.

    judged: what stands for `rows` where something else is.
    """
    rows = int(right[-1])
    found = {
        f"{name}/top_{k}": int(right[place]) / rows
        for place, k in enumerate(TOP_K)
        if rows and (k == 1 or k < num_classes)
    }
    return found | {f"{name}/{judged}": float(rows)}
