"""How many rows fit: a rehearsal of the step before the first, and a table of what it holds.

worker.py rehearses with synthetic rows before the first step. The rehearsed step is step.py's own, in a group without
partners, so that each rank tries by itself; where the model's own forward holds collectives, all ranks try together.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from mmray.engine.batch import divisors, smaller
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import Stopwatch
from mmray.engine.oom import NoRoom
from mmray.engine.parallel import fsdp as sharding
from mmray.engine.parallel import wrap
from mmray.engine.parallel.branches import BRANCH_INPUTS
from mmray.engine.prefetch import Share, share_of
from mmray.engine.step import accumulate
from mmray.engine.train_state import Learner
from mmray.errors import OutOfMemoryError, TrainingError, is_out_of_memory
from mmray.machine import free_memory
from mmray.objectives.protocol import Batch

GIB = 2**30
HOST_SHARE = 0.8  # of the memory that is free on a host: what the ranks there may plan with
BatchOf = Callable[[int], Batch]  # rows -> a synthetic micro-batch on the training device


class Alone(Group):
    """A group in which every partner brings what this rank brings: the step's memory and arithmetic, no talk."""

    def smallest(self, value: int) -> int:
        return value

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.world)

    def gather(self, rows: Tensor) -> Tensor:
        return rows.repeat(self.world, *(1 for _ in rows.shape[1:]))

    def gather_plain(self, rows: Tensor) -> Tensor:
        return self.gather(rows.detach().to(self.device))

    def shift(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def gather_back(self, gradients: Tensor) -> Tensor:
        return gradients.view(self.world, -1, *gradients.shape[1:]).sum(0)


@dataclass(frozen=True)
class Rehearsed:
    """What the rehearsal found: rows of a micro-batch that fit on every rank, and this rank's memory, in GiB."""

    micro: int
    table: dict[str, float]


def rehearse(
    learner: Learner, batch_of: BatchOf, share: int, micro: int | None, check: Callable[[], None] = lambda: None
) -> Rehearsed:
    """One synthetic step in micro-batches of `micro` rows, or (None) of as many as fit on every rank.

    `check` is called where a step has left its gradients. The model (not yet wrapped, or a copy that is cut over the
    ranks) and the generators of random numbers come out as they went in. Raises OutOfMemoryError when `micro` rows, or
    one, do not fit, TrainingError when the model cannot take the rows at all.
    """
    alone = Alone(learner.group.rank, learner.group.world, learner.group.device)
    told = replace(learner, group=alone, may_vote=not wrap.has_inner_collectives(learner.model))
    _allocate(learner)
    agreed = (_each if told.may_vote else _together)(learner.group, told, batch_of, share, micro)
    saved = _try(told, batch_of, share, agreed, agreed, check=check) or 0
    if learner.group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(learner.group.device)  # the peak that is told is that of the training
    return Rehearsed(agreed, _table(learner, saved))


def _each(group: Group, told: Learner, batch_of: BatchOf, share: int, micro: int | None) -> int:
    """Rows that fit on every rank: each tries by itself what it likes, then they agree."""
    smallest = 1 if micro is None else micro
    held = group.world > 1  # DDP's buckets lie there all the time
    found = _try(told, batch_of, share, 1 if micro is None else min(share, 2 * micro), smallest, held)
    fits = found is not None
    if fits and micro is None:
        sizes = [size for size in divisors(share) if size <= _most_rows(group, found or 0)]
        # Memory grows with the rows, so that the sizes that fit come first.
        fitting = bisect_right(
            sizes, False, key=lambda size: size > 1 and _try(told, batch_of, share, share, size, held) is None
        )
        smallest = sizes[fitting - 1]
    agreed = group.smallest(smallest if fits else 0)
    if agreed == 0:
        raise _does_not_fit(micro)
    return agreed


def _together(group: Group, told: Learner, batch_of: BatchOf, share: int, micro: int | None) -> int:
    """Rows that fit where a forward holds collectives: all ranks try the same sizes in the same order, upwards.

    A rank that runs out of memory there leaves the others in a collective, and no vote can bring them back. Its error
    carries the size before, for which every rank had room, and the group begins again with that, as it does in mid-run;
    upwards, so that it does so once. Trying a whole model, each rank by itself, would not do: no device need hold it,
    and what the parts leave free shows only where it is cut.
    """
    least = 1 if micro is None else micro
    less = 0 if micro is None else smaller(micro, share)
    found = _fit_or_part(group, told, batch_of, share, min(share, 2 * least), least, less)
    if micro is not None:
        return micro
    most = group.smallest(_most_rows(group, found))
    sizes = [size for size in divisors(share) if size <= most]
    for less, size in pairwise(sizes):
        _fit_or_part(group, told, batch_of, share, min(share, 2 * size), size, less)
    if 2 * sizes[-1] < share:  # the outputs of all rows lie there at once
        _fit_or_part(group, told, batch_of, share, share, sizes[-1], smaller(sizes[-1], share))
    return sizes[-1]


def _fit_or_part(group: Group, told: Learner, batch_of: BatchOf, share: int, rows: int, micro: int, less: int) -> int:
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
    learner: Learner,
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
    with wrap.preserve_buffers(learner.model), _saved_bytes(learner.model) as saved:
        try:
            for weight in learner.model.parameters():
                weight.grad = torch.zeros_like(weight) if held and weight.requires_grad else None
            tried = _share(batch_of, rows, micro)
            beside = _beside(tried, 2 * share - rows)
            accumulate(learner, tried, lambda index: index)
            beside.clear()
            check()
            fits = True
        except NoRoom:
            fits = False
        except (RuntimeError, MemoryError, ValueError, IndexError, TypeError) as error:
            fits = False
            if not is_out_of_memory(error):
                said = f"one synthetic micro-batch of {micro} rows did not pass the model: {error}"
                raise TrainingError(said) from error
        finally:
            learner.model.zero_grad(set_to_none=True)
    if learner.group.device.type == "cuda":
        torch.cuda.empty_cache()
    return saved[0] // -(-rows // micro) if fits else None


def _share(batch_of: BatchOf, rows: int, micro: int) -> Share:
    sizes = [min(micro, rows - first) for first in range(0, rows, micro)]
    return share_of([batch_of(size) for size in sizes])


def _beside(tried: Share, rows: int) -> list[Tensor]:
    """On a GPU the room of further rows, which lie there while a step is taken."""
    columns = [column for column in tried.micros[0].values() if column.device.type == "cuda"]
    return [column.new_empty(rows, *column.shape[1:]) for column in columns]


def _allocate(learner: Learner) -> None:
    """Optimizer state as after a first step, the weights unchanged: at learning rate 0 AdamW does nothing else."""
    optimizer = learner.optimizer
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


def _table(learner: Learner, saved_bytes: int) -> dict[str, float]:
    """GiB of weights, gradients, optimizer state, and what one micro-batch saves for its backward.

    Of what is cut, this rank's part; rank 0, whose table is logged, has the largest.
    """
    weights = list(learner.model.parameters())
    states = [value for state in learner.optimizer.state.values() for value in state.values()]
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
        watch = Stopwatch(batch["valid"].device)
        with torch.no_grad(), wrap.preserve_buffers(module):
            for _ in range(2):
                watch.take_s()
                with watch.running():
                    branch(*(batch[column] for column in BRANCH_INPUTS[name]))
        took_s[name] = watch.take_s()
    return max(took_s, key=lambda name: took_s[name])


def _does_not_fit(micro: int | None) -> OutOfMemoryError:
    if micro is None or micro == 1:
        return OutOfMemoryError(f"a single row does not fit into the memory of a worker's device: {ADVICE}")
    return OutOfMemoryError(f"a micro-batch of {micro} rows does not fit: lower --batch.micro, or set it to auto")


ADVICE = (
    "lower --model.inputs.image-side or --model.inputs.max-tokens, try --train.precision bf16 or --train.parallel "
    "fsdp, or take a smaller model or a larger GPU"
)
