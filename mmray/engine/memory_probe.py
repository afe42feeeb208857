"""Memory probe and dry run: one synthetic step before the first, for shape errors, memory use and rows that fit."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.data.stream.order import SamplePlan
from mmray.engine import optimizer, precision
from mmray.engine.batch import smaller_micro
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.oom import OOM_ADVICE, RecoverableOom
from mmray.engine.parallel import strategy
from mmray.engine.parallel.branches import BranchParallel, two_devices
from mmray.engine.parallel.transforms import compile_branches
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients
from mmray.engine.worker_context import WorkerContext
from mmray.errors import OutOfMemoryError, TrainingError, UsageError, is_out_of_memory
from mmray.machine import free_memory
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.protocol import Batch

if TYPE_CHECKING:
    from mmray.config import Config

GIB = 2**30
HOST_FRACTION = 0.8  # of a host's free memory, available to its ranks
MakeBatch = Callable[[int], Batch]  # rows -> a synthetic micro-batch on the training device


@dataclass(frozen=True)
class ProbeResult:
    """Rows of a micro-batch that fit on every rank, and this rank's memory table in GiB."""

    micro: int
    table: dict[str, float]


def dry_run_job(context: WorkerContext, state: TrainState, plan: SamplePlan) -> ProbeResult:
    """Take a synthetic step to find shape and memory errors before the first; return the rows that fit."""
    config, spec = context.config, context.config.model
    micro = min(plan.micro, plan.rank_rows, context.micro or plan.rank_rows)
    auto = config.batch.micro == "auto" and not context.micro
    device, sharded = state.group.device, config.train.parallel == "fsdp"
    if sharded:
        state = _sharded_copy(config, state)
    elif config.train.parallel == "branches" and device.type == "cuda":
        state = replace(state, model=BranchParallel(state.model, two_devices(device)))
    averaged = state.model.parameters() if config.train.ema else ()
    copied = [weight.detach().clone() for weight in averaged]  # the averaged weights will be in memory too
    try:
        return dry_run(
            config,
            state,
            lambda rows: synthetic_batch(spec.inputs, spec.vocab_size, rows, device),
            plan.rank_rows,
            None if auto else micro,
        )
    finally:
        copied.clear()
        if isinstance(state.model, BranchParallel):
            state.model.close()
        if sharded:
            del state
            gc.collect()  # FSDP's state and the module refer to each other
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def make_probe_state(config: Config, model: nn.Module, objective: Any, group: Group) -> TrainState:
    """Return a state for the synthetic step, with a temporary optimizer."""
    mixed = precision.select_precision(config.train.precision, group.device)
    temporary = optimizer.build_optimizer(model, config.optimizer)
    return TrainState(model, objective, group, mixed, temporary, mixed.scaler(), {}, PhaseTimers(group.device))


def _sharded_copy(config: Config, state: TrainState) -> TrainState:
    """Return the state with a temporary copy of the model, sharded over the ranks.

    A copy, because a full state can only be loaded into unsharded weights. Raises UsageError if a custom model cannot
    be copied.
    """
    try:
        module = copy.deepcopy(state.model)
    except (TypeError, RuntimeError) as error:  # for example locks, files, or computed weights
        raise UsageError(
            "train.parallel fsdp copies the model for the dry run, and model.kind "
            f"`{config.model.kind}` cannot be copied ({error}): add a __deepcopy__, or use another strategy"
        ) from error
    compile_branches(module, config.train)
    model = strategy.wrap_model(module, state.group, strategy.ParallelConfig("fsdp", shard_dtype=state.precision.dtype))
    return replace(state, model=model, optimizer=optimizer.build_optimizer(module, config.optimizer))


def dry_run(
    config: Config, state: TrainState, make_batch: MakeBatch, rows_per_rank: int, micro: int | None
) -> ProbeResult:
    """Call `probe_memory`; report a mismatch of model and objective as a UsageError."""

    def check_all_learn() -> None:
        weights = strategy.unwrap(state.model).named_parameters()
        unused = [name for name, weight in weights if weight.requires_grad and weight.grad is None]
        if unused:  # DDP would wait for their gradients forever
            raise UsageError(
                f"objective.kind `{config.objective.kind}` gives no gradient to {len(unused)} parameters of the model, "
                f"the first is {unused[0]}: use another objective, or freeze them with "
                f"--optimizer.freeze {' '.join(unused[:3])}"
            )

    try:
        return probe_memory(state, make_batch, rows_per_rank, micro, check_all_learn)
    except KeyError as error:
        raise UsageError(
            f"objective.kind: `{config.objective.kind}` reads `{error.args[0]}`, which a model of model.kind "
            f"`{config.model.kind}` with these settings does not return; use another objective or model"
        ) from error


