"""Convert blocks of a stream to the micro-batches of each step, as slices if possible.

A block has the rows of one rank for several steps, or a part of its rows for one step. Each micro-batch is trimmed to
its longest caption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from mmray.data.stream.order import SamplePlan

Batch = dict[str, torch.Tensor]
NumpyBatch = dict[str, np.ndarray]
IGNORE_INDEX = -100  # label of tokens without loss, as in transformers


def iter_micro_batches(
    blocks: Iterable[NumpyBatch], plan: SamplePlan, group_by_length: bool = False
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, in order, from the blocks of one rank.

    `group_by_length` groups captions of similar length, longest first; the rows of the step do not change.
    """
    for step_blocks in _by_step(blocks, plan.rank_rows):
        if group_by_length and plan.accumulation > 1:  # the order within one micro-batch has no effect
            all_rows = _rows(step_blocks, 0, plan.rank_rows)
            order = np.argsort(-all_rows["num_tokens"], kind="stable")
            step_blocks = [{name: column[order] for name, column in all_rows.items()}]
        starts = range(0, plan.rank_rows, plan.micro)
        yield [_batch(_rows(step_blocks, first, min(first + plan.micro, plan.rank_rows))) for first in starts]


def _by_step(blocks: Iterable[NumpyBatch], rank_rows: int) -> Iterator[list[NumpyBatch]]:
    """Yield the blocks of each step: a slice of one, or several."""
    pending: list[NumpyBatch] = []
    for block in blocks:
        size = len(block["pos"])
        if size >= rank_rows:
            for first in range(0, size, rank_rows):
                yield [{name: column[first : first + rank_rows] for name, column in block.items()}]
            continue
        pending.append(block)
        if len(pending) * size == rank_rows:
            yield pending
            pending = []


def _rows(blocks: list[NumpyBatch], first: int, last: int) -> NumpyBatch:
    """Return rows first..last of equal blocks; a view if one block has them all."""
    size = len(blocks[0]["pos"])
    pieces = [
        {name: column[max(0, first - start) : last - start] for name, column in block.items()}
        for start, block in zip(range(0, len(blocks) * size, size), blocks, strict=True)
        if start < last and first < start + size
    ]
    if len(pieces) == 1:
        return pieces[0]
    out = {}
    for name, first_piece in pieces[0].items():
        columns = [piece[name] for piece in pieces]
        if first_piece.ndim == 2:  # tokens: zero-padded to the same width
            widest = max(column.shape[1] for column in columns)
            columns = [np.pad(column, ((0, 0), (0, widest - column.shape[1]))) for column in columns]
        out[name] = np.concatenate(columns)
    return out


def _batch(rows: NumpyBatch) -> Batch:
    longest = int(rows["num_tokens"].max())
    num_tokens = torch.from_numpy(rows["num_tokens"].astype(np.int64))
    return (
        lm_columns(rows, longest)
        | box_columns(rows)
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


def lm_columns(rows: dict[str, np.ndarray], longest: int) -> Batch:
    """Return the columns of generative models: labels int64 [B, T], -100 for tokens without loss; image_pos [B]."""
    if "loss_mask" not in rows:
        return {}
    labels = np.where(rows["loss_mask"], rows["input_ids"], IGNORE_INDEX)[:, :longest].astype(np.int64)
    return {"labels": torch.from_numpy(labels), "image_pos": torch.from_numpy(rows["image_pos"].astype(np.int64))}


def box_columns(rows: dict[str, np.ndarray]) -> Batch:
    """Return boxes float32 [B, N, 4], box_labels int64 [B, N] and box_mask bool [B, N] (False for padding).

    N is the largest number of boxes of a row. Empty without box columns.
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
