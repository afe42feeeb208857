"""From the stream's micro-batches to a batch on the device, verified, without invalid rows; on a
GPU one step ahead.

Invalid rows would change BatchNorm's statistics and cost time in every encoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmray.data.stream.collate import is_flat
from mmray.data.stream.order import SamplePlan
from mmray.errors import TrainingError
from mmray.objectives.protocol import Batch

ALIGNMENT = 512  # bytes, of each column in the copy of a step, as of torch's CUDA allocations
CLOSE_TIMEOUT_S = 5.0  # time for the thread to end, if its stream cannot be interrupted


class TokenCounts(NamedTuple):
    """Lengths of a rank's rows in a step, with and without padding.

    Attributes:
        real: Tokens of the captions or conversations.
        padded: The same with padding.
        samples: Samples of audio, at the rate `model.inputs.audio_rate`.
        padded_samples: The same with padding.
        frames: Frames of video.
        padded_frames: The same with padding.
    """

    real: int
    padded: int
    samples: int = 0
    padded_samples: int = 0
    frames: int = 0
    padded_frames: int = 0


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of a global batch: valid rows only, in as many micro-batches as on every
    other rank.

    A row is invalid if it is padding or could not be read. A micro-batch without valid rows has one
    dummy row (with `valid` False), because all ranks must run equally many forwards.

    Attributes:
        micro_batches: Tensors [B, ...] by column, as `iter_micro_batches` yields them: `image`
            uint8 [B, 3, S, S] or clips, `input_ids` and `attention_mask` int64 [B, T], `key`,
            `label` and `pos` int64 [B], `valid` bool [B], and columns that only some models have.
            Of a vision-language model as `iter_row_batches` yields them.
        is_dummy: For each micro-batch, whether it has only a dummy row.
        keys: Hashes of the keys of the valid rows, int64 [valid rows] on the CPU.
        sizes: Rows of each micro-batch including invalid ones; equal on every rank.
        token_counts: Numbers of caption tokens, samples and frames, for the padding metrics.
        wait_s: Seconds that the step waited for the batch.
        num_sources: Sets of the mixture, whose number for each row is the column `source` int64
            [B]; 0: a single set, without this column.
    """

    micro_batches: list[Batch]
    is_dummy: tuple[bool, ...]
    keys: Tensor
    sizes: tuple[int, ...]
    token_counts: TokenCounts
    wait_s: float = 0.0
    num_sources: int = 0

    @property
    def rows(self) -> int:
        """Rows of this rank in a step, including padding; equal on every rank for all-gathers."""
        return sum(self.sizes)


def make_local_batch(micro_batches: list[Batch]) -> LocalBatch:
    """Build a rank's batch from the micro-batches of the stream, without padding and unreadable
    rows.

    Args:
        micro_batches: Tensors [B, ...] by column on the CPU, at least `valid` bool [B] (False for
            rows to remove), `key` int64 [B] and `pos` int64 [B].

    """
    valid = torch.cat([micro_batch["valid"] for micro_batch in micro_batches])
    keys = torch.cat([micro_batch["key"] for micro_batch in micro_batches])[valid]
    sizes = tuple(len(micro_batch["valid"]) for micro_batch in micro_batches)
    is_dummy = tuple(not bool(micro_batch["valid"].any()) for micro_batch in micro_batches)
    if is_flat(micro_batches[0]):
        tokens = sum(int(micro_batch["num_tokens"].sum()) for micro_batch in micro_batches)
        padded = sum(micro_batch["input_ids"].numel() for micro_batch in micro_batches)
        counts = TokenCounts(tokens, max(tokens, padded))
        return LocalBatch(micro_batches, is_dummy, keys, sizes, counts)
    if not bool(valid.all()):
        micro_batches = [_without_invalid_rows(micro_batch) for micro_batch in micro_batches]
    real = [
        micro_batch for micro_batch, empty in zip(micro_batches, is_dummy, strict=True) if not empty
    ]
    masks = [
        micro_batch["attention_mask"] for micro_batch in real if "attention_mask" in micro_batch
    ]
    tokens = sum(int(mask.sum()) for mask in masks)
    padded = sum(mask.numel() for mask in masks)
    counts = TokenCounts(
        tokens,
        padded,
        sum(int(each["num_samples"].sum()) for each in real if "audio" in each),
        sum(each["audio"].numel() for each in real if "audio" in each),
        sum(int(each["num_frames"].sum()) for each in real if "video" in each),
        sum(each["video"].shape[:2].numel() for each in real if "video" in each),
    )
    return LocalBatch(micro_batches, is_dummy, keys, sizes, counts)


