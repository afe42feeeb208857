"""How many rows fit: a rehearsal of the step before the first, and a table of what it holds.

worker.py rehearses with synthetic rows before the first step. The rehearsed step is step.py's own, in a group without
partners, so that each rank tries by itself; where the model's own forward holds collectives, all ranks try together.
"""

from __future__ import annotations

import copy
import gc
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.data.stream.order import SamplePlan
from mmray.engine import optimizer, precision
from mmray.engine.batch import divisors, smaller_micro
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import DeviceTimer, PhaseTimers
from mmray.engine.oom import ADVICE, RecoverableOom
from mmray.engine.parallel import fsdp as sharding
from mmray.engine.parallel import wrap
from mmray.engine.parallel import wrap as parallel
from mmray.engine.parallel.branches import BRANCH_INPUTS
from mmray.engine.parallel.transforms import compile_branches
from mmray.engine.prefetch import LocalBatch, make_local_batch
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


HOST_SHARE = 0.8  # of the memory that is free on a host: what the ranks there may plan with


BatchOf = Callable[[int], Batch]  # rows -> a synthetic micro-batch on the training device


class FakeGroup(Group):
    """A group in which every partner brings what this rank brings: the step's memory and arithmetic, no talk."""

    def all_reduce_min(self, value: int) -> int:
        return value

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world)

    def all_gather(self, rows: Tensor) -> Tensor:
        return rows.repeat(self.world, *(1 for _ in rows.shape[1:]))

    def all_gather_variable(self, rows: Tensor) -> Tensor:
        return self.all_gather(rows.detach().to(self.device))

    def ring_shift(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def reduce_scatter(self, gradients: Tensor) -> Tensor:
        return gradients.view(self.world, -1, *gradients.shape[1:]).sum(0)


@dataclass(frozen=True)
class ProbeResult:
    """What the rehearsal found: rows of a micro-batch that fit on every rank, and this rank's memory, in GiB."""

    micro: int
    table: dict[str, float]


def probe_memory(
    state: TrainState, batch_of: BatchOf, share: int, micro: int | None, check: Callable[[], None] = lambda: None
) -> ProbeResult:
    """One synthetic step in micro-batches of `micro` rows, or (None) of as many as fit on every rank.

    `check` is called where a step has left its gradients. The model (not yet wrapped, or a copy that is cut over the
    ranks) and the generators of random numbers come out as they went in. Raises OutOfMemoryError when `micro` rows, or
    one, do not fit, TrainingError when the model cannot take the rows at all.
    """
    alone = FakeGroup(state.group.rank, state.group.world, state.group.device)
    told = replace(state, group=alone, can_recover_oom=not wrap.has_inner_collectives(state.model))
    _allocate(state)
    agreed = (_each if told.can_recover_oom else _together)(state.group, told, batch_of, share, micro)
    saved = _try(told, batch_of, share, agreed, agreed, check=check) or 0
    if state.group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.group.device)  # the peak that is told is that of the training
    return ProbeResult(agreed, _table(state, saved))


def _each(group: Group, told: TrainState, batch_of: BatchOf, share: int, micro: int | None) -> int:
    """Rows that fit on every rank: each tries by itself what it likes, then they agree."""
    all_reduce_min = 1 if micro is None else micro
    held = group.world > 1  # DDP's buckets lie there all the time
    found = _try(told, batch_of, share, 1 if micro is None else min(share, 2 * micro), all_reduce_min, held)
    fits = found is not None
    if fits and micro is None:
        sizes = [size for size in divisors(share) if size <= _most_rows(group, found or 0)]
        # Memory grows with the rows, so that the sizes that fit come first.
        fitting = bisect_right(
            sizes, False, key=lambda size: size > 1 and _try(told, batch_of, share, share, size, held) is None
        )
        all_reduce_min = sizes[fitting - 1]
    agreed = group.all_reduce_min(all_reduce_min if fits else 0)
    if agreed == 0:
        raise _does_not_fit(micro)
    return agreed


def _together(group: Group, told: TrainState, batch_of: BatchOf, share: int, micro: int | None) -> int:
    """Rows that fit where a forward holds collectives: all ranks try the same sizes in the same order, upwards.

    A rank that runs out of memory there leaves the others in a collective, and no vote can bring them back. Its error
    carries the size before, for which every rank had room, and the group begins again with that, as it does in mid-run;
    upwards, so that it does so once. Trying a whole model, each rank by itself, would not do: no device need hold it,
    and what the parts leave free shows only where it is cut.
    """
    least = 1 if micro is None else micro
    less = 0 if micro is None else smaller_micro(micro, share)
    found = _fit_or_part(group, told, batch_of, share, min(share, 2 * least), least, less)
    if micro is not None:
        return micro
    most = group.all_reduce_min(_most_rows(group, found))
    sizes = [size for size in divisors(share) if size <= most]
    for less, size in pairwise(sizes):
        _fit_or_part(group, told, batch_of, share, min(share, 2 * size), size, less)
    if 2 * sizes[-1] < share:  # the outputs of all rows lie there at once
        _fit_or_part(group, told, batch_of, share, share, sizes[-1], smaller_micro(sizes[-1], share))
    return sizes[-1]


