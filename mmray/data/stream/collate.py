"""Convert blocks of a stream to the micro-batches of each step, each trimmed to its longest
caption.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np
import torch

from mmray.data.media.clips import clip_batch
from mmray.data.stream.blocks import TEACHER_COLUMNS, join_blocks, pad_columns

Batch = dict[str, torch.Tensor]
NumpyBatch = dict[str, np.ndarray]


def is_flat(batch: Batch) -> bool:
    """Return whether a micro-batch cannot be sliced by row, because its tensors join all rows, as
    those of a vision-language model do.
    """
    return "target_index" in batch


def iter_micro_batches(
    blocks: Iterable[NumpyBatch],
    rank_rows: int,
    micro_batch_size: int,
    group_by_length: bool = False,
    token_multiple: int = 1,
    max_tokens: int = sys.maxsize,
    memory: PixelMemory | None = None,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of a rank for each step; the last of a step may be smaller.

    Args:
        memory: Memory for pixels that must be copied, because a step has rows of several blocks or
            is sorted; they are valid until the next step is requested. None: new memory for each
            step.

    Yields:
        For each step a list of micro-batches, dicts of tensors: `image` uint8 [B, 3, S, S], unless
        the model takes clips; `input_ids` and `attention_mask` int64 [B, T]; `key`, `label` (-1:
        none) and `pos` int64 [B]; `valid` bool [B], False for padding and unreadable rows;
        those of `clip_batch` for clips; and TEACHER_COLUMNS float32 [B, D] with a teacher.
    """
    for rows in iter_step_rows(blocks, repeat(rank_rows), memory):
        # the order within one micro-batch has no effect
        if group_by_length and rank_rows > micro_batch_size:
            rows = _sort_by_length(rows, memory)
        # One tensor for the step: micro-batches are adjacent views, which one copy moves to a GPU.
        pixels = {"image": torch.from_numpy(rows["image"])} if "image" in rows else {}
        yield [
            _batch(_slice(rows, first, micro_batch_size), token_multiple, max_tokens)
            | {name: column[first : first + micro_batch_size] for name, column in pixels.items()}
            for first in range(0, rank_rows, micro_batch_size)
        ]


class PixelMemory:
    """Memory for the pixels of one training step, used again by the next.

    New memory for each step would cost a page fault every 4 KiB.

    Args:
        pin: Use page-locked (pinned) memory, from which copies to a GPU are faster.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._memory: dict[str, torch.Tensor] = {}

    def get(self, use: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array uint8 of a shape with arbitrary content; later calls with the same name
        of a use get the same memory.
        """
        num_bytes = math.prod(shape)
        memory = self._memory.get(use)
        if memory is None or len(memory) < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
            memory = memory.pin_memory() if self._pin else memory
            self._memory[use] = memory
        return memory[:num_bytes].numpy().reshape(shape)


def iter_step_rows(
    blocks: Iterable[NumpyBatch], step_rows: Iterable[int], memory: PixelMemory | None = None
) -> Iterator[NumpyBatch]:
    """Yield the rows of each step: a slice of one block, or several blocks joined.

    Args:
        blocks: Rows in sample order, arrays by column.
        step_rows: Number of rows of each step.

    Raises:
        RuntimeError: A block crosses the end of a step.
    """
    remaining = iter(blocks)
    block: NumpyBatch = {}
    first = size = 0  # rows first..size of `block` are left
    for num_rows in step_rows:
        parts: list[NumpyBatch] = []
        missing = num_rows
        while missing:
            if first == size:
                following = next(remaining, None)
                if following is None:
                    return
                block = following
                first = 0
                size = len(block["pos"])
            left = size - first
            if (parts and left > missing) or (first and left < missing):
                sizes = [*(len(part["pos"]) for part in parts), size]
                raise RuntimeError(
                    f"the data stream returned blocks of {', '.join(map(str, sizes))} rows for a "
                    f"step of {num_rows} rows: blocks were cut or assigned to another rank"
                )
            parts.append(_slice(block, first, missing))
            taken = min(left, missing)
            first += taken
            missing -= taken
        pixels = None
        if memory is not None and len(parts) > 1 and "image" in block:
            pixels = memory.get("joined", (num_rows, *block["image"].shape[1:]))
        yield join_blocks(parts, pixels)


def _sort_by_length(rows: NumpyBatch, memory: PixelMemory | None) -> NumpyBatch:
    """Return the rows, longest caption first; of clips those with the most audio or video, which
    take most of the time.
    """
    lengths = rows.get("num_samples", rows.get("num_frames", rows["num_tokens"]))
    order = np.argsort(-lengths, kind="stable")
    sorted_rows = {name: column[order] for name, column in rows.items() if name != "image"}
    if "image" not in rows:
        return sorted_rows
    image = rows["image"]
    out = None if memory is None else memory.get("sorted", image.shape)
    return sorted_rows | {"image": np.take(image, order, axis=0, out=out, mode="clip")}


def _slice(rows: NumpyBatch, first: int, size: int) -> NumpyBatch:
    return {name: column[first : first + size] for name, column in rows.items()}


def _batch(rows: NumpyBatch, token_multiple: int, max_tokens: int) -> Batch:
    """Return the columns of a micro-batch, except `image`."""
    longest = int(rows["num_tokens"].max())
    longest = min(-(-longest // token_multiple) * token_multiple, max_tokens)
    ids = pad_columns(rows["input_ids"], longest)
    tokens = token_columns(ids[:, :longest], rows["num_tokens"])
    names = ("key", "label", "valid", "pos", *(name for name in TEACHER_COLUMNS if name in rows))
    others = {name: torch.from_numpy(rows[name]) for name in names}
    return clip_tensors(rows) | tokens | others


def clip_tensors(rows: NumpyBatch) -> Batch:
    """Return the columns of `clip_batch` as tensors."""
    return {name: torch.from_numpy(column) for name, column in clip_batch(rows).items()}


def token_columns(ids: np.ndarray, num_tokens: np.ndarray) -> Batch:
    """Return `input_ids` and `attention_mask` (1 for tokens), int64 [B, T], of right-padded token
    ids [B, T] and the numbers of tokens of the rows [B].
    """
    mask = torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]
    return {"input_ids": torch.from_numpy(ids.astype(np.int64)), "attention_mask": mask.long()}
