"""From the stream's micro-batches to a batch on the device, verified, without invalid rows; on a
GPU one step ahead.

Invalid rows would change BatchNorm's statistics and cost time in every encoder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmray.data.stream.order import SamplePlan
from mmray.engine.metrics.timers import PhaseTimers
from mmray.errors import TrainingError
from mmray.objectives.protocol import Batch

ALIGNMENT = 512  # bytes, of each column in the copy of a step, as of torch's CUDA allocations


class TokenCounts(NamedTuple):
    real: int  # tokens of the captions
    padded: int  # with padding
    padded_unbucketed: int  # with padding, if rows were not bucketed by length


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of a global batch: valid rows only, in as many micro-batches as on every
    other rank.

    A micro-batch without valid rows has one dummy row, because all ranks must run equally many
    forwards.
    """

    micro_batches: list[Batch]
    is_dummy: tuple[bool, ...]  # for each micro-batch: has only a dummy row
    keys: Tensor  # int64 [valid rows], on the CPU
    sizes: tuple[int, ...]  # rows of each micro-batch with invalid rows: the same on every rank
    token_counts: TokenCounts
    wait_s: float = 0.0

    @property
    def rows(self) -> int:
        """Rows with invalid ones: equal on every rank, as the all-gather needs."""
        return sum(self.sizes)


def make_local_batch(micro_batches: list[Batch], group_by_length: bool = False) -> LocalBatch:
    """Build a batch from micro-batches of the stream without the invalid rows."""
    valid = torch.cat([micro_batch["valid"] for micro_batch in micro_batches])
    keys = torch.cat([micro_batch["key"] for micro_batch in micro_batches])[valid]
    sizes = tuple(len(micro_batch["valid"]) for micro_batch in micro_batches)
    is_dummy = tuple(not bool(micro_batch["valid"].any()) for micro_batch in micro_batches)
    if not bool(valid.all()):
        dummy = torch.tensor([0])
        micro_batches = [
            {
                name: tensor[dummy if empty else micro_batch["valid"]]
                for name, tensor in micro_batch.items()
            }
            for micro_batch, empty in zip(micro_batches, is_dummy, strict=True)
        ]
    real = [
        micro_batch for micro_batch, empty in zip(micro_batches, is_dummy, strict=True) if not empty
    ]
    masks = [
        micro_batch["attention_mask"] for micro_batch in real if "attention_mask" in micro_batch
    ]
    tokens, padded = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    unbucketed = padded
    if group_by_length and masks:
        order = torch.cat([micro_batch["pos"] for micro_batch in real]).argsort()
        lengths = torch.cat([mask.sum(dim=1) for mask in masks])[order]
        unbucketed = sum(int(part.max()) * len(part) for part in lengths.split(max(sizes)))
    return LocalBatch(micro_batches, is_dummy, keys, sizes, TokenCounts(tokens, padded, unbucketed))


def dummy_batch(batch: LocalBatch) -> LocalBatch:
    """One dummy micro-batch in place of all, for a rank that ran out of memory;

    `rows` is unchanged.
    """
    row = {name: tensor[:1] for name, tensor in batch.micro_batches[0].items()}
    row["valid"] = torch.zeros_like(row["valid"])
    return replace(batch, micro_batches=[row], is_dummy=(True,))


