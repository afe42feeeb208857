"""GradCache (Gao et al. 2021, arXiv:2101.06983): the loss over the rows of all micro-batches and
ranks.

Its gradient at each output is computed between the two passes of a step (step.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.oom import OomGuard
from mmray.engine.parallel import strategy
from mmray.engine.prefetch import LocalBatch
from mmray.engine.run_state import TrainState
from mmray.objectives.protocol import (
    Batch,
    HardNegativeMining,
    Objective,
    ObjectiveParts,
    Outputs,
    PairwiseLoss,
)


@dataclass
class GradCache:
    """Inputs of the second pass of a step; with a purely local loss nothing is cached and there is
    no first pass.
    """

    loss_counts: Tensor  # float64 [K], sums over ranks of the objective's counts, at least 1
    num_stop_requests: Tensor  # float64 [1], how many ranks request a stop
    micro_batches: list[Batch]  # with the columns of their hard negatives
    loss_weights: tuple[Tensor, Tensor]  # of the global loss and of the local one
    # of each micro-batch: at its outputs, weighted
    gradients: list[Outputs] = field(default_factory=list)
    # [K] each: the counts of the global loss come first
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, sums: dict[str, Tensor], local_loss: bool) -> None:
        """Add the sums of a micro-batch."""
        padding = (len(self.loss_weights[0]), 0) if local_loss else (0, len(self.loss_weights[1]))
        for name, value in sums.items():
            padded = value.detach().reshape(-1)
            if any(padding):
                padded = F.pad(padded, padding)
            self.sums[name] = self.sums[name] + padded if name in self.sums else padded

    def backward_inputs(
        self, objective: Objective | None, outputs: Outputs, index: int
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Outputs of micro-batch `index` with their cached gradients, except those of frozen
        branches.

        Scalar outputs such as the temperature take their gradient once, in the last micro-batch.
        """
        if objective is None:
            return []
        is_last = index == len(self.micro_batches) - 1
        names = objective.gathered_outputs + (objective.scalar_output_names if is_last else ())
        return [
            (outputs[name], self.gradients[index][name])
            for name in names
            if outputs[name].requires_grad
        ]


def build_grad_cache(
    state: TrainState, batch: LocalBatch, detached: list[Outputs], stop: bool, guard: OomGuard
) -> GradCache:
    """Gather the outputs, sample hard negatives, and compute the gradient of the global loss at
    each output.

    detached: outputs of the first pass; empty if there is only a local loss (then only counts are
    reduced). stop: this rank's request, reduced with the counts. After an OOM there are no
    gradients, but this rank still takes part in the collectives, because others wait in them.
    """
    group, parts = state.group, state.parts
    objective, mining, pairwise = parts.global_loss, parts.mining_loss, parts.pairwise_loss
    num_global, counts = _local_counts(parts, batch.micro_batches, stop)
    with state.timers("sync"):
        if detached and pairwise is None:
            gathered = gather_outputs(group, detached, batch, counts, parts.gathered_names)
        else:
            gathered = GatheredOutputs(group.all_reduce_sum(counts))
    loss_counts, num_stop_requests = gathered.counts[:-1].clamp(min=1), gathered.counts[-1:]
    # loss_sum * weight = this rank's part of the global mean, times world size, because DDP
    # averages over ranks.
    weights = state.scaler.scale(group.world_size / loss_counts)
    cache = GradCache(
        loss_counts,
        num_stop_requests,
        batch.micro_batches,
        (weights[:num_global], weights[num_global:]),
    )
    if mining is not None:
        with state.timers("sync"):
            inputs = gather_negative_inputs(group, mining, batch)
        cache.micro_batches = guard.run(
            lambda: attach_negatives(mining, batch, detached, gathered.columns, inputs)
        )
    if objective is None:
        return cache
    remote_gradients: Outputs = {}
    if pairwise is not None:
        valid, leaves = (
            torch.cat([rows["valid"] for rows in batch.micro_batches]),
            _leaves(objective, detached),
        )
        loss = compute_pairwise_loss(
            pairwise, leaves, valid, batch.rows, cache.loss_weights[0], guard
        )
    else:
        loss = guard.run(
            lambda: _global_loss(state, objective, batch, detached, gathered, cache.loss_weights[0])
        )
        if gathered.packed is not None:
            with state.timers("sync"):
                # Zeros after an OOM: other ranks wait for the reduce-scatter.
                packed = (
                    torch.zeros_like(gathered.packed) if loss is None else loss.gradients[PACKED]
                )
                received = group.reduce_scatter(packed)[1:, 1:]
            remote_gradients = _split_columns(received, gathered.shapes)
    cache.gradients = guard.run(
        lambda: _split_gradients(batch, objective, loss.gradients, remote_gradients)
    )
    if cache.gradients:
        cache.add({"loss": loss.loss_sum, **loss.metric_sums}, local_loss=False)
    return cache