def probe_memory(
    state: TrainState,
    make_batch: MakeBatch,
    rows_per_rank: int,
    micro: int | None,
    check: Callable[[], None] = lambda: None,
) -> ProbeResult:
    """Take one synthetic step in micro-batches of `micro` rows, or (None) of as many as fit on every rank.

    rows_per_rank: rows of a rank in a step. `check` is called while the step's gradients exist. Model and random number
    generators are unchanged afterwards. Raises OutOfMemoryError if `micro` rows, or one, do not fit; TrainingError if
    the model cannot process the rows at all.
    """
    group = state.group
    fake_group = FakeGroup(group.rank, group.world, group.device)
    fake_state = replace(state, group=fake_group, can_recover_oom=not strategy.has_inner_collectives(state.model))
    _allocate_optimizer(state.optimizer)
    ddp_buckets = group.world > 1 and not strategy.is_sharded(state.model)  # allocated before the forward
    attempt = partial(_try_step, fake_state, make_batch, rows_per_rank, ddp_buckets)
    fitting = _find_micro(group, attempt, rows_per_rank, micro, probe_together=not fake_state.can_recover_oom)
    saved_bytes = _try_step(fake_state, make_batch, rows_per_rank, False, fitting, fitting, check) or 0
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(group.device)  # the reported peak is that of training
    weights = list(state.model.parameters())
    moments = [value for values in state.optimizer.state.values() for value in values.values()]
    sizes = {  # of sharded tensors, this rank's shard; rank 0, whose table is logged, has the largest
        "parameters": sum(strategy.to_local(weight).nbytes for weight in weights),
        "gradients": sum(strategy.to_local(weight).nbytes for weight in weights if weight.requires_grad),
        "optimizer": sum(strategy.to_local(value).nbytes for value in moments if isinstance(value, Tensor)),
        "activations": saved_bytes,  # of two devices (`branches`), those of the first
    }
    return ProbeResult(fitting, {f"memory/{name}_gib": size / GIB for name, size in sizes.items()})


class FakeGroup(Group):
    """A group whose other ranks have the same tensors: memory and arithmetic of a step without communication."""

    def all_reduce_min(self, value: int) -> int:
        return value

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world)

    def all_gather(self, rows: Tensor) -> Tensor:
        return rows.repeat(self.world, *(1 for _ in rows.shape[1:]))

    def ring_shift(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def reduce_scatter(self, gradients: Tensor) -> Tensor:
        return gradients.view(self.world, -1, *gradients.shape[1:]).sum(0)


def _allocate_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer state as a first step does; AdamW at learning rate 0 leaves the weights unchanged."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _find_micro(
    group: Group, attempt: Callable[[int, int], int | None], rows_per_rank: int, micro: int | None, probe_together: bool
) -> int:
    """Rows of a micro-batch that fit on every rank: `micro`, or `rows_per_rank`, half of it, and so on.

    attempt: `_try_step` for rows in micro-batches. Each rank probes on its own, then all take the minimum. If a forward
    has collectives, they probe together, because the unsharded model need not fit on one device. Then a rank that runs
    out of memory leaves the others in a collective, and no vote can recover them: its error carries the previous size,
    with which the group restarts. Sizes ascend, so it restarts only once.
    """

    def bytes_if_fits(rows: int, size: int, smaller: int) -> int | None:
        saved = attempt(min(rows_per_rank, rows), size)
        if saved is None and probe_together:
            if smaller == 0:
                raise _does_not_fit(None)
            raise OutOfMemoryError(
                f"out of memory in the dry run with micro-batches of {size} rows (rank {group.rank}); restarting "
                f"with {smaller} rows",
                smaller,
            )
        return saved

    fitting = micro or 1
    saved = bytes_if_fits(1 if micro is None else 2 * micro, fitting, smaller_micro(fitting))
    if saved is not None and micro is None:
        limit = _host_limit(group, saved)
        limit = group.all_reduce_min(limit) if probe_together else limit
        sizes = [rows_per_rank]
        while sizes[-1] > 1:
            sizes.append(smaller_micro(sizes[-1]))
        for size in [size for size in reversed(sizes) if 1 < size <= limit]:
            if bytes_if_fits(2 * size, size, fitting) is None:
                break
            fitting = size
        # The outputs of all rows are in memory at once.
        while 0 < 2 * fitting < rows_per_rank and bytes_if_fits(rows_per_rank, fitting, smaller_micro(fitting)) is None:
            fitting = smaller_micro(fitting)
    fits_all = group.all_reduce_min(0 if saved is None else fitting)
    if fits_all == 0:
        raise _does_not_fit(micro, rows_per_rank if saved is not None else None)
    return fits_all


