"""GradCache: the loss over the rows of all micro-batches and ranks, and its gradient at each output.

Runs between the two passes of a step (step.py). Outputs are gathered to every rank in one collective. For a loss
that is a sum over pairs (sigmoid) they rotate around a ring of ranks instead, so that memory does not grow with it.
Source: Gao et al. 2021 (arXiv:2101.06983), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.oom import OomGuard
from mmray.engine.prefetch import LocalBatch
from mmray.engine.run_state import TrainState
from mmray.objectives.protocol import Batch, HardNegativeMining, Objective, ObjectiveParts, Outputs, Pairwise

Factors = tuple[Tensor, Tensor]  # of the global loss and of the local one


class LossMeter:
    """Sums over micro-batches, each a vector [K]: the counts of the global loss first, then those of the local one."""

    def __init__(self, num_global: int, num_local: int) -> None:
        self._sizes = num_global, num_local
        self.sums: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor], local_loss: bool) -> None:
        padding = (self._sizes[0], 0) if local_loss else (0, self._sizes[1])
        for name, value in sums.items():
            padded = value.detach().reshape(-1)
            if any(padding):
                padded = F.pad(padded, padding)
            self.sums[name] = self.sums[name] + padded if name in self.sums else padded


@dataclass
class GradCache:
    """Inputs of the second pass of a step; with a purely local loss nothing is cached and there is no first pass."""

    totals: Tensor  # float64 [K + 1], sums over ranks of the objective's counts and of the stop requests
    micro_batches: list[Batch]  # with the columns of their hard negatives
    factors: Factors
    gradients: list[Outputs] = field(default_factory=list)  # of each micro-batch: at its outputs, times the factor
    sums: LossMeter = field(init=False)

    def __post_init__(self) -> None:
        self.sums = LossMeter(len(self.factors[0]), len(self.factors[1]))

    def roots(self, parts: ObjectiveParts, outputs: Outputs, index: int) -> list[tuple[Tensor, Tensor | None]]:
        """Outputs of micro-batch `index` with their cached gradients, except those of frozen branches.

        Scalar outputs such as the temperature take their gradient once, in the last micro-batch.
        """
        if parts.global_loss is None:
            return []
        is_last = index == len(self.micro_batches) - 1
        names = parts.global_loss.gathered_outputs + (parts.global_loss.scalar_outputs if is_last else ())
        gradients = self.gradients[index]
        return [(outputs[name], gradients[name]) for name in names if outputs[name].requires_grad]


def loss_factors(state: TrainState, parts: ObjectiveParts, batch: LocalBatch, totals: Tensor) -> Factors:
    """Factors from a rank's loss sums to its part of the mean over all ranks, including the loss scale.

    They include the world size because DDP averages gradients.
    """
    factors = state.group.world / totals[:-1].clamp(min=1)
    num_global = 0 if parts.global_loss is None else parts.global_loss.count(batch.micro_batches[0]).numel()
    scaled = state.scaler.scale(factors)
    return scaled[:num_global], scaled[num_global:]


def build_grad_cache(
    state: TrainState,
    parts: ObjectiveParts,
    batch: LocalBatch,
    embedded: list[Outputs],
    counts: Tensor,
    guard: OomGuard,
) -> GradCache:
    """Gather the outputs, sample hard negatives, and compute the gradient of the global loss at each output.

    After an OOM there are no gradients, but this rank still takes part in the collectives, because others wait in them.
    """
    group, objective = state.group, parts.global_loss
    with state.timers("sync"):
        gathered = (
            GatheredOutputs(group.all_reduce_sum(counts))
            if uses_ring(parts)
            else gather_outputs(group, embedded, batch, counts, gathered_output_names(parts))
        )
    factors = loss_factors(state, parts, batch, gathered.totals)
    cache = GradCache(gathered.totals, batch.micro_batches, factors)
    if (mining := parts.mining) is not None:
        with state.timers("sync"):
            inputs = gather_negative_inputs(group, mining, batch)
        cache.micro_batches = guard.run(lambda: attach_negatives(mining, batch, embedded, gathered, inputs))
    if objective is None:
        return cache
    gradients_of_others: Outputs = {}
    if uses_ring(parts) and isinstance(objective, Pairwise):
        leaves = _leaves(objective, embedded)
        valid = torch.cat([micro["valid"] for micro in batch.micro_batches])
        loss_sum, metrics, own = ring_loss(objective, leaves, valid, batch.rows, factors[0], guard)
        loss = GlobalLoss(loss_sum, metrics, own, None)
    else:
        loss = guard.run(lambda: _global_loss(state, objective, batch, embedded, gathered, factors[0]))
        with state.timers("sync"):
            packed = gathered.gradient_or_zeros(None if loss is None else loss.gathered_gradients)
            gradients_of_others = gathered.unpack(group.reduce_scatter(packed))
    cache.gradients = guard.run(lambda: _split_gradients(batch, objective, loss, gradients_of_others))
    if cache.gradients:
        cache.sums.add({"loss": loss.loss_sum, **loss.metrics}, local_loss=False)
    return cache


def gathered_output_names(parts: ObjectiveParts) -> tuple[str, ...]:
    """Outputs that are needed from all ranks."""
    gathered_outputs = () if parts.global_loss is None else parts.global_loss.gathered_outputs
    return tuple(dict.fromkeys(gathered_outputs + (() if parts.mining is None else parts.mining.score_outputs)))


def uses_ring(parts: ObjectiveParts) -> bool:
    """Return whether outputs are sent around the ring instead of gathered."""
    return isinstance(parts.global_loss, Pairwise) and parts.mining is None


@dataclass(frozen=True)
class GlobalLoss:
    """The loss of this rank's rows over the global batch, and its gradients."""

    loss_sum: Tensor
    metrics: dict[str, Tensor]  # further sums to log
    gradients: Outputs  # at this rank's outputs, all micro-batches concatenated, and at the scalar outputs
    gathered_gradients: Tensor | None  # at the gathered outputs of all ranks, packed


