"""From the blocks of a stream to the micro-batches of each step: slices, no copies of pixels.

The sample's journey: the last station before the training device. A block holds one rank's rows of several steps; this
file cuts it into steps and micro-batches and trims the padding of each to its own longest caption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from mmray.data.order import Plan

Batch = dict[str, torch.Tensor]
UNLEARNED = -100  # transformers' word for a token that has no part in the loss


def steps_of(blocks: Iterable[dict[str, np.ndarray]], plan: Plan, by_length: bool = False) -> Iterator[list[Batch]]:
    """The micro-batches of each step, in order, from one rank's blocks; a step never straddles two blocks.

    `by_length`: captions of like length share a micro-batch, longest first. The step's rows stay the same.
    """
    for block in blocks:
        for start in range(0, len(block["pos"]), plan.share):
            step = {name: column[start : start + plan.share] for name, column in block.items()}
            if by_length and plan.accumulation > 1:  # within one micro-batch an order changes nothing
                order = np.argsort(-step["num_tokens"], kind="stable")
                step = {name: column[order] for name, column in step.items()}
            yield [_batch(step, first, first + plan.micro) for first in range(0, plan.share, plan.micro)]


def _batch(step: dict[str, np.ndarray], first: int, last: int) -> Batch:
    rows = {name: column[first:last] for name, column in step.items()}
    longest = int(rows["num_tokens"].max())
    num_tokens = torch.from_numpy(rows["num_tokens"].astype(np.int64))
    return (
        learned_of(rows, longest)
        | boxes_of(rows)
        | {
            "image": torch.from_numpy(rows["image"]),
            "input_ids": torch.from_numpy(rows["input_ids"][:, :longest].astype(np.int64)),
            "attention_mask": (torch.arange(longest) < num_tokens[:, None]).long(),
            "key": torch.from_numpy(rows["key"]),
            "label": torch.from_numpy(rows["label"]),
            "valid": torch.from_numpy(rows["valid"]),
            "pos": torch.from_numpy(rows["pos"]),
        }
    )


def learned_of(rows: dict[str, np.ndarray], longest: int) -> Batch:
    """Of rows for a model that writes: labels int64 [B, T], -100 for tokens that are not learned; image_at [B]."""
    if "learned" not in rows:
        return {}
    labels = np.where(rows["learned"], rows["input_ids"], UNLEARNED)[:, :longest].astype(np.int64)
    return {"labels": torch.from_numpy(labels), "image_at": torch.from_numpy(rows["image_at"].astype(np.int64))}


def boxes_of(rows: dict[str, np.ndarray]) -> Batch:
    """boxes float32 [B, N, 4], box_labels int64 [B, N], box_mask bool [B, N] of real ones.

    N is the most that a row of these has. Without columns of boxes none of them.
    """
    if "boxes" not in rows:
        return {}
    num_boxes = torch.from_numpy(rows["num_boxes"])
    most = int(num_boxes.max())
    return {
        "boxes": torch.from_numpy(rows["boxes"][:, :most]),
        "box_labels": torch.from_numpy(rows["box_labels"][:, :most]),
        "box_mask": torch.arange(most) < num_boxes[:, None],
    }
