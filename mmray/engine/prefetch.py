"""From the stream's micro-batches to a share on the training device: checked, without padding, one step ahead.

Stands between data/stream.py (CPU tensors in the run's order) and train/step.py. Padding ends here: it would reach
BatchNorm's statistics and cost time in every tower.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mmray.engine.metrics.timers import PhaseTimers
from mmray.errors import TrainingError, is_out_of_memory
from mmray.objectives.protocol import Batch

Item = TypeVar("Item")
Ready = TypeVar("Ready")


class Positions(Protocol):
    """What is needed here of data/order.py's Plan."""

    def positions(self, step: int, rank: int) -> np.ndarray:
        """Positions in the run's order [share] that a rank takes in a step; -1 is padding."""


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of a global batch: valid rows only, in as many micro-batches as every other rank has.

    In a micro-batch without any valid row one padding row stands in: a model may hold collectives of its own (synced
    BatchNorm), so that all ranks must go forward equally often.
    """

    micro_batches: list[Batch]
    is_filler: tuple[bool, ...]  # by micro-batch: only a stand-in
    keys: Tensor  # int64 [valid rows], on the CPU
    sizes: tuple[int, ...]  # rows of each micro-batch with padding: the same on every rank
    tokens: int = 0  # of the captions of valid rows
    places: int = 0  # for tokens in the micro-batches, padding included
    padded_tokens_unbucketed: int = 0  # what they would be in the order of the rows, where they are arranged by length
    wait_s: float = 0.0

    @property
    def rows(self) -> int:
        """Rows with padding: the same on every rank, which the gather needs."""
        return sum(self.sizes)


def make_local_batch(micro_batches: list[Batch], arranged: bool = False) -> LocalBatch:
    """A share from micro-batches as they come, invalid rows taken out; `arranged`: not in the order of their rows."""
    valid = torch.cat([micro["valid"] for micro in micro_batches])
    keys = torch.cat([micro["key"] for micro in micro_batches])
    sizes = tuple(len(micro["valid"]) for micro in micro_batches)
    if bool(valid.all()):
        return LocalBatch(
            micro_batches, (False,) * len(micro_batches), keys, sizes, *_tokens(micro_batches, sizes, arranged)
        )
    is_filler = tuple(not bool(micro["valid"].any()) for micro in micro_batches)
    stand_in = torch.tensor([0])
    kept = [
        _rows(micro, stand_in if empty else micro["valid"])
        for micro, empty in zip(micro_batches, is_filler, strict=True)
    ]
    real = [micro for micro, empty in zip(kept, is_filler, strict=True) if not empty]
    return LocalBatch(kept, is_filler, keys[valid], sizes, *_tokens(real, sizes, arranged))


def _tokens(micro_batches: list[Batch], sizes: tuple[int, ...], arranged: bool) -> tuple[int, int, int]:
    """Tokens of these micro-batches, places for them, and what the places would be in micro-batches as rows come."""
    masks = [micro["attention_mask"] for micro in micro_batches if "attention_mask" in micro]
    places = sum(mask.numel() for mask in masks)
    if not (arranged and masks):
        return sum(int(mask.sum()) for mask in masks), places, places
    lengths = torch.cat([mask.sum(dim=1) for mask in masks])
    by_row = lengths[torch.cat([micro["pos"] for micro in micro_batches]).argsort()]
    plain = sum(int(part.max()) * len(part) for part in by_row.split(max(sizes)))
    return int(lengths.sum()), places, plain


def split_micro_batches(share: LocalBatch, micro: int) -> LocalBatch:
    """The same rows in micro-batches of at most `micro` rows, as many on every rank; views, nothing is copied."""
    if max(share.sizes) <= micro:
        return share
    micro_batches, is_filler, sizes = [], [], []
    for batch, was_filler, size in zip(share.micro_batches, share.is_filler, share.sizes, strict=True):
        valid_rows = 0 if was_filler else len(batch["valid"])
        for first in range(0, size, micro):
            rows = slice(first, first + micro) if first < valid_rows else slice(0, 1)
            stand_in = {} if first < valid_rows else {"valid": torch.zeros_like(batch["valid"][rows])}
            micro_batches.append({name: tensor[rows] for name, tensor in batch.items()} | stand_in)
            is_filler.append(first >= valid_rows)
            sizes.append(min(micro, size - first))
    return replace(share, micro_batches=micro_batches, is_filler=tuple(is_filler), sizes=tuple(sizes))


def prefetch(
    steps: Iterable[list[Batch]],
    plan: Positions,
    first: int,
    rank: int,
    device: torch.device,
    timers: PhaseTimers,
    arranged: bool = False,
) -> Iterator[LocalBatch]:
    """Shares on `device`, the first of step `first`; the next one is read and copied while the last one computes.

    `arranged`: data/collate.py has put the rows of each share into micro-batches by their length.
    `wait_s` is the time the caller stood waiting. On a GPU lie the share under way and the next one, as long as the
    caller lets go of a share before it asks for the one after. Raises TrainingError when rows are not those of the
    plan, and what says that a GPU has no room where even between two steps there is none for a share.
    """
    shares = _checked(steps, plan, first, rank, arranged)
    if device.type == "cuda":
        copied = map(partial(_copied, device=device, stream=torch.cuda.Stream(device), timers=timers), shares)
        shares = _ahead(copied, partial(_arrive, device=device), device)
    return iter(partial(_timed, shares), None)  # nothing here keeps a share that the caller has let go of


def _checked(
    steps: Iterable[list[Batch]], plan: Positions, first: int, rank: int, arranged: bool
) -> Iterator[LocalBatch]:
    for step, micro_batches in enumerate(steps, start=first):
        got, expected = torch.cat([micro["pos"] for micro in micro_batches]).numpy(), plan.positions(step, rank)
        if arranged:
            got, expected = np.sort(got), np.sort(expected)
        check_positions(got, expected, step, rank)
        yield make_local_batch(micro_batches, arranged)


def check_positions(got: np.ndarray, expected: np.ndarray, step: int, rank: int) -> None:
    """Raise TrainingError at the first row that is not the one the order names."""
    if np.array_equal(got, expected):
        return
    if len(got) != len(expected):
        found = f"{len(got)} rows came where {len(expected)} belong"
    else:
        index = int(np.flatnonzero(got != expected)[0])
        found = f"row {index} of the share is position {got[index]} where {expected[index]} belongs"
    raise TrainingError(
        f"the stream lost the order at step {step + 1} on rank {rank}: {found}. "
        "No step was taken on it. Start the same command again: it goes on from the newest checkpoint"
    )


def _rows(micro: Batch, which: Tensor) -> Batch:
    return {name: tensor[which] for name, tensor in micro.items()}


def _timed(shares: Iterator[LocalBatch]) -> LocalBatch | None:
    """The next share, with the time that it took to come; None after the last."""
    start_s = time.perf_counter()
    share = next(shares, None)
    return None if share is None else replace(share, wait_s=time.perf_counter() - start_s)


Copied = tuple[LocalBatch, torch.cuda.Event | None]


def _copied(share: LocalBatch, device: torch.device, stream: torch.cuda.Stream, timers: PhaseTimers) -> Copied:
    """A share on its way to the device, with the event of its arrival; copies run beside the computation.

    At the peak of a step there may be no room for the next share: it then stays on the CPU, without an event.
    """
    try:
        with torch.cuda.stream(stream), timers("transfer"):
            return _on(share, device), stream.record_event()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return share, None


def _on(share: LocalBatch, device: torch.device) -> LocalBatch:
    """The share on a device, on the stream that is current."""
    micro_batches = [
        {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in micro.items()}
        for micro in share.micro_batches
    ]
    return replace(share, micro_batches=micro_batches)


def _arrive(copied: Copied, device: torch.device) -> LocalBatch:
    """The share as the stream of the computation may use it; called between two steps, when there is most room."""
    share, arrived = copied
    if arrived is None:
        return _on(share, device)
    current = torch.cuda.current_stream(device)
    current.wait_event(arrived)
    for micro in share.micro_batches:
        for tensor in micro.values():
            tensor.record_stream(current)  # else the allocator would reuse it for the next copy too early
    return share


def _ahead(items: Iterator[Item], ready: Callable[[Item], Ready], device: torch.device) -> Iterator[Ready]:
    """Items through `ready`, the next one being made in a thread meanwhile, for which `device` is the current GPU.

    Where the caller leaves while the stream stalls, nobody waits for the item under way.
    """
    # Of itself a thread's current GPU is the first, and pinned memory and streams would open a context there.
    enter = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
    thread = ThreadPoolExecutor(1, "mmray-feed", *enter)
    try:
        coming = deque([thread.submit(next, items, None)])
        while coming[0].result() is not None:
            coming.append(thread.submit(next, items, None))
            yield ready(cast("Item", coming.popleft().result()))
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