def _leaves(objective: Objective, embedded: list[Outputs]) -> Outputs:
    """Outputs of all micro-batches concatenated, requiring gradients."""
    leaves = {name: torch.cat([outputs[name].detach() for outputs in embedded]) for name in objective.gathered_outputs}
    leaves |= {name: embedded[0][name].clone() for name in objective.scalar_outputs}
    for leaf in leaves.values():
        leaf.requires_grad_()
    return leaves


def _global_loss(
    state: TrainState,
    objective: Objective,
    batch: LocalBatch,
    embedded: list[Outputs],
    gathered: GatheredOutputs,
    factor: Tensor,
) -> GlobalLoss:
    """The loss of this rank's rows against the rows of all ranks, and its gradients at both."""
    leaves = _leaves(objective, embedded)
    names = [name for name, tensor in batch.micro_batches[0].items() if tensor.ndim == 1]  # one value a row
    row_values = {name: torch.cat([micro[name] for micro in batch.micro_batches]) for name in names}
    with state.timers("forward"):
        loss_sum, _, metrics = objective.compute_loss(leaves, row_values, gathered.columns)
        loss = (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
    inputs = [*leaves.values(), *([] if gathered.packed is None else [gathered.packed])]
    with state.timers("backward"):
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    own = dict(zip(leaves, gradients, strict=False))
    return GlobalLoss(loss_sum.detach(), metrics, own, None if gathered.packed is None else gradients[-1])


def _split_gradients(
    batch: LocalBatch, objective: Objective, loss: GlobalLoss, gradients_of_others: Outputs
) -> list[Outputs]:
    """Gradients at the outputs of each micro-batch, from this rank's loss and from the other ranks' losses."""
    sizes = [len(micro["valid"]) for micro in batch.micro_batches]
    sliced = {}
    for name in objective.gathered_outputs:
        gradient = loss.gradients[name]
        sliced[name] = (gradient + gradients_of_others[name] if gradients_of_others else gradient).split(sizes)
    scalars = {name: loss.gradients[name] for name in objective.scalar_outputs}
    return [scalars | {name: sliced[name][index] for name in sliced} for index in range(len(sizes))]


# --- outputs of all ranks in one collective


@dataclass(frozen=True)
class GatheredOutputs:
    """Outputs of all ranks. In a group of one, `packed` and `columns` are None: the batch has all rows."""

    totals: Tensor  # float64 [K + 1], sum of the ranks' counts
    packed: Tensor | None = None  # [world x (1 + rows), width], a leaf that requires gradients
    columns: dict[str, Any] | None = None  # the argument `gathered` of Objective.compute_loss, views of `packed`
    shapes: dict[str, torch.Size] | None = None  # of this rank's outputs, in the order of `packed`

    def gradient_or_zeros(self, gradient: Tensor | None) -> Tensor:
        """Return the gradient of `packed`; zeros after an OOM, because other ranks wait for the reduce-scatter."""
        if self.packed is None:
            return self.totals
        return torch.zeros_like(self.packed) if gradient is None else gradient

    def unpack(self, gradient: Tensor) -> Outputs:
        """Gradients of this rank's outputs from its part [1 + rows, width]; empty in a group of one."""
        if self.shapes is None:
            return {}
        widths = [prod(shape[1:]) for shape in self.shapes.values()]
        parts = gradient[1:, : sum(widths)].split(widths, dim=1)
        return {
            name: part[: shape[0]].reshape(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def gather_outputs(
    group: Group, embedded: list[Outputs], batch: LocalBatch, counts: Tensor, names: tuple[str, ...]
) -> GatheredOutputs:
    """Outputs of all ranks, padded to `batch.rows` a rank, and the sum of `counts`, in one collective.

    They are packed next to `valid`, in float32 at least, so that sums over ranks do not round to bfloat16. `counts` is
    the first row, because on slow links the number of collectives matters more than their size.
    """
    if group.world == 1:
        return GatheredOutputs(counts)
    outputs = {name: torch.cat([part[name] for part in embedded]) for name in names}
    columns = [output.flatten(1) for output in outputs.values()]
    dtype = torch.promote_types(torch.float32, columns[0].dtype)
    valid = torch.cat([micro["valid"] for micro in batch.micro_batches])
    rows = torch.cat([*(column.to(dtype) for column in columns), valid.to(dtype)[:, None]], dim=1)
    rows = F.pad(rows, (0, max(0, len(counts) - rows.shape[1])))  # a sum of many objectives has many counts
    header = F.pad(counts.to(dtype), (0, rows.shape[1] - len(counts)))[None]
    local = torch.cat([header, F.pad(rows, (0, 0, 0, batch.rows - len(rows)))])
    packed = group.all_gather(local).requires_grad_()
    by_rank = packed.view(group.world, batch.rows + 1, -1)
    totals = by_rank[:, 0, : len(counts)].detach().double().sum(0)
    widths = [column.shape[1] for column in columns]
    *parts, flags, _ = by_rank[:, 1:].flatten(0, 1).split([*widths, 1, rows.shape[1] - sum(widths) - 1], dim=1)
    gathered: dict[str, Any] = {
        name: part.reshape(-1, *output.shape[1:]) for (name, output), part in zip(outputs.items(), parts, strict=True)
    }
    gathered |= {"valid": flags[:, 0].detach() > 0, "offset": group.rank * batch.rows}
    return GatheredOutputs(totals, packed, gathered, {name: output.shape for name, output in outputs.items()})


# --- ring loss: outputs rotate from rank to rank, with their gradients (Zhai et al. 2023, SigLIP, section 3.3)


def ring_loss(
    objective: Pairwise, leaves: Outputs, valid: Tensor, rows: int, factor: Tensor, guard: OomGuard
) -> tuple[Tensor, dict[str, Tensor], Outputs]:
    """This rank's loss sum, further sums, and the gradient of (all ranks' losses x factor) at its own outputs.

    leaves: outputs of this rank's rows that require gradients. rows: equal on every rank, at least this rank's number.
    Memory: this rank's rows, those of one other rank, and `chunk` columns of scores, for any number of ranks. After an
    OOM this rank forwards the rotating rows unchanged until all ranks vote; its results are then unusable.
    """
    local = {name: leaf for name, leaf in leaves.items() if name not in objective.rotating_outputs}
    gradients = {name: torch.zeros_like(leaf) for name, leaf in local.items()}
    sums = {"loss": factor.new_zeros(())}
    rotating = _pack({name: leaves[name].detach() for name in objective.rotating_outputs}, valid, rows)

    def accumulate(rotating: Tensor, own: bool) -> None:
        for first in range(0, rows, objective.chunk):
            chunk = slice(first, min(first + objective.chunk, rows))
            outputs, flags = _unpack(rotating[chunk], leaves, objective.rotating_outputs)
            loss_sum, metrics = objective.pairwise_loss(local, valid, outputs, flags, first if own else None)
            inputs = {**local, **outputs}
            flat = torch.autograd.grad(loss_sum * factor.to(loss_sum.dtype), list(inputs.values()))
            rotating_gradients = _gradient_views(rotating[chunk], leaves, objective.rotating_outputs)
            for name, gradient in zip(inputs, flat, strict=True):
                (gradients if name in local else rotating_gradients)[name].add_(gradient)
            for name, value in {"loss": loss_sum.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value

    for hop in range(guard.group.world):
        guard.run(partial(accumulate, rotating, own=hop == 0))
        rotating = guard.group.ring_shift(rotating)
    returned = _gradient_views(rotating, leaves, objective.rotating_outputs)
    loss = sums.pop("loss")
    return loss, sums, gradients | {name: returned[name][: len(valid)] for name in objective.rotating_outputs}


def _pack(outputs: Outputs, valid: Tensor, rows: int) -> Tensor:
    """Rows, the gradients accumulated so far, and `valid`: [rows, 2 x width + 1], one message a hop."""
    values = torch.cat([output.flatten(1) for output in outputs.values()], dim=1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    packed = torch.cat([values, torch.zeros_like(values), valid.to(values.dtype)[:, None]], dim=1)
    return F.pad(packed, (0, 0, 0, rows - len(packed)))


def _unpack(rotating: Tensor, like: Outputs, names: tuple[str, ...]) -> tuple[Outputs, Tensor]:
    """The rotating outputs as new leaves, and their `valid`."""
    width = (rotating.shape[1] - 1) // 2
    outputs = _split_columns(rotating[:, :width], like, names)
    return {name: output.clone().requires_grad_() for name, output in outputs.items()}, rotating[:, -1] > 0


def _gradient_views(rotating: Tensor, like: Outputs, names: tuple[str, ...]) -> Outputs:
    width = (rotating.shape[1] - 1) // 2
    return _split_columns(rotating[:, width : 2 * width], like, names)


def _split_columns(columns: Tensor, like: Outputs, names: tuple[str, ...]) -> Outputs:
    parts = columns.split([like[name][0].numel() for name in names], dim=1)
    return {name: part.view(-1, *like[name].shape[1:]) for name, part in zip(names, parts, strict=True)}


# --- hard negatives: token ids and positions of all ranks, never pixels


@torch.no_grad()
def attach_negatives(
    mining: HardNegativeMining, batch: LocalBatch, embedded: list[Outputs], gathered: GatheredOutputs, inputs: Batch
) -> list[Batch]:
    """The micro-batches with the columns that `mining` samples for their rows."""
    if gathered.columns is None:
        known = {name: torch.cat([outputs[name] for outputs in embedded]) for name in mining.score_outputs}
        known |= {**inputs, "valid": torch.cat([micro["valid"] for micro in batch.micro_batches])}
        offset = 0
    else:
        known = {**{name: gathered.columns[name].detach() for name in mining.score_outputs}, **inputs}
        known |= {"valid": gathered.columns["valid"]}
        offset = gathered.columns["offset"]
    micro_batches = []
    for micro, outputs in zip(batch.micro_batches, embedded, strict=True):
        micro_batches.append(micro | mining.sample_hard_negatives(outputs, micro, {**known, "offset": offset}))
        offset += len(micro["valid"])
    return micro_batches


def gather_negative_inputs(group: Group, mining: HardNegativeMining, batch: LocalBatch) -> Batch:
    """Input columns of all ranks from which negatives are taken, padded to `batch.rows` a rank, in one collective.

    They are integers, packed next to each other, each as wide as the widest of any rank.
    """
    columns = {name: _concatenate([micro[name] for micro in batch.micro_batches]) for name in mining.gathered_inputs}
    if group.world == 1:
        return columns
    widest = -group.all_reduce_min(-max(column[0].numel() for column in columns.values()))
    padded = [_pad(column, batch.rows, widest) for column in columns.values()]
    packed = torch.cat([column.long().reshape(batch.rows, -1) for column in padded], dim=1)
    gathered = group.all_gather(packed).split([column[0].numel() for column in padded], dim=1)
    return {
        name: part.reshape(-1, *column.shape[1:]).to(column.dtype)
        for name, column, part in zip(columns, padded, gathered, strict=True)
    }


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Rows of all micro-batches, padded with zeros to the widest, because captions are trimmed by micro-batch."""
    widest = max(part[0].numel() for part in parts)
    return torch.cat([_pad(part, len(part), widest) for part in parts])


def _pad(column: Tensor, rows: int, width: int) -> Tensor:
    """[B] or [B, T] -> [rows, ...], padded with zeros."""
    if column.ndim == 1:
        return F.pad(column, (0, rows - len(column)))
    return F.pad(column, (0, width - column.shape[1], 0, rows - len(column)))
