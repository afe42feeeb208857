"""Dry run: a synthetic step that finds shape errors and measures memory, and a search for the
micro-batch that fits.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil, sqrt
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmray.engine import precision
from mmray.engine.batch import BatchShape
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.optimizer import build_optimizer, lr_at
from mmray.engine.parallel import strategy
from mmray.engine.parallel.transforms import force_eager
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients, forward_micro_batch
from mmray.errors import OutOfMemoryError, TrainingError, UsageError, is_out_of_memory
from mmray.machine import free_memory
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Batch

if TYPE_CHECKING:
    from mmray.config import Config

GIB = 2**30
OOM_ADVICE = (
    "lower --model.inputs.image-side or --model.inputs.max-tokens, try --train.precision bf16 or "
    "--train.parallel fsdp, or use a smaller model or a larger GPU"
)
HOST_FRACTION = 0.8  # of a host's free memory, available to its ranks
# of a GPU's memory, left free by `batch.micro auto` for fragmentation and longer captions
HEADROOM = 0.05
# peak memory of a row : bytes that autograd saves; on a CPU 1.05 (resnet50-bert) to 1.2 (sample)
PEAK_PER_SAVED = 1.2
REFINEMENTS = 2  # sizes tried between the largest that fits and the smallest that does not
MakeBatch = Callable[[int], Batch]  # rows -> a synthetic micro-batch on the training device


def dry_run(
    config: Config,
    model: nn.Module,
    objective: Any,
    group: Group,
    batch_shape: BatchShape,
    steps: int,
) -> tuple[BatchShape, dict[str, float]]:
    """Take a synthetic step to find shape and memory errors before the first; return as
    `probe_memory` does.

    model: sharded if `train.parallel` is fsdp or hsdp, otherwise not wrapped. steps: of the run.
    Raises UsageError if model and objective do not match.
    """
    device, mixed = group.device, precision.select_precision(config.train.precision, group.device)
    optimizer = build_optimizer(model, config.optimizer)  # temporary
    lr_at(steps - 1, config.optimizer, steps)  # raises the errors of a user's schedule
    state = TrainState(
        model, objective, group, mixed, optimizer, mixed.scaler(), PhaseTimers(device)
    )
    ema_placeholder = (
        [weight.detach().clone() for weight in model.parameters()] if config.train.ema else []
    )

    def check_all_have_gradients() -> None:
        unused = [
            name
            for name, weight in model.named_parameters()
            if weight.requires_grad and weight.grad is None
        ]
        if unused:  # DDP would wait for their gradients forever
            raise UsageError(
                f"objective.kind `{config.objective.kind}` gives no gradient to {len(unused)} "
                "parameters of the model, "
                f"the first is {unused[0]}: use another objective, or freeze them with "
                f"--optimizer.freeze {' '.join(unused[:3])}"
            )

    def make_batch(rows: int) -> Batch:
        return synthetic_batch(config.model.inputs, config.model.vocab_size, rows, device)

    try:
        return probe_memory(state, make_batch, batch_shape, check_all_have_gradients)
    except KeyError as error:
        if any(
            frame.name == forward_micro_batch.__name__ for frame in extract_tb(error.__traceback__)
        ):
            raise TrainingError(
                f"the dry run failed: the model's forward raised KeyError {error}"
            ) from error
        raise UsageError(
            f"objective.kind: `{config.objective.kind}` reads `{error.args[0]}`, which a model of "
            "model.kind "
            f"`{config.model.kind}` with these settings does not return; use another objective or "
            "model"
        ) from error
    finally:
        ema_placeholder.clear()


def probe_memory(
    state: TrainState,
    make_batch: MakeBatch,
    batch_shape: BatchShape,
    check: Callable[[], None] = lambda: None,
) -> tuple[BatchShape, dict[str, float]]:
    """Take one synthetic step in micro-batches of the given size, or (`auto`) of as many rows as
    fit on every rank.

    Return the shape with this size, and this rank's memory table in GiB. `check` is called while
    the step's gradients exist. Model and random number generators are unchanged afterwards. Raises
    OutOfMemoryError if the micro-batch, or one row, does not fit; TrainingError if the model cannot
    process the rows.
    """
    group = state.group
    rows_per_rank = batch_shape.rank_batch_size
    micro = None if batch_shape.auto else batch_shape.micro_batch_size
    fake_group = FakeGroup(group.rank, group.world_size, group.device)
    fake_state, together = (
        replace(state, group=fake_group),
        strategy.has_inner_collectives(state.model),
    )
    # A real collective, as large as those of DDP: NCCL allocates its buffers (1 GiB and more) in
    # the first.
    group.all_reduce_sum(torch.zeros(int(strategy.BUCKET_MB * 2**18), device=group.device))
    _allocate_optimizer(state.optimizer)
    # allocated before the forward
    ddp_buckets = group.world_size > 1 and not strategy.is_sharded(state.model)
    searches_gpu = micro is None and group.device.type == "cuda"
    headroom = int(HEADROOM * torch.cuda.mem_get_info(group.device)[1]) if searches_gpu else 0
    # One step is enough for a given size without DDP's buckets, with which every weight has a
    # gradient.
    once, saved_bytes = micro is not None and not ddp_buckets, None

    def try_rows(rows: int, size: int) -> int | None:
        nonlocal saved_bytes
        checks = (check,) if once else ()
        saved_bytes = _try_step(
            fake_state, make_batch, rows_per_rank, headroom, ddp_buckets, rows, size, *checks
        )
        return saved_bytes

    # Searched in eager code, which saves more activations: graphs of each size tried would take
    # minutes to compile.
    with force_eager() if micro is None else nullcontext():
        largest = _largest_micro_that_fits(group, try_rows, batch_shape, together, headroom)
    if not once:
        saved_bytes = _try_step(
            fake_state, make_batch, rows_per_rank, 0, False, largest, largest, check
        )
    if saved_bytes is None:
        raise _oom_error(group, batch_shape, largest, _half(largest))
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(group.device)  # the reported peak is that of training
    weights = list(state.model.parameters())
    # and float32 copies of half-precision weights
    moments = tree_leaves(state.optimizer.state_dict()["state"])
    gradients: list[Tensor] = [weight for weight in weights if weight.requires_grad]
    if not getattr(state.model, "sync_once", False):
        gradients = [strategy.to_local(weight) for weight in gradients]
    # of sharded tensors, this rank's shard; rank 0, whose table is logged, has the largest
    sizes = {
        "parameters": sum(strategy.to_local(weight).nbytes for weight in weights),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "optimizer": sum(
            strategy.to_local(value).nbytes for value in moments if isinstance(value, Tensor)
        ),
        "activations": saved_bytes,  # of two devices (`branches`), those of the first
    }
    shape = batch_shape.with_micro_batch_size(largest)
    return shape, {f"memory/{name}_gib": size / GIB for name, size in sizes.items()}


class FakeGroup(Group):
    """A group whose other ranks have the same tensors: memory and arithmetic of a step without
    communication.
    """

    def all_reduce_min(self, value: int) -> int:
        return value

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world_size)

    def all_gather(self, rows: Tensor) -> Tensor:
        return rows.repeat(self.world_size, *(1 for _ in rows.shape[1:]))

    def reduce_scatter(self, gradients: Tensor) -> Tensor:
        return gradients.view(self.world_size, -1, *gradients.shape[1:]).sum(0)


def _allocate_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer state as a first step does; at learning rate 0 it leaves the weights
    unchanged.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _half(size: int) -> int:
    return ceil(size / 2) if size > 1 else 0


def _oom_error(
    group: Group, batch_shape: BatchShape, size: int, fallback_size: int
) -> OutOfMemoryError:
    cause = f"out of memory in the dry run with micro-batches of {size} rows (rank {group.rank})"
    retry = f"restarting with {fallback_size} rows" if fallback_size else OOM_ADVICE
    shape = batch_shape.with_micro_batch_size(fallback_size) if fallback_size else None
    return OutOfMemoryError(f"{cause}; {retry}", shape)


def _largest_micro_that_fits(
    group: Group,
    try_rows: Callable[[int, int], int | None],
    batch_shape: BatchShape,
    together: bool,
    headroom: int,
) -> int:
    """Rows of a micro-batch that fit on every rank: `micro`, or the largest found by `search_size`
    after 1 and 2 rows.

    try_rows: `_try_step` for (rows, rows of a micro-batch). Each rank probes on its own, then all
    take the minimum. If a forward has collectives, they probe together, because the unsharded model
    need not fit on one device. Then a rank that runs out of memory leaves the others in a
    collective, and they cannot agree to retry: its error has a smaller size, with which the group
    restarts. So that this is rare, they try half the expected size, then all of it.
    """

    rows_per_rank = batch_shape.rank_batch_size
    micro = None if batch_shape.auto else batch_shape.micro_batch_size

    def bytes_if_fits(rows: int, size: int, fallback_size: int) -> int | None:
        saved = try_rows(min(rows_per_rank, rows), size)
        if saved is None and together:
            raise _oom_error(group, batch_shape, size, fallback_size)
        return saved

    def expected_rows(one_row: int, two_rows: int) -> int:
        rows = min(rows_per_rank, rows_in_memory(_free_bytes(group, headroom), one_row, two_rows))
        return group.all_reduce_min(rows) if together else rows

    largest = micro or 1

    def fits(size: int) -> bool:
        nonlocal largest
        if bytes_if_fits(2 * size, size, max(largest, _half(size))) is None:
            return False
        largest = size
        return True

    saved = bytes_if_fits(1 if micro is None else 2 * micro, largest, _half(largest))
    if saved is not None and micro is None:
        # where the kernel kills a process that has too much memory
        on_host, two = group.device.type == "cpu", None
        if rows_per_rank > 1 and (not on_host or expected_rows(saved, 2 * saved) > 1):
            two = bytes_if_fits(2, 2, 1)
        if two is not None:
            largest, guess = 2, expected_rows(saved, two)
            start = max(1, _half(guess)) if together and guess < rows_per_rank else guess
            largest = search_size(
                rows_per_rank, start, guess if on_host or together else rows_per_rank, fits
            )
        # The outputs of all rows are in memory at once. Tried so far: 2 x largest rows, or only one
        # or two.
        tried = 2 * largest if largest > 2 else largest
        while (
            largest
            and tried < rows_per_rank
            and bytes_if_fits(rows_per_rank, largest, _half(largest)) is None
        ):
            largest = _half(largest)
    largest = 0 if saved is None else largest
    if common := group.all_reduce_min(largest):
        return common
    cause = f"a micro-batch of {micro} rows does not fit: lower --batch.micro, or set it to auto"
    if largest:
        cause = ""
    elif saved is not None:
        cause = (
            f"one row fits, but not the outputs of {rows_per_rank} rows: lower --batch.global "
            "or use more workers"
        )
    elif micro in (None, 1):
        cause = f"a single row does not fit in the memory of a worker's device: {OOM_ADVICE}"
    # another rank's, if this one fits
    raise OutOfMemoryError(next(filter(None, group.all_gather_objects(cause))))


def search_size(rows: int, start: int, limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size found between 2, which fits, and `limit`.

    The search doubles `start` until it does not fit, or halves it until it does; then it bisects on
    a geometric scale. The rows of a step are divided evenly: 10 rows at most 7 at a time are 5 and
    5.
    """

    def split_evenly(size: float) -> int:
        return ceil(rows / ceil(rows / size))

    largest, too_large, size = 2, limit + 1, split_evenly(start)
    while largest < size and not fits(size):
        too_large, size = size, split_evenly(_half(size))
    largest = max(largest, size)
    while too_large > limit and largest < (size := split_evenly(min(2 * largest, limit))):
        largest, too_large = (size, too_large) if fits(size) else (largest, size)
    for _ in range(REFINEMENTS):
        if largest < (size := split_evenly(sqrt(largest * too_large))) < too_large:
            largest, too_large = (size, too_large) if fits(size) else (largest, size)
    return largest