def _fit_or_part(
    group: Group, told: TrainState, batch_of: BatchOf, share: int, rows: int, micro: int, less: int
) -> int:
    """What `_try` finds; where there is no room, the error with which the group begins again in `less` rows."""
    held = group.world > 1 and not sharding.is_sharded(told.model)  # DDP's buckets
    found = _try(told, batch_of, share, rows, micro, held)
    if found is not None:
        return found
    if less == 0:
        raise _does_not_fit(None)
    raise OutOfMemoryError(
        f"no room for a synthetic step in micro-batches of {micro} rows (rank {group.rank}). Now {less} at a time", less
    )


def _try(
    state: TrainState,
    batch_of: BatchOf,
    share: int,
    rows: int,
    micro: int,
    held: bool = False,
    check: Callable[[], None] = lambda: None,
) -> int | None:
    """Bytes that the backward of a step needs saved at once; None when `rows` rows in micro-batches do not fit.

    share: rows of a step, of which a GPU holds two steps' at once (feed.py). held: gradients take their room before the
    forward.
    """
    with wrap.preserve_buffers(state.model), _saved_bytes(state.model) as saved:
        try:
            for weight in state.model.parameters():
                weight.grad = torch.zeros_like(weight) if held and weight.requires_grad else None
            tried = _share(batch_of, rows, micro)
            beside = _beside(tried, 2 * share - rows)
            accumulate_gradients(state, tried, lambda index: index)
            beside.clear()
            check()
            fits = True
        except RecoverableOom:
            fits = False
        except (RuntimeError, MemoryError, ValueError, IndexError, TypeError) as error:
            fits = False
            if not is_out_of_memory(error):
                said = f"one synthetic micro-batch of {micro} rows did not pass the model: {error}"
                raise TrainingError(said) from error
        finally:
            state.model.zero_grad(set_to_none=True)
    if state.group.device.type == "cuda":
        torch.cuda.empty_cache()
    return saved[0] // -(-rows // micro) if fits else None


def _share(batch_of: BatchOf, rows: int, micro: int) -> LocalBatch:
    sizes = [min(micro, rows - first) for first in range(0, rows, micro)]
    return make_local_batch([batch_of(size) for size in sizes])


def _beside(tried: LocalBatch, rows: int) -> list[Tensor]:
    """On a GPU the room of further rows, which lie there while a step is taken."""
    columns = [column for column in tried.micro_batches[0].values() if column.device.type == "cuda"]
    return [column.new_empty(rows, *column.shape[1:]) for column in columns]