def _without_invalid_rows(micro_batch: Batch) -> Batch:
    """Return the valid rows, or one dummy row if there are none.

    The columns are views if invalid rows come last.
    """
    valid = micro_batch["valid"]
    num_valid = int(valid.sum())
    rows = slice(0, max(1, num_valid)) if bool(valid[:num_valid].all()) else valid
    return {name: tensor[rows] for name, tensor in micro_batch.items()}


class Prefetcher:
    """Iterator of a rank's batches on `device`, starting at step `first`.

    It yields a LocalBatch for each step: `micro_batches`, a list of tensors [B, ...] by column
    without invalid rows, `sizes`, `keys` and others.

    On a GPU, a thread reads and copies the next batch during the current step. The GPU then has two
    batches, provided the caller frees one before it requests another. `wait_s` of a batch is the
    time that the caller waited for it. The iterator raises TrainingError if rows are not those of
    the sample order.

    Args:
        steps: The CPU micro-batches of each step. No step after the run's last one is requested.
        plan: The positions of the sample order that each step takes.
        first: The first step of `steps`, counted from 0.
        rank: Rank of this worker.
        group_by_length: Whether `steps` has the rows of a step sorted by length; the order of their
            positions is then not checked.
        interrupt_stream: Called without arguments; ends `steps`, also for a thread that waits for
            its next rows.
    """

    def __init__(
        self,
        steps: Iterable[list[Batch]],
        plan: SamplePlan,
        first: int,
        rank: int,
        device: torch.device,
        group_by_length: bool = False,
        interrupt_stream: Callable[[], None] = lambda: None,
    ) -> None:
        batches = _checked_batches(steps, plan, first, rank, group_by_length)
        self._thread: _BackgroundIterator | None = None
        self._batches: Iterator[LocalBatch] = batches
        if device.type == "cuda":
            copied = _copied_batches(batches, DeviceCopier(device))
            receive = partial(_receive, device=device)
            self._thread = _BackgroundIterator(copied, receive, device, interrupt_stream)
            self._batches = self._thread

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> LocalBatch:
        start_s = time.perf_counter()
        batch = next(self._batches)
        return replace(batch, wait_s=time.perf_counter() - start_s)

    def close(self) -> None:
        """End the thread; call it before closing the stream from which the thread reads."""
        if self._thread is not None:
            self._thread.close()


def _checked_batches(
    steps: Iterable[list[Batch]], plan: SamplePlan, first: int, rank: int, group_by_length: bool
) -> Iterator[LocalBatch]:
    # The range comes first, so that a stream is not asked for a step after the last one.
    for step, micro_batches in zip(range(first, plan.steps), steps, strict=False):
        actual = torch.cat([micro_batch["pos"] for micro_batch in micro_batches]).numpy()
        expected = plan.positions(step, rank)
        if group_by_length:
            actual = np.sort(actual)
            expected = np.sort(expected)
        check_positions(actual, expected, step, rank)
        for micro_batch in micro_batches if plan.components else ():
            micro_batch["source"] = torch.from_numpy(plan.sources_at(micro_batch["pos"].numpy()))
        yield replace(make_local_batch(micro_batches), num_sources=len(plan.components))


def check_positions(actual: np.ndarray, expected: np.ndarray, step: int, rank: int) -> None:
    """Raise TrainingError if the rows of a step are not those of the sample order.

    Args:
        actual: Positions of the rows that arrived, int64 [N].
        expected: Positions of this rank in this step, int64 [rank rows], -1 for padding.
    """
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


@contextmanager
def register_pinned(pixels: np.ndarray, notify: Callable[[str, str], None]) -> Iterator[None]:
    """Context manager in which the GPU can read the memory of an array directly (pinned memory).

    Args:
        pixels: The array, uint8.
        notify: Called with (label, line) if the memory cannot be pinned. Training is then only
            slower.
    """
    memory = torch.from_numpy(pixels)
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        notify(
            "data",
            f"{memory.nbytes / 1e6:,.0f} MB of pixels cannot be pinned (cudaHostRegister: "
            f"{error}), so each step is copied once more on the CPU; raise `ulimit -l`",
        )
        with suppress(RuntimeError):
            # CUDA keeps the error until an operation raises it.
            torch.zeros(1, device="cuda")
        yield
        return
    try:
        yield
    finally:
        # The last copy may still be running. An error of the device is raised where it occurred.
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class Copied(NamedTuple):
    """A batch whose copy to the device has been queued.

    Attributes:
        batch: The batch, whose columns are views of `memory`.
        memory: Its tensors on the device.
        event: CUDA event that is recorded when the copy is complete.
    """

    batch: LocalBatch
    memory: list[Tensor]
    event: torch.cuda.Event