def rows_in_memory(free_bytes: float, one_row: int, two_rows: int) -> int:
    """Rows of a micro-batch that are expected to fit, from the bytes that autograd saves of one row
    and of two.
    """
    row = max(1, two_rows - one_row)
    return max(1, int((free_bytes / PEAK_PER_SAVED - (one_row - row)) / row))


def _free_bytes(group: Group, headroom: int) -> float:
    """Return the bytes that a rank's micro-batch may use."""
    if group.device.type == "cuda":
        return torch.cuda.mem_get_info(group.device)[0] - headroom
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", group.world_size))
    return HOST_FRACTION * free_memory() / ranks


def _try_step(
    state: TrainState,
    make_batch: MakeBatch,
    rows_per_rank: int,
    headroom: int,
    ddp_buckets: bool,
    rows: int,
    micro: int,
    check: Callable[[], None] = lambda: None,
) -> int | None:
    """Take a synthetic step of `rows` rows; return the bytes that autograd saves at a time, None
    without memory.

    rows_per_rank: rows of a step; a GPU holds those of two steps at once (prefetch.py). headroom:
    bytes to leave free.
    """
    sizes, fits = [min(micro, rows - first) for first in range(0, rows, micro)], False
    saved = SavedBytes(state.model)
    with strategy.preserve_buffers(state.model), saved.scope():
        try:
            for weight in state.model.parameters():
                weight.grad = (
                    torch.zeros_like(weight) if ddp_buckets and weight.requires_grad else None
                )
            batch = make_local_batch([make_batch(size) for size in sizes])
            on_gpu = [
                column for column in batch.micro_batches[0].values() if column.device.type == "cuda"
            ]
            reserved = [
                column.new_empty(2 * rows_per_rank - rows, *column.shape[1:]) for column in on_gpu
            ]
            reserved.append(torch.empty(headroom, dtype=torch.uint8, device=state.group.device))
            accumulate_gradients(state, batch, lambda index: index)
            reserved.clear()
            check()
            fits = True
        except (RuntimeError, MemoryError, ValueError, IndexError, TypeError) as error:
            if not is_out_of_memory(error):
                raise TrainingError(
                    "the dry run failed: the model cannot process a synthetic micro-batch of "
                    f"{micro} rows: {error}"
                ) from error
        finally:
            state.model.zero_grad(set_to_none=True)
    if state.group.device.type == "cuda":
        torch.cuda.empty_cache()
    return saved.peak if fits else None


