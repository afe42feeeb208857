"""Dry run: synthetic steps that find errors of shapes, measure memory, and search the micro-batch
size that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import ceil
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmray.engine.batch import BatchShape, out_of_memory_error
from mmray.engine.collectives import Group, to_local
from mmray.engine.optimizer import lr_at
from mmray.engine.parallel.ddp import BUCKET_MB
from mmray.engine.parallel.sharding import parameter_storages
from mmray.engine.parallel.transforms import force_eager, preserve_buffers
from mmray.engine.prefetch import LocalBatch, make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients, forward_micro_batch
from mmray.errors import (
    OutOfMemoryError,
    TrainingError,
    UsageError,
    first_line,
    is_out_of_memory,
)
from mmray.machine import free_memory
from mmray.models.synthetic import synthetic_rows
from mmray.objectives.protocol import Batch, Objective

if TYPE_CHECKING:
    from mmray.config import Config

GIB = 2**30
OOM_ADVICE = (
    "lower --model.inputs.image-side or --model.inputs.max-tokens, try --train.precision bf16 or "
    "--train.parallel fsdp, or use a smaller model or a larger GPU"
)
ONE_ROW_TOO_LARGE = f"a single row does not fit in the memory of a worker's device: {OOM_ADVICE}"
HOST_FRACTION = 0.8  # share of a host's free memory that its ranks may use
# Share of a GPU's memory that `batch.micro auto` leaves free for fragmentation and longer captions.
HEADROOM = 0.05
# Peak memory of a row divided by the bytes that autograd saves: on a CPU 1.05 (resnet50-bert) to
# 1.2 (sample).
PEAK_PER_SAVED = 1.2
# Rows of the steps that predict the memory of a step on a CPU, which takes seconds there.
FEW_ROWS = 4
MakeBatch = Callable[[int], Batch]  # rows -> a synthetic micro-batch on the training device


def dry_run(
    config: Config,
    model: nn.Module,
    objective: Objective,
    group: Group,
    batch_shape: BatchShape,
    steps: int,
) -> tuple[BatchShape, dict[str, float]]:
    """Take a synthetic step to find errors of shapes and memory before data is read.

    Args:
        model: Not wrapped; it may be sharded already. Its weights are unchanged afterwards.
        objective: Loss of the run, with `count(batch)` and `compute_loss(outputs, batch,
            gathered)`.
        group: All ranks; each calls this function.
        batch_shape: Global batch and micro-batch. If its `auto` is True, the largest micro-batch
            that fits on every rank is searched.
        steps: Number of steps of the run, with which a user's schedule is tried.

    Returns:
        The shape with the micro-batch size of the run, and this rank's memory in GiB as
        `memory/parameters_gib`, `memory/gradients_gib`, `memory/optimizer_gib` and
        `memory/activations_gib`.

    Raises:
        UsageError: Model and objective do not match, or a schedule of the user fails.
        OutOfMemoryError: The micro-batch, or one row, does not fit.
        TrainingError: The model cannot process the rows.
    """
    device = group.device
    lr_at(steps - 1, config.optimizer, steps)  # raises the errors of a user's schedule
    state = TrainState.build(config.train, config.optimizer, model, objective, group, wrap=False)
    ema_placeholder = (
        [weight.detach().clone() for weight in model.parameters()] if config.train.ema else []
    )

    def make_batch(rows: int) -> Batch:
        return synthetic_rows(model, config.model, rows, device)

    # With the configured size the graphs of the run are compiled.
    may_predict = device.type == "cpu" and config.train.compile == "none"
    try:
        return probe_memory(state, make_batch, batch_shape, may_predict)
    except KeyError as error:
        frames = extract_tb(error.__traceback__)
        if any(frame.name == forward_micro_batch.__name__ for frame in frames):
            raise TrainingError(
                f"the dry run failed: the model's forward raised KeyError {error}"
            ) from error
        raise UsageError(
            f"objective.kind: `{config.objective.kind}` reads `{error.args[0]}`, which a model of "
            f"model.kind `{config.model.kind}` with these settings does not return; use another "
            "objective or model"
        ) from error
    finally:
        ema_placeholder.clear()


def probe_memory(
    state: TrainState, make_batch: MakeBatch, batch_shape: BatchShape, may_predict: bool = False
) -> tuple[BatchShape, dict[str, float]]:
    """Take synthetic steps to measure memory and find the micro-batch size that fits.

    Args:
        state: Model, objective and optimizer. The model and the random number generators are
            unchanged afterwards.
        make_batch: Called with a number of rows; returns a synthetic micro-batch of this many rows
            on the training device.
        batch_shape: Global batch and micro-batch. If its `auto` is True, the largest micro-batch
            that fits on every rank is searched.
        may_predict: Take steps of few rows in place of one of a given size, if they predict that it
            takes at most half of the free memory.

    Returns:
        The shape with the micro-batch size of the run, and this rank's memory in GiB as
        `memory/parameters_gib`, `memory/gradients_gib`, `memory/optimizer_gib` and
        `memory/activations_gib`.

    Raises:
        UsageError: The objective does not train all parameters.
        OutOfMemoryError: The micro-batch, or one row, does not fit.
        TrainingError: The model cannot process the rows.
    """
    group = state.group
    # A real collective, as large as the ones of DDP: NCCL allocates its buffers (1 GiB and more) in
    # the first.
    group.all_reduce_sum(torch.zeros(int(BUCKET_MB * 2**18), device=group.device))
    _allocate_optimizer(state.optimizer)
    probe = MemoryProbe(state, make_batch, batch_shape)
    size, activations = probe.search() if batch_shape.auto else probe.try_given_size(may_predict)
    if group.device.type == "cuda":
        # The reported peak is then the peak of training.
        torch.cuda.reset_peak_memory_stats(group.device)
    weights = list(state.model.parameters())
    moments = tree_leaves(state.optimizer.state_dict()["state"])
    gradients = [to_local(weight) for weight in weights if weight.requires_grad]
    # Of sharded tensors, this rank's shard; rank 0, whose table is logged, has the largest.
    sizes = {
        "parameters": sum(to_local(weight).nbytes for weight in weights),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "optimizer": sum(to_local(value).nbytes for value in moments if isinstance(value, Tensor)),
        "activations": activations,  # with `branches`, only of the first device
    }
    table = {f"memory/{name}_gib": value / GIB for name, value in sizes.items()}
    return batch_shape.with_micro_batch_size(size), table


class MemoryProbe:
    """Finds the largest micro-batch that fits into memory, by steps of training on synthetic rows.

    Each rank searches on its own, without communication, and all take the smallest result. If a
    forward has collectives (FSDP), the ranks search together, because the unsharded model need not
    fit on one device.

    `search` and `try_given_size` return (rows of a micro-batch, bytes of its activations).

    Args:
        state: Model, objective, optimizer and group.
        make_batch: Called with a number of rows; returns a synthetic micro-batch of this many rows
            on the training device.
        batch_shape: Rows of a step, and the micro-batch size: the upper limit of `search`, the only
            size of `try_given_size`.
    """

    def __init__(self, state: TrainState, make_batch: MakeBatch, batch_shape: BatchShape) -> None:
        group = state.group
        self._group = group
        self._state = replace(state, group=FakeGroup(group.rank, group.world_size, group.device))
        self._make_batch = make_batch
        self._batch_shape = batch_shape
        self._rows = batch_shape.rank_batch_size
        self._together = state.strategy.is_sharded or any(
            isinstance(layer, nn.SyncBatchNorm) for layer in state.model.modules()
        )
        self._headroom = 0  # bytes of a GPU that stay free
        if batch_shape.auto and group.device.type == "cuda":
            self._headroom = int(HEADROOM * torch.cuda.mem_get_info(group.device)[1])
        # The largest size that fits so far, the bytes of its activations, and of a further row.
        self._largest = self._activations = self._row_bytes = 0
        self._problem = ""  # the last error of the device

    def try_given_size(self, may_predict: bool) -> tuple[int, int]:
        """Take a synthetic step with the configured micro-batch size, which is not searched; if it
        may, predict its memory by steps of few rows, and take it only if memory is short.
        """
        size = self._batch_shape.micro_batch_size
        if may_predict and size > FEW_ROWS and self._on_all_ranks(self._has_ample_memory(size)):
            return size, self._expected_activations(size)
        activations = self.try_step(size, min(2 * size, self._rows))
        if self._on_all_ranks(activations is not None):
            return size, activations or 0
        raise self._out_of_memory(size, "on at least one rank")

    def _has_ample_memory(self, size: int) -> bool:
        """Return whether steps of few rows predict that a size takes at most half of the free
        memory.
        """
        num_micro_batches = min(2, self._batch_shape.accumulation)
        for rows in (FEW_ROWS // 2, FEW_ROWS):
            if not self._try_larger(rows, num_micro_batches * rows):
                return False
        expected = PEAK_PER_SAVED * self._expected_activations(size)
        return expected <= free_bytes(self._group) / 2

    def search(self) -> tuple[int, int]:
        """Search the largest micro-batch size that fits on every rank, with synthetic steps.

        Returns:
            The size in rows, and the bytes of its activations on this rank.

        Raises:
            OutOfMemoryError: Not even one row fits, or the outputs of all rows of a rank do not
                fit. Or this rank ran out of memory while other ranks waited for it in a collective;
                then the driver restarts the workers with smaller micro-batches.
        """
        # In eager code, because graphs of each size would take minutes to compile.
        with force_eager(), _disable_cudnn_benchmark():
            self._double()
        largest = self._group.all_reduce_min(self._largest)
        if largest == 0:
            raise OutOfMemoryError(ONE_ROW_TOO_LARGE)
        # In the state of the run, and with all rows of a rank, because the outputs of all are in
        # memory at once.
        size = self._split_evenly(largest)
        while (activations := self._try_whole_step(size)) is None:
            if size == 1:
                raise OutOfMemoryError(
                    f"one row fits, but not the outputs of {self._rows} rows ({self._problem}): "
                    "lower --batch.global or use more workers"
                )
            size = self._split_evenly(ceil(size / 2))
        # Compiled graphs of transformers store 0.7 times the activations that eager code stores.
        predicted = self._group.all_reduce_min(self._predict_size(size, activations))
        for larger in dict.fromkeys((predicted, self._split_evenly(largest * 3 // 2))):
            if size < larger <= predicted:
                larger_activations = self._try_whole_step(larger)
                if larger_activations is not None:
                    return larger, larger_activations
        return size, activations

    def _try_whole_step(self, size: int) -> int | None:
        """Take a step with all rows of a rank; return the bytes of its activations, None if it does
        not fit on every rank.
        """
        activations = self.try_step(size, self._rows)
        return activations if self._on_all_ranks(activations is not None) else None

    def _predict_size(self, size: int, activations: int) -> int:
        """Return the largest size of equal micro-batches that fits by the bytes of a step's
        activations, in at most three quarters as many of them; otherwise `size`, which that step
        had. A larger size takes one more compilation, so a few rows do not pay.
        """
        free = free_bytes(self._group, self._headroom)
        for number in range(1, ceil(self._rows / size) * 3 // 4 + 1):
            larger = ceil(self._rows / number)
            # Compiled code needs no more than eager code.
            expected = min(activations / size * larger, self._expected_activations(larger))
            if PEAK_PER_SAVED * expected <= free:
                return larger
        return size

    def _double(self) -> None:
        """Double the size from one row on until it does not fit, is not expected to, or all rows
        fit.
        """
        size = 1
        while self._largest < self._rows:
            if self._largest:
                expected = self._is_expected_to_fit(size)
                if not (self._on_all_ranks(expected) if self._together else expected):
                    return
            if not self._try_larger(size, min(2 * size, self._rows)):
                return
            size = min(2 * size, self._rows)

    def _try_larger(self, size: int, rows: int) -> bool:
        """Take a step with a larger size than before; return whether it fits."""
        activations = self.try_step(size, rows)
        if activations is None:
            return False
        self._row_bytes = (activations - self._activations) // (size - self._largest)
        self._largest = size
        self._activations = activations
        return True

    def _is_expected_to_fit(self, size: int) -> bool:
        """Return whether a size can be tried.

        A GPU can, because it only raises an error. On a CPU the kernel would kill the process, and
        a rank that fails in a forward with collectives leaves the others waiting: then the last two
        sizes must predict that it fits.
        """
        if self._group.device.type == "cuda" and not self._together:
            return True
        free = free_bytes(self._group, self._headroom)
        return PEAK_PER_SAVED * self._expected_activations(size) <= free

    def _expected_activations(self, size: int) -> int:
        """Return the bytes of the activations of eager code, by the largest sizes that fit."""
        return self._activations + self._row_bytes * (size - self._largest)

    def _split_evenly(self, size: int) -> int:
        """Return the size of equal micro-batches: 10 rows at most 7 at a time are 5 and 5."""
        return ceil(self._rows / ceil(self._rows / size))

    def _on_all_ranks(self, condition: bool) -> bool:
        return self._group.all_reduce_min(int(condition)) > 0

    def try_step(self, size: int, rows: int) -> int | None:
        """Compute the gradients of a synthetic step, in micro-batches.

        Args:
            rows: Rows of the step.

        Returns:
            The most bytes that autograd saves at a time; None if memory ran out.

        Raises:
            OutOfMemoryError: Memory ran out, and other ranks wait for this one.
            UsageError: The objective does not train all parameters.
            TrainingError: The model cannot process the rows.
        """
        model = self._state.model
        saved = SavedBytes(model)
        fits = False
        with preserve_buffers(model), saved.scope():
            try:
                self._accumulate(size, rows)
                fits = True
            except (RuntimeError, MemoryError, ValueError, IndexError, TypeError) as error:
                if not is_out_of_memory(error):
                    raise TrainingError(
                        "the dry run failed: the model cannot process a synthetic micro-batch of "
                        f"{size} rows: {error}"
                    ) from error
                self._problem = first_line(error)
            model.zero_grad(set_to_none=True)
        if self._group.device.type == "cuda":
            torch.cuda.empty_cache()
        if not fits and self._together:
            raise self._out_of_memory(size, f"rank {self._group.rank}")
        return saved.peak if fits else None

    def _out_of_memory(self, size: int, detail: str) -> OutOfMemoryError:
        return out_of_memory_error(
            "out of memory in the dry run",
            detail,
            self._batch_shape.with_micro_batch_size(size),
            ONE_ROW_TOO_LARGE,
            fitting=self._largest,
        )

    def _accumulate(self, size: int, rows: int) -> None:
        """Compute the gradients while the other memory of a run is in use."""
        batch = synthetic_step(self._make_batch, size, rows)
        model = self._state.model
        device = self._group.device
        reserved = [torch.empty(self._headroom, dtype=torch.uint8, device=device)]
        if device.type == "cuda":  # it holds the rows of two steps at once (prefetch.py)
            reserved += [
                column.new_empty(2 * self._rows - rows, *column.shape[1:])
                for column in batch.micro_batches[0].values()
            ]
        if self._group.world_size > 1 and not self._state.strategy.is_sharded:
            # DDP has its buckets before the forward; here gradients are allocated in the backward.
            reserved += [
                torch.empty_like(weight) for weight in model.parameters() if weight.requires_grad
            ]
        accumulate_gradients(self._state, batch, lambda index: index)
        unused = [
            name
            for name, weight in model.named_parameters()
            if weight.requires_grad and weight.grad is None
        ]
        if unused:
            # DDP would wait for their gradients forever.
            raise UsageError(
                f"objective.kind: the objective gives no gradient to {len(unused)} parameters of "
                f"the model, the first is {unused[0]}: use another objective, or freeze them with "
                f"--optimizer.freeze {' '.join(unused[:3])}"
            )


def synthetic_step(make_batch: MakeBatch, size: int, rows: int) -> LocalBatch:
    """Return the synthetic rows of a step, in micro-batches of at most `size` rows."""
    sizes = [min(size, rows - first) for first in range(0, rows, size)]
    return make_local_batch([make_batch(each) for each in sizes])


@contextmanager
def _disable_cudnn_benchmark() -> Iterator[None]:
    """Scope in which cuDNN does not time its algorithms, which would take seconds for each size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class FakeGroup(Group):
    """A group whose other ranks have the same tensors: memory and arithmetic of a step without
    communication.

    It is constructed like Group, `FakeGroup(rank, world_size, device)`. The methods take and return
    tensors of the same shapes as those of Group.
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


def free_bytes(group: Group, headroom: int = 0) -> float:
    """Return the bytes of memory that this rank may use in addition to what it uses.

    On a GPU it is its free memory less `headroom`; on a CPU 80 % of the free memory of the host,
    divided among the ranks on it.
    """
    if group.device.type == "cuda":
        return torch.cuda.mem_get_info(group.device)[0] - headroom
    return HOST_FRACTION * free_memory() / group.ranks_on_node


class SavedBytes:
    """Counts the bytes that autograd keeps for backward, except weights, inside a context manager.

    `scope()` returns the context manager. A storage counts once while a graph keeps it. An address
    alone does not identify it, because later micro-batches reuse the addresses of freed tensors.

    Args:
        model: The model, whose weights do not count.

    Attributes:
        peak: The most bytes at a time so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = parameter_storages(model)
        self._references = Counter[int]()
        self._bytes = self.peak = 0

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context manager that adds the bytes of tensors that autograd saves inside it.

        They are subtracted when their graph is freed; `peak` is the largest sum so far. It yields
        nothing, and may be entered again.
        """
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        size = storage.nbytes()
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