def _host_limit(group: Group, bytes_of_one_row: int) -> int:
    """Rows that fit in a host's free memory; no limit on a GPU, where an allocation fails in time.

    On a CPU the kernel kills the process instead.
    """
    if group.device.type == "cuda":
        return 2**31
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return max(1, int(HOST_FRACTION * free_memory() / ranks / max(1, bytes_of_one_row)))


def _does_not_fit(micro: int | None, output_rows: int | None = None) -> OutOfMemoryError:
    if output_rows is not None:
        message = f"one row fits, but not the outputs of the {output_rows} rows of a worker's share"
        return OutOfMemoryError(f"{message}: lower --batch.global or use more workers")
    if micro is None or micro == 1:
        return OutOfMemoryError(f"a single row does not fit in the memory of a worker's device: {OOM_ADVICE}")
    return OutOfMemoryError(f"a micro-batch of {micro} rows does not fit: lower --batch.micro, or set it to auto")


def _try_step(
    state: TrainState,
    make_batch: MakeBatch,
    rows_per_rank: int,
    ddp_buckets: bool,
    rows: int,
    micro: int,
    check: Callable[[], None] = lambda: None,
) -> int | None:
    """Bytes that autograd saves for the backward of a micro-batch; None if `rows` rows in micro-batches do not fit.

    rows_per_rank: rows of a step; a GPU holds those of two steps at once (prefetch.py).
    """
    sizes = [min(micro, rows - first) for first in range(0, rows, micro)]
    with strategy.preserve_buffers(state.model), _saved_bytes(state.model) as saved:
        try:
            for weight in state.model.parameters():
                weight.grad = torch.zeros_like(weight) if ddp_buckets and weight.requires_grad else None
            batch = make_local_batch([make_batch(size) for size in sizes])
            on_gpu = [column for column in batch.micro_batches[0].values() if column.device.type == "cuda"]
            prefetched = [column.new_empty(2 * rows_per_rank - rows, *column.shape[1:]) for column in on_gpu]
            accumulate_gradients(state, batch, lambda index: index)
            prefetched.clear()
            check()
            fits = True
        except RecoverableOom:
            fits = False
        except (RuntimeError, MemoryError, ValueError, IndexError, TypeError) as error:
            fits = False
            if not is_out_of_memory(error):
                raise TrainingError(
                    f"the dry run failed: the model cannot process a synthetic micro-batch of {micro} rows: {error}"
                ) from error
        finally:
            state.model.zero_grad(set_to_none=True)
    if state.group.device.type == "cuda":
        torch.cuda.empty_cache()
    return saved[0] // len(sizes) if fits else None


@contextmanager
def _saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Count the bytes of tensors that autograd saves in the scope, except weights, each storage once; a list of one."""
    weights, seen, total = strategy.parameter_storages(model), set(), [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen and address not in weights():
            seen.add(address)
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory on a CPU; return False if there is no mallopt.

    By default large tensors are unmapped when freed, and each step maps and clears their pages again. Measured on a
    ResNet-18 step: 14 % less CPU time (0.46 s instead of 0.54 s, mean of three pairs), 60 times fewer page faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    m_mmap_threshold, m_trim_threshold = -3, -1  # <malloc.h>
    return mallopt is not None and all(mallopt(option, 2**31 - 1) for option in (m_mmap_threshold, m_trim_threshold))