def _allocate(state: TrainState) -> None:
    """Optimizer state as after a first step, the weights unchanged: at learning rate 0 AdamW does nothing else."""
    optimizer = state.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Counts the bytes of tensors that autograd saves inside, weights apart, each storage once; in a list of one."""
    weights, seen, total = sharding.parameter_storages(model), set(), [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen and address not in weights():
            seen.add(address)
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def _most_rows(group: Group, bytes_of_one_row: int) -> int:
    """Rows that a host's free memory bears; a GPU says by itself what it bears.

    On a CPU nothing raises in time: the kernel ends the process instead.
    """
    if group.device.type == "cuda":
        return 2**31
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return max(1, int(HOST_SHARE * free_memory() / ranks / max(1, bytes_of_one_row)))


def _table(state: TrainState, saved_bytes: int) -> dict[str, float]:
    """GiB of weights, gradients, optimizer state, and what one micro-batch saves for its backward.

    Of what is cut, this rank's part; rank 0, whose table is logged, has the largest.
    """
    weights = list(state.model.parameters())
    states = [value for state in state.optimizer.state.values() for value in state.values()]
    held = {
        "parameters": sum(sharding.to_local(weight).nbytes for weight in weights),
        "gradients": sum(sharding.to_local(weight).nbytes for weight in weights if weight.requires_grad),
        "optimizer": sum(sharding.to_local(value).nbytes for value in states if isinstance(value, Tensor)),
        "activations": saved_bytes,
    }
    return {f"memory/{name}_gib": size / GIB for name, size in held.items()}


def slower_branch(module: nn.Module, batch: Batch) -> str:
    """The branch whose forward of a batch takes longer, by the clock, after one to warm up."""
    took_s = {}
    for name, branch in module.branches().items():  # type: ignore[operator]
        watch = DeviceTimer(batch["valid"].device)
        with torch.no_grad(), wrap.preserve_buffers(module):
            for _ in range(2):
                watch.pop_s()
                with watch.running():
                    branch(*(batch[column] for column in BRANCH_INPUTS[name]))
        took_s[name] = watch.pop_s()
    return max(took_s, key=lambda name: took_s[name])


def _does_not_fit(micro: int | None) -> OutOfMemoryError:
    if micro is None or micro == 1:
        return OutOfMemoryError(f"a single row does not fit into the memory of a worker's device: {ADVICE}")
    return OutOfMemoryError(f"a micro-batch of {micro} rows does not fit: lower --batch.micro, or set it to auto")


def make_probe_state(config: Config, model: nn.Module, objective: Any, group: Group) -> TrainState:
    """What takes the synthetic step: with an optimizer of its own, which goes with it."""
    chosen, timers = precision.select_precision(config.train.precision, group.device), PhaseTimers(group.device)
    apart = optimizer.build_optimizer(model, config.optimizer)
    return TrainState(model, objective, group, chosen, apart, chosen.scaler(), {}, timers)


def dry_run_job(job: WorkerContext, state: TrainState, plan: SamplePlan) -> ProbeResult:
    """A synthetic step, so that mistakes of shape and memory show before the first; the rows that fit."""
    micro = min(plan.micro, plan.rank_rows, job.micro or plan.rank_rows)
    auto = job.config.batch.micro == "auto" and not job.micro
    batch_of = synthetic_batches(job.config, state.group.device)
    cut = job.config.train.parallel == "fsdp"
    if cut:
        state = _cut(job.config, state)
    # The averaged weights will be in memory too.
    copies = bool(job.config.train.ema)
    beside = [weight.detach().clone() for _ in range(copies) for weight in state.model.parameters()]
    try:
        return dry_run(job.config, state, batch_of, plan.rank_rows, None if auto else micro)
    finally:
        beside.clear()
        if cut:
            del state
            gc.collect()  # what cuts a module refers to it, and is referred to: it would stay for a while
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def _cut(config: Config, state: TrainState) -> TrainState:
    """What takes the step with a copy of the model that is cut over the ranks, as it will be; it goes with the step.

    A copy, since state that is whole can only be loaded into weights that are. Raises UsageError for a model of the
    user's own that cannot be copied.
    """
    try:
        whole = copy.deepcopy(state.model)
    except (TypeError, RuntimeError) as error:  # it holds a lock or a file, or weights that are computed
        raise UsageError(
            "train.parallel fsdp tries a copy of the model before the first step, and model.kind "
            f"`{config.model.kind}` cannot be copied ({error}): give it a __deepcopy__, or take another strategy"
        ) from error
    module = compile_branches(whole, config.train)
    layout = parallel.ParallelConfig.of(config.train, state.precision.dtype, (), "")
    model = parallel.wrap(module, state.group, layout)
    return replace(state, model=model, optimizer=optimizer.build_optimizer(module, config.optimizer))


def dry_run(
    config: Config,
    state: TrainState,
    batch_of: Callable[[int], dict[str, torch.Tensor]],
    share: int,
    micro: int | None,
) -> ProbeResult:
    """`memory.rehearse`, with its objections to what model and objective have to do with each other in words."""
    try:
        return probe_memory(state, batch_of, share, micro, partial(_check_all_learn, state.model, config))
    except KeyError as error:
        raise UsageError(
            f"objective.kind: `{config.objective.kind}` reads `{error.args[0]}`, which a model of model.kind "
            f"`{config.model.kind}` with these settings does not give; choose another objective or model"
        ) from error


def synthetic_batches(config: Config, device: torch.device) -> Callable[[int], dict[str, torch.Tensor]]:
    spec = config.model
    return lambda rows: synthetic_batch(spec.inputs, spec.vocab_size, rows, device)


def _check_all_learn(model: nn.Module, config: Config) -> None:
    """Raise UsageError where a weight gets no gradient: DDP would wait for it for ever, and it is hardly meant so."""
    silent = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    if silent:
        raise UsageError(
            f"objective.kind `{config.objective.kind}` gives {len(silent)} weights of the model no gradient, the first "
            f"is {silent[0]}: choose another objective, or leave them as they are with "
            f"--optimizer.freeze {' '.join(silent[:3])}"
        )