def _local_counts(
    parts: ObjectiveParts, micro_batches: list[Batch], stop: bool
) -> tuple[int, Tensor]:
    """Number of counts of the global loss; float64 [K + 1]: those of this rank, then of the local
    loss, then `stop`.
    """
    losses = [loss for loss in (parts.global_loss, parts.local_loss) if loss is not None]
    counts = [
        torch.stack([loss.count(rows).reshape(-1) for rows in micro_batches]).double().sum(0)
        for loss in losses
    ]
    num_global = 0 if parts.global_loss is None else len(counts[0])
    return num_global, torch.cat([*counts, counts[0].new_full((1,), stop)])


class GlobalLossResult(NamedTuple):
    loss_sum: Tensor  # of this rank's rows
    metric_sums: dict[str, Tensor]
    gradients: Outputs


PACKED = "packed"  # key of the gradient at GatheredOutputs.packed
# of the outputs of all ranks, and their gradients, that a loss over pairs gathers at once
GATHERED_BYTES = 2 << 30


def _leaves(objective: Objective, detached: list[Outputs]) -> Outputs:
    """Outputs of all micro-batches concatenated, requiring gradients."""
    leaves = {
        name: torch.cat([outputs[name].detach() for outputs in detached])
        for name in objective.gathered_outputs
    }
    leaves |= {name: detached[0][name].clone() for name in objective.scalar_output_names}
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def _global_loss(
    state: TrainState,
    objective: Objective,
    batch: LocalBatch,
    detached: list[Outputs],
    gathered: GatheredOutputs,
    loss_weight: Tensor,
) -> GlobalLossResult:
    """The loss of this rank's rows against the rows of all ranks, and its gradients at both."""
    leaves = _leaves(objective, detached)
    # one value a row
    names = [name for name, tensor in batch.micro_batches[0].items() if tensor.ndim == 1]
    row_values = {
        name: torch.cat([micro_batch[name] for micro_batch in batch.micro_batches])
        for name in names
    }
    with state.timers("forward"):
        loss_sum, _, metrics = objective.compute_loss(leaves, row_values, gathered.columns)
        loss = (loss_sum.reshape(-1) * loss_weight.to(loss_sum.dtype)).sum()
    inputs = leaves if gathered.packed is None else {**leaves, PACKED: gathered.packed}
    with state.timers("backward"):
        gradients = torch.autograd.grad(
            loss, list(inputs.values()), allow_unused=True, materialize_grads=True
        )
    return GlobalLossResult(loss_sum.detach(), metrics, dict(zip(inputs, gradients, strict=True)))


def _split_gradients(
    batch: LocalBatch, objective: Objective, gradients: Outputs, remote_gradients: Outputs
) -> list[Outputs]:
    """Gradients at the outputs of each micro-batch, from this rank's loss and from the other ranks'
    losses.
    """
    sizes = [len(micro_batch["valid"]) for micro_batch in batch.micro_batches]
    sliced = {}
    for name in objective.gathered_outputs:
        total = gradients[name]
        if remote_gradients:
            total = total + remote_gradients[name][: len(total)]
        sliced[name] = total.split(sizes)
    scalars = {name: gradients[name] for name in objective.scalar_output_names}
    return [scalars | {name: sliced[name][index] for name in sliced} for index in range(len(sizes))]


# --- outputs of all ranks in one collective


@dataclass(frozen=True)
class GatheredOutputs:
    """Outputs of all ranks.

    In a group of one, `packed` and `columns` are None: the batch has all rows.
    """

    # float64 [K + 1], sums over ranks of the objective's counts and of the stop requests
    counts: Tensor
    packed: Tensor | None = None  # [world x (1 + rows), width], a leaf that requires gradients
    # the argument `gathered` of Objective.compute_loss, views of `packed`
    columns: dict[str, Any] | None = None
    # of this rank's outputs, in the order of `packed`
    shapes: dict[str, torch.Size] = field(default_factory=dict)