def _copied_batches(batches: Iterator[LocalBatch], copier: DeviceCopier) -> Iterator[Copied]:
    for batch in batches:
        yield copier(batch)
        # The stream may overwrite the rows of a step when the next one is requested.
        copier.wait()


class DeviceCopier:
    """Copies a rank's rows of a step to the GPU on a side stream: call it with a LocalBatch.

    The call returns when the copy is queued, with the batch on the GPU and an event of its end.
    Pixels in pinned memory are copied from there in one piece; other columns first to pinned memory
    that is reused.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._last_copy: torch.cuda.Event | None = None

    def __call__(self, batch: LocalBatch) -> Copied:
        """Start copying a batch; `wait` must be called before the next one."""
        self.wait()
        pixels = _pinned_pixels(batch.micro_batches)
        staged = [
            {
                name: tensor
                for name, tensor in micro_batch.items()
                if pixels is None or name != "image"
            }
            for micro_batch in batch.micro_batches
        ]
        columns = [tensor for micro_batch in staged for tensor in micro_batch.values()]
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in columns]
        starts = [0, *accumulate(sizes)]
        if starts[-1] > len(self._pinned):
            # captions vary in length
            self._pinned = torch.empty(starts[-1] * 5 // 4, dtype=torch.uint8).pin_memory()
        for tensor, start in zip(columns, starts, strict=False):
            _view_at(self._pinned, start, tensor).copy_(tensor)
        with torch.cuda.stream(self._stream):
            memory = [self._pinned[: starts[-1]].to(self._device, non_blocking=True)]
            if pixels is not None:
                memory.append(pixels.to(self._device, non_blocking=True))
            self._last_copy = torch.cuda.Event(blocking=True)
            self._last_copy.record(self._stream)
        views = map(partial(_view_at, memory[0]), starts, columns)
        micro_batches = [{name: next(views) for name in micro_batch} for micro_batch in staged]
        if pixels is not None:
            rows = [len(micro_batch["image"]) for micro_batch in batch.micro_batches]
            for micro_batch, image in zip(micro_batches, memory[1].split(rows), strict=True):
                micro_batch["image"] = image
        return Copied(replace(batch, micro_batches=micro_batches), memory, self._last_copy)

    def wait(self) -> None:
        """Wait until the last copy has finished, so that its memory on the host may be
        overwritten.
        """
        if self._last_copy is not None:
            self._last_copy.synchronize()


def _pinned_pixels(micro_batches: list[Batch]) -> Tensor | None:
    """Return a view of the pixels of all micro-batches, if they are adjacent in pinned memory."""
    images = [micro_batch["image"] for micro_batch in micro_batches if "image" in micro_batch]
    if not images or not images[0].is_pinned():
        return None
    end = images[0].data_ptr()
    for image in images:
        if image.data_ptr() != end or not image.is_contiguous():
            return None
        end += image.nbytes
    num_rows = sum(len(image) for image in images)
    return images[0].as_strided((num_rows, *images[0].shape[1:]), images[0].stride())


def _view_at(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """View of bytes [N], from `start`, with shape and type of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _receive(copied: Copied, device: torch.device) -> LocalBatch:
    """Make a batch usable on the compute stream."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied.event)
    for memory in copied.memory:
        memory.record_stream(current)  # otherwise the allocator would reuse it too early
    return copied.batch


class _BackgroundIterator:
    """Iterates `receive(item)` while a thread, whose current GPU is `device`, produces the next
    item.
    """

    def __init__(
        self,
        items: Iterator[Any],
        receive: Callable[[Any], Any],
        device: torch.device,
        interrupt: Callable[[], None],
    ) -> None:
        self._items = items
        self._receive = receive
        self._interrupt = interrupt
        # A thread's default GPU is the first; pinned memory and streams would create a context
        # there.
        enter = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "mmray-prefetch", *enter)
        self._pending = self._thread.submit(next, items, None)

    def __iter__(self) -> _BackgroundIterator:
        return self

    def __next__(self) -> Any:
        item = self._pending.result()
        if item is None:
            raise StopIteration
        self._pending = self._thread.submit(next, self._items, None)
        return self._receive(item)

    def close(self) -> None:
        """Interrupt the source, and wait for the thread, at most CLOSE_TIMEOUT_S."""
        self._interrupt()
        # A source that cannot be interrupted, such as a stalled stream of Ray, is left to the end
        # of the process.
        ended, _ = wait([self._pending], CLOSE_TIMEOUT_S)
        self._thread.shutdown(wait=bool(ended), cancel_futures=True)