def split_micro_batches(batch: LocalBatch, micro: int) -> LocalBatch:
    """Split evenly into micro-batches of at most `micro` rows, equally many on every rank; views,
    without copies.
    """
    if max(batch.sizes) <= micro:
        return batch
    micro_batches, is_dummy, sizes = [], [], []
    for micro_batch, was_dummy, size in zip(
        batch.micro_batches, batch.is_dummy, batch.sizes, strict=True
    ):
        valid_rows = 0 if was_dummy else len(micro_batch["valid"])
        part = -(-size // -(-size // micro))
        for first in range(0, size, part):
            rows = slice(first, first + part) if first < valid_rows else slice(0, 1)
            invalid = (
                {}
                if first < valid_rows
                else {"valid": torch.zeros_like(micro_batch["valid"][rows])}
            )
            micro_batches.append(
                {name: tensor[rows] for name, tensor in micro_batch.items()} | invalid
            )
            is_dummy.append(first >= valid_rows)
            sizes.append(min(part, size - first))
    return replace(batch, micro_batches=micro_batches, is_dummy=tuple(is_dummy), sizes=tuple(sizes))


def prefetch(
    steps: Iterable[list[Batch]],
    plan: SamplePlan,
    first: int,
    rank: int,
    device: torch.device,
    timers: PhaseTimers,
    group_by_length: bool = False,
) -> Iterator[LocalBatch]:
    """Yield batches on `device`, starting at step `first`. `wait_s` is the time the caller waited.

    On a GPU, a thread reads and copies the next batch during the current step. The GPU then has two
    batches, provided the caller frees one before it requests another. Raises TrainingError if rows
    are not those of the plan.
    """

    def checked() -> Iterator[LocalBatch]:
        for step, micro_batches in enumerate(steps, start=first):
            actual = torch.cat([micro_batch["pos"] for micro_batch in micro_batches]).numpy()
            expected = plan.positions(step, rank)
            if group_by_length:
                actual, expected = np.sort(actual), np.sort(expected)
            check_positions(actual, expected, step, rank)
            yield make_local_batch(micro_batches, group_by_length)

    batches = checked()
    if device.type == "cuda":
        copied = map(DeviceCopier(device, timers), batches)
        batches = _prefetch_in_thread(copied, partial(_receive, device=device), device)

    def timed() -> LocalBatch | None:
        start_s = time.perf_counter()
        batch = next(batches, None)
        return None if batch is None else replace(batch, wait_s=time.perf_counter() - start_s)

    return iter(timed, None)  # keeps no reference to a batch that the caller has freed


def check_positions(actual: np.ndarray, expected: np.ndarray, step: int, rank: int) -> None:
    """Raise TrainingError at the first row that is not at its position of the sample order."""
    if np.array_equal(actual, expected):
        return
    if len(actual) != len(expected):
        difference = f"{len(actual)} rows arrived, {len(expected)} expected"
    else:
        index = int(np.flatnonzero(actual != expected)[0])
        difference = f"row {index} has position {actual[index]}, {expected[index]} expected"
    raise TrainingError(
        f"the stream returned wrong rows at step {step + 1} on rank {rank}: {difference}. "
        "The step was not taken. Rerun the same command to resume from the latest checkpoint"
    )


class Copied(NamedTuple):
    batch: LocalBatch  # whose columns are views of `memory`
    memory: Tensor  # on the device
    event: torch.cuda.Event  # of the copy's completion


class DeviceCopier:
    """Copies a rank's rows of a step to the device at once, on a side stream, through pinned memory
    that is reused.
    """

    def __init__(self, device: torch.device, timers: PhaseTimers):
        self._device, self._timers, self._stream = device, timers, torch.cuda.Stream(device)
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._last_copy: torch.cuda.Event | None = None

    def __call__(self, batch: LocalBatch) -> Copied:
        """Start copying a batch; waits for the copy of the previous one, a step before, which uses
        the same memory.
        """
        columns = [tensor for micro_batch in batch.micro_batches for tensor in micro_batch.values()]
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in columns]
        starts = [0, *accumulate(sizes)]
        if self._last_copy is not None:
            self._last_copy.synchronize()
        if starts[-1] > len(self._pinned):
            # captions vary in length
            self._pinned = torch.empty(starts[-1] * 5 // 4, dtype=torch.uint8).pin_memory()
        for tensor, start in zip(columns, starts, strict=False):
            _view_at(self._pinned, start, tensor).copy_(tensor)
        with torch.cuda.stream(self._stream), self._timers("transfer"):
            memory = self._pinned[: starts[-1]].to(self._device, non_blocking=True)
            self._last_copy = self._stream.record_event()
        views = map(partial(_view_at, memory), starts, columns)
        micro_batches = [
            {name: next(views) for name in micro_batch} for micro_batch in batch.micro_batches
        ]
        return Copied(replace(batch, micro_batches=micro_batches), memory, self._last_copy)


def _view_at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """View of bytes [N], from `start`, with shape and type of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _receive(copied: Copied, device: torch.device) -> LocalBatch:
    """Make a batch usable on the compute stream."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied.event)
    copied.memory.record_stream(current)  # otherwise the allocator would reuse it too early
    return copied.batch


def _prefetch_in_thread(
    items: Iterator[Any], receive: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    """Yield items through `receive` while a thread, whose current GPU is `device`, produces the
    next one.

    If the caller stops while the stream stalls, the pending item is not awaited.
    """
    # A thread's default GPU is the first; pinned memory and streams would create a context there.
    enter = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
    thread = ThreadPoolExecutor(1, "mmray-prefetch", *enter)
    try:
        pending = deque([thread.submit(next, items, None)])
        while pending[0].result() is not None:
            pending.append(thread.submit(next, items, None))
            yield receive(pending.popleft().result())
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