def gather_outputs(
    group: Group, detached: list[Outputs], batch: LocalBatch, counts: Tensor, names: tuple[str, ...]
) -> GatheredOutputs:
    """Outputs of all ranks, padded to `batch.rows` a rank, and the sum of `counts`, in one
    collective.

    They are packed next to `valid`, in float32 at least, so that sums over ranks do not round to
    bfloat16. `counts` is the first row, because on slow links the number of collectives matters
    more than their size.
    """
    if group.world_size == 1:
        return GatheredOutputs(counts)
    outputs = {name: torch.cat([part[name] for part in detached]) for name in names}
    shapes = {name: output.shape for name, output in outputs.items()}
    dtype = torch.promote_types(torch.float32, outputs[names[0]].dtype)
    valid = torch.cat([micro_batch["valid"] for micro_batch in batch.micro_batches])
    rows = torch.cat(
        [valid.to(dtype)[:, None], *(output.flatten(1).to(dtype) for output in outputs.values())],
        dim=1,
    )
    # a sum of many objectives has many counts
    rows = F.pad(rows, (0, max(0, len(counts) - rows.shape[1])))
    header = F.pad(counts.to(dtype), (0, rows.shape[1] - len(counts)))[None]
    local = torch.cat([header, F.pad(rows, (0, 0, 0, batch.rows - len(rows)))])
    packed = group.all_gather(local).requires_grad_()
    by_rank = packed.view(group.world_size, batch.rows + 1, -1)
    summed_counts = by_rank[:, 0, : len(counts)].detach().double().sum(0)
    packed_rows = by_rank[:, 1:].flatten(0, 1)
    columns = {"valid": packed_rows[:, 0].detach() > 0, "offset": group.rank * batch.rows}
    return GatheredOutputs(
        summed_counts, packed, columns | _split_columns(packed_rows[:, 1:], shapes), shapes
    )


def _split_columns(columns: Tensor, shapes: dict[str, torch.Size]) -> Outputs:
    """[rows, width] -> a view [rows, ...] for each shape [B, ...]."""
    outputs, first = {}, 0
    for name, shape in shapes.items():
        width = shape[1:].numel()
        outputs[name] = columns[:, first : first + width].view(-1, *shape[1:])
        first += width
    return outputs


# --- losses over pairs: outputs of all ranks are gathered, but their scores computed in chunks