class SavedBytes:
    """Counts the bytes that autograd keeps for backward, except weights, within `scope`; `peak` is
    the most at a time.

    A storage counts once while a graph keeps it. An address alone does not identify it, because
    later micro-batches reuse those of freed tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights, self._references = strategy.parameter_storages(model), Counter[int]()
        self._bytes = self.peak = 0

    def scope(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._weights():
            return _Saved(tensor, lambda: None)
        self._add(address, size, 1)
        return _Saved(tensor, lambda: self._add(address, size, -1))

    def _add(self, address: int, size: int, references: int) -> None:
        before = self._references[address]
        self._references[address] += references
        self._bytes += size * (bool(before + references) - bool(before))
        self.peak = max(self.peak, self._bytes)


@dataclass
class _Saved:
    """A tensor that a graph keeps."""

    tensor: Tensor
    release: Callable[[], None]

    def __del__(self) -> None:
        self.release()


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory on a CPU; return False if there is no mallopt.

    By default large tensors are unmapped when freed, and each step maps and clears their pages
    again. Measured on a ResNet-18 step: 14 % less CPU time (0.46 s instead of 0.54 s, mean of three
    pairs), 60 times fewer page faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    m_mmap_threshold, m_trim_threshold = -3, -1  # <malloc.h>
    return mallopt is not None and all(
        mallopt(option, 2**31 - 1) for option in (m_mmap_threshold, m_trim_threshold)
    )
