"""Top-k accuracy: zero-shot from prompts, or of a classification or region head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOP_K = (1, 5)


def fill_prompts(classes: tuple[str, ...], prompts: tuple[str, ...]) -> list[str]:
    """Each class in each prompt, grouped by class."""
    return [prompt.replace("{}", name) for name in classes for prompt in prompts]


def class_embeddings(embeddings: Tensor, num_prompts: int) -> Tensor:
    """Text embeddings [C x P, D] -> L2-normalised mean over the prompts of each class [C, D].

    Source: prompt ensembling of Radford et al. 2021 (CLIP), section 3.1.4.
    """
    by_class = embeddings.view(-1, num_prompts, embeddings.shape[1])
    return F.normalize(by_class.mean(dim=1), dim=1)


def topk_correct(scores: Tensor, label: Tensor, tie: float = 0.0) -> Tensor:
    """Rows with their class in the top 1, in the top 5, and labelled rows: int64 [3].

    scores [N, C], label int64 [N]; labels below 0 or above C are not counted. A wrong class within `tie` of the correct
    one ranks before it, as does a NaN.
    """
    num_classes = scores.shape[1]
    labelled = (label >= 0) & (label < num_classes)
    scores, label = scores[labelled], label[labelled]
    own = scores.gather(1, label[:, None])
    before = (~(scores < own - tie)).sum(dim=1) - 1 + own.isnan().squeeze(1) * num_classes
    return torch.stack([*((before < k).sum() for k in TOP_K), labelled.sum()])


def topk_accuracy(correct: Tensor, name: str, num_classes: int, unit: str = "rows") -> dict[str, float]:
    """`NAME/top_1`, `NAME/top_5` (with more than 5 classes) and `NAME/UNIT` from the sums of `topk_correct`."""
    total = int(correct[-1])
    metrics = {
        f"{name}/top_{k}": int(correct[index]) / total
        for index, k in enumerate(TOP_K)
        if total and (k == 1 or k < num_classes)
    }
    return metrics | {f"{name}/{unit}": float(total)}