def compute_pairwise_loss(
    objective: PairwiseLoss,
    leaves: Outputs,
    valid: Tensor,
    rows: int,
    loss_weight: Tensor,
    guard: OomGuard,
) -> GlobalLossResult:
    """This rank's loss sum, metric sums, and the gradient of (all ranks' losses x loss_weight) at
    its own outputs.

    leaves: outputs of this rank's rows that require gradients. rows: equal on every rank, at least
    this rank's number. Two collectives: the all-gather of the remote outputs and the reduce-scatter
    of their gradients, or two for each part of GATHERED_BYTES. 512 ranks x 64 rows x 1152 float32
    are 151 MB, and as much for gradients. A ring of ranks (Zhai et al. 2023, SigLIP, section 3.3)
    needs less memory, but a message for each rank, one after the other. After an OOM this rank
    still takes part in them; its results are then unusable.
    """
    group = guard.group
    local = {name: leaf for name, leaf in leaves.items() if name not in objective.remote_outputs}
    gradients = {name: torch.zeros_like(leaf) for name, leaf in local.items()}
    sums = {"loss": loss_weight.new_zeros(())}
    shapes = {name: leaves[name].shape for name in objective.remote_outputs}
    values = torch.cat([leaves[name].detach().flatten(1) for name in shapes], dim=1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    values = F.pad(
        torch.cat([values, valid.to(values.dtype)[:, None]], dim=1), (0, 0, 0, rows - len(values))
    )

    def accumulate(remote: Tensor, remote_gradients: Tensor, positive_row: Tensor) -> None:
        chunks = (
            tensor.split(objective.chunk_rows)
            for tensor in (remote, remote_gradients, positive_row)
        )
        for values, gradient_sums, positive in zip(*chunks, strict=True):
            outputs = {
                name: part.clone().requires_grad_()
                for name, part in _split_columns(values, shapes).items()
            }
            loss_sum, metrics = objective.pairwise_loss(
                local, valid, outputs, values[:, -1] > 0, positive
            )
            inputs = {**local, **outputs}
            loss = loss_sum * loss_weight.to(loss_sum.dtype)
            grads = torch.autograd.grad(
                loss, list(inputs.values()), allow_unused=True, materialize_grads=True
            )
            grad_buffers = gradients | _split_columns(gradient_sums, shapes)
            for name, grad in zip(inputs, grads, strict=True):
                grad_buffers[name].add_(grad)
            for name, value in {"loss": loss_sum.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value

    own_gradients = []
    part_rows = max(1, GATHERED_BYTES // (2 * group.world_size * values[:1].nbytes))
    for first in range(0, rows, part_rows):
        part = values[first : first + part_rows]
        remote = group.all_gather(part)
        remote_gradients = torch.zeros_like(remote)
        positive_row = torch.full((group.world_size, len(part)), -1, device=part.device)
        positive_row[group.rank] = torch.arange(first, first + len(part), device=part.device)
        guard.run(partial(accumulate, remote, remote_gradients, positive_row.flatten()))
        own_gradients.append(group.reduce_scatter(remote_gradients))
    own = _split_columns(torch.cat(own_gradients)[: len(valid)], shapes)
    return GlobalLossResult(sums.pop("loss"), sums, gradients | own)


# --- hard negatives: token ids and positions of all ranks, never pixels


@torch.no_grad()
def attach_negatives(
    mining: HardNegativeMining,
    batch: LocalBatch,
    detached: list[Outputs],
    columns: dict[str, Any] | None,
    inputs: Batch,
) -> list[Batch]:
    """The micro-batches with the columns that `mining` samples for their rows, from
    `GatheredOutputs.columns`.
    """
    columns = columns or {
        **{
            name: torch.cat([outputs[name] for outputs in detached])
            for name in mining.score_outputs
        },
        "valid": torch.cat([micro_batch["valid"] for micro_batch in batch.micro_batches]),
        "offset": 0,
    }
    micro_batches, offset = [], columns["offset"]
    for micro_batch, outputs in zip(batch.micro_batches, detached, strict=True):
        gathered_rows = {**columns, **inputs, "offset": offset}
        micro_batches.append(
            micro_batch | mining.sample_hard_negatives(outputs, micro_batch, gathered_rows)
        )
        offset += len(micro_batch["valid"])
    return micro_batches


def attach_own_negatives(state: TrainState, batch: LocalBatch) -> list[Batch]:
    """A micro-batch, the only one of `batch`, with hard negatives among its own rows; without
    collectives.
    """
    mining, model = state.parts.mining_loss, strategy.unwrap(state.model)
    if mining is None:
        return batch.micro_batches
    with torch.no_grad(), strategy.preserve_buffers(model), state.precision.autocast():
        outputs = model(batch.micro_batches[0])
    return attach_negatives(
        mining, batch, [outputs], None, gather_negative_inputs(Group(), mining, batch)
    )


def gather_negative_inputs(group: Group, mining: HardNegativeMining, batch: LocalBatch) -> Batch:
    """Input columns of all ranks from which negatives are taken, padded to `batch.rows` a rank, in
    one collective.

    They are integers, packed next to each other, each as wide as the widest of any rank. Captions
    are trimmed by micro-batch, so those of a rank are padded to its widest first.
    """
    columns = {}
    for name in mining.gathered_inputs:
        parts = [micro_batch[name] for micro_batch in batch.micro_batches]
        width = max(part[0].numel() for part in parts)
        columns[name] = torch.cat([_pad(part, len(part), width) for part in parts])
    if group.world_size == 1:
        return columns
    widest = -group.all_reduce_min(-max(column[0].numel() for column in columns.values()))
    columns = {name: _pad(column, batch.rows, widest) for name, column in columns.items()}
    packed = group.all_gather(
        torch.cat([column.long().reshape(batch.rows, -1) for column in columns.values()], dim=1)
    )
    split = _split_columns(packed, {name: column.shape for name, column in columns.items()})
    return {name: split[name].to(column.dtype) for name, column in columns.items()}


def _pad(column: Tensor, rows: int, width: int) -> Tensor:
    """[B] or [B, T] -> [rows, ...], padded with zeros."""
    if column.ndim == 1:
        return F.pad(column, (0, rows - len(column)))
    return F.pad(column, (0, width - column.shape[1], 0, rows - len(column)))
