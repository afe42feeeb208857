"""GradCache (Gao et al. 2021, arXiv:2101.06983): the loss over the rows of all micro-batches and
ranks.

Its gradient at each output is computed between the two passes of a step (step.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.gather import (
    GatheredOutputs,
    concatenate,
    gather_negative_inputs,
    gather_outputs,
    pack,
    shapes_of,
    unpack,
)
from mmray.engine.prefetch import LocalBatch
from mmray.engine.run_state import TrainState
from mmray.objectives.protocol import (
    ROW_COUNTS,
    ROW_LOSSES,
    Batch,
    HardNegativeMining,
    ObjectiveParts,
    Outputs,
    PairwiseLoss,
)

# Bytes of outputs of all ranks, and of their gradients, that a loss over pairs gathers at once.
GATHERED_BYTES = 2 << 30


@dataclass
class GradCache:
    """Cached gradients of the first pass of a step (GradCache), for its second pass, and metrics.

    The first pass embeds all rows, and computes the gradient of the global loss at each output. The
    second pass runs each micro-batch again, and its backward starts from these gradients.

    A loss has a vector [K] of counts: one number, or for a sum of K objectives one for each. An
    absent loss has none.

    For each micro-batch `backward_inputs(parts, outputs, index)` returns what
    torch.autograd.backward takes, and adds its metrics to `means`.

    Attributes:
        micro_batches: This rank's micro-batches, tensors [B, ...] by column; also the columns of
            hard negatives if the objective samples some (`sample_hard_negatives`).
        local_counts: float64 [K], the divisors of the local loss (a sum over rows): sums over all
            ranks, at least 1.
        local_weights: float64 [K], factors of the sums of the local loss: world size /
            `local_counts`, times the loss scale of fp16, so that DDP's average over ranks is the
            gradient of the mean.
        stop_requests: float64 [1], how many ranks request a stop.
        gradients: For each micro-batch, by name, gradients at its outputs [B, ...] and at scalar
            outputs, of the global loss as a mean over the global batch, times world size and loss
            scale.
        means: `loss` and the objective's metrics: this rank's part of the mean over the global
            batch, so that the mean is the sum over ranks.
        scalars: Scalar outputs of the last micro-batch by name, without graph.
        by_source: This rank's part of three sums for each set of a mixture, float64 [3, S]: the
            losses of its rows, NaN if an objective has no losses by row; their counts; and the
            norms of the gradients of the global loss at the embeddings of its rows.
    """

    micro_batches: list[Batch]
    local_counts: Tensor
    local_weights: Tensor
    stop_requests: Tensor
    gradients: list[Outputs] = field(default_factory=list)
    means: dict[str, Tensor] = field(default_factory=dict)
    scalars: Outputs = field(default_factory=dict)
    by_source: Tensor = field(default_factory=lambda: torch.zeros(3, 0))

    def add_rows(self, losses: Tensor | None, counts: Tensor, rows: Batch) -> None:
        """Add the losses [B] (None: unknown) and counts [B] of rows to `by_source`."""
        valid = rows["valid"]
        if losses is None:
            losses = counts.new_full(counts.shape, torch.nan, dtype=torch.float64)
        values = torch.stack([torch.where(valid, each, 0).double() for each in (losses, counts)])
        self.by_source[:2].index_add_(1, rows["source"], values)

    def add_means(self, sums: Mapping[str, Tensor], counts: Tensor) -> None:
        """Add this rank's part of mean losses and metrics to `means`.

        Args:
            sums: Sums over this rank's rows, scalars or [K] for K objectives; quotients are added.
            counts: Counts over the rows of all ranks, float64 [K].
        """
        for name, value in sums.items():
            mean = (value.detach() / counts).sum()
            self.means[name] = self.means[name] + mean if name in self.means else mean

    def backward_inputs(
        self, parts: ObjectiveParts, outputs: Outputs, index: int
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the two arguments with which torch.autograd.backward starts the backward of a
        micro-batch.

        The backward starts at the outputs with their cached gradients of the global loss, and at
        the local loss (with None, the gradient 1). Outputs of frozen branches are left out. The
        metrics of the local loss are added to `means`.

        Args:
            parts: The global loss (over rows of all ranks) and the local loss (a sum over rows) of
                the objective.
            outputs: Outputs of the micro-batch by name [B, ...], with their graph.
            index: Index of the micro-batch in the step.

        Returns:
            A list of tensors, outputs [B, ...] and the loss, and a list with the gradient of each,
            of the same shape; None means the gradient 1.
        """
        tensors: list[Tensor] = []
        gradients: list[Tensor | None] = []
        is_last = index == len(self.micro_batches) - 1
        if parts.global_loss is not None:
            names = parts.global_loss.gathered_outputs
            if is_last:  # the gradient at a scalar is for the whole step
                names += parts.global_loss.scalar_output_names
            names = tuple(name for name in names if outputs[name].requires_grad)
            tensors += [outputs[name] for name in names]
            gradients += [self.gradients[index][name] for name in names]
        if parts.local_loss is not None:
            loss_sum, _, metrics = parts.local_loss.compute_loss(outputs, self.micro_batches[index])
            row_losses = metrics.pop(ROW_LOSSES, None)
            counts = metrics.pop(ROW_COUNTS, self.micro_batches[index]["valid"])
            if self.by_source.shape[1]:
                # The global loss has counted the rows.
                counts = counts if parts.global_loss is None else torch.zeros_like(counts)
                self.add_rows(row_losses, counts, self.micro_batches[index])
            self.add_means({"loss": loss_sum, **metrics}, self.local_counts)
            tensors.append(_weighted(loss_sum, self.local_weights))
            gradients.append(None)
        return tensors, gradients


def build_grad_cache(
    state: TrainState, batch: LocalBatch, embeddings: Outputs, stop: bool
) -> GradCache:
    """Gather the outputs of all ranks, sample hard negatives, and compute the gradient of the loss
    at each output.

    Args:
        embeddings: Outputs of the first pass by name, of all rows of this rank [rows, ...], and
            scalar outputs such as `logit_scale`; empty if no loss compares rows with each other.
            Then only the counts are reduced.
        stop: This rank's request to end the run, reduced with the counts.
    """
    group = state.group
    parts = state.parts
    # Of the global and of the local loss, and the stop request.
    none = batch.micro_batches[0]["valid"].new_zeros(0, dtype=torch.float64)
    counts = [
        none
        if loss is None
        else torch.stack([loss.count(rows).reshape(-1) for rows in batch.micro_batches])
        .double()
        .sum(0)
        for loss in (parts.global_loss, parts.local_loss)
    ]
    counts.append(none.new_full((1,), stop))
    if embeddings and parts.pairwise_loss is None:
        gathered = gather_outputs(group, embeddings, parts.gathered_names, batch, counts)
    else:
        summed = group.all_reduce_sum(torch.cat(counts))
        gathered = GatheredOutputs(summed.split([len(each) for each in counts]))
    global_counts, local_counts, stop_requests = gathered.counts
    global_counts = global_counts.clamp(min=1)
    local_counts = local_counts.clamp(min=1)
    # A loss sum times its weight is this rank's part of the mean, times the world size, because DDP
    # averages over ranks.
    cache = GradCache(
        micro_batches=batch.micro_batches,
        local_counts=local_counts,
        local_weights=state.scaler.scale(group.world_size / local_counts),
        stop_requests=stop_requests,
        by_source=global_counts.new_zeros(3, batch.num_sources),
    )
    if parts.mining_loss is not None:
        inputs = gather_negative_inputs(group, parts.mining_loss, batch)
        cache.micro_batches = attach_negatives(
            parts.mining_loss, batch, embeddings, gathered.columns, inputs
        )
    if parts.global_loss is not None:
        weights = state.scaler.scale(group.world_size / global_counts)
        loss = _global_loss(state, batch, embeddings, gathered, weights)
        cache.gradients = _split_by_micro_batch(loss.gradients, batch.micro_batches)
        row_losses = loss.metric_sums.pop(ROW_LOSSES, None)
        if batch.num_sources:
            rows = {name: concatenate(batch.micro_batches, name) for name in ("valid", "source")}
            cache.add_rows(row_losses, rows["valid"], rows)
            squares = [each.square().sum(1) for each in loss.gradients.values() if each.ndim == 2]
            norms = torch.where(rows["valid"], torch.stack(squares).sum(0).sqrt(), 0).double()
            cache.by_source[2].index_add_(0, rows["source"], norms)
        cache.add_means({"loss": loss.loss_sum, **loss.metric_sums}, global_counts)
    return cache


def _weighted(loss_sum: Tensor, weights: Tensor) -> Tensor:
    """Return the scalar to differentiate: a loss sum, scalar or [K], times its weights [K]."""
    return (loss_sum.reshape(-1) * weights.to(loss_sum.dtype)).sum()


def _split_by_micro_batch(outputs: Outputs, micro_batches: list[Batch]) -> list[Outputs]:
    """Split tensors [rows, ...] into those of each micro-batch; scalars are in all of them."""
    sizes = [len(micro_batch["valid"]) for micro_batch in micro_batches]
    parts = {name: value.split(sizes) for name, value in outputs.items() if value.ndim > 0}
    scalars = {name: value for name, value in outputs.items() if value.ndim == 0}
    return [
        scalars | {name: part[index] for name, part in parts.items()} for index in range(len(sizes))
    ]


# --- the loss over the rows of all ranks, and its gradients at this rank's outputs


class GlobalLossResult(NamedTuple):
    """The global loss of a step (over pairs of rows of all ranks) as a sum, and gradients of its
    mean.

    The differentiated scalar is the loss sum times a weight: world size / count, times the loss
    scale of fp16. The count is the loss's own divisor, summed over all ranks, such as the number of
    valid rows. DDP averages gradients over ranks, so the result is the gradient of the mean over
    the global batch, times the loss scale.

    Attributes:
        loss_sum: Unweighted sum over this rank's rows, a scalar, or [K] for K summed objectives.
        metric_sums: Sums of metrics over this rank's rows by name, such as `loss_positive`.
        gradients: By name, gradients of the weighted loss. At this rank's outputs [rows, ...] they
            are of the losses of all ranks. At scalar outputs of the model, such as `logit_scale`,
            they are of this rank's loss only.
    """

    loss_sum: Tensor
    metric_sums: dict[str, Tensor]
    gradients: Outputs


def _global_loss(
    state: TrainState,
    batch: LocalBatch,
    embeddings: Outputs,
    gathered: GatheredOutputs,
    weights: Tensor,
) -> GlobalLossResult:
    objective = state.parts.global_loss
    assert objective is not None
    names = (*objective.gathered_outputs, *objective.scalar_output_names)
    leaves = {name: embeddings[name].detach().requires_grad_() for name in names}
    if state.parts.pairwise_loss is not None:
        valid = concatenate(batch.micro_batches, "valid")
        return compute_pairwise_loss(
            state.parts.pairwise_loss, leaves, valid, batch.rows, weights, state.group
        )
    first = batch.micro_batches[0]
    row_values = {
        name: concatenate(batch.micro_batches, name)
        for name, column in first.items()
        if column.ndim == 1  # one value a row
    }
    loss_sum, _, metrics = objective.compute_loss(leaves, row_values, gathered.columns)
    inputs = list(leaves.values())
    if gathered.packed is not None:
        inputs.append(gathered.packed)
    state.memory.sample()
    gradients = torch.autograd.grad(
        _weighted(loss_sum, weights), inputs, allow_unused=True, materialize_grads=True
    )
    by_name = dict(zip(leaves, gradients, strict=False))
    if gathered.packed is not None:
        # Other ranks' losses have gradients at this rank's outputs, too.
        received = state.group.reduce_scatter(gradients[-1])
        for name, gradient in unpack(received[1:, 1:], gathered.shapes).items():
            if name in by_name:
                by_name[name] = by_name[name] + gradient[: len(by_name[name])]
    return GlobalLossResult(loss_sum.detach(), metrics, by_name)


# --- losses over pairs: outputs of all ranks are gathered, but their scores computed in chunks


def compute_pairwise_loss(
    objective: PairwiseLoss,
    leaves: Outputs,
    valid: Tensor,
    rows: int,
    weights: Tensor,
    group: Group,
) -> GlobalLossResult:
    """Compute a loss over the pairs of this rank's rows with the rows of all ranks, and its
    gradients.

    There are two collectives: the all-gather of outputs and the reduce-scatter of their gradients.
    If they need more than GATHERED_BYTES (2 GiB), the rows are gathered in parts, with two
    collectives each. 512 ranks x 64 rows x 1152 float32 are 151 MB, and as much for gradients. A
    ring of ranks (Zhai et al. 2023, SigLIP, section 3.3) needs less memory, but a message for each
    rank, one after the other.

    Args:
        objective: The loss; its `remote_outputs` names the outputs that it needs from all ranks.
        leaves: Outputs of this rank's rows [B, ...] and scalar outputs of the model (such as
            `logit_scale`) by name, leaves that require gradients.
        valid: bool [B], False for rows that are left out of the loss, because they are padding or
            could not be read.
        rows: Number of rows to which every rank pads its own, at least B; equal on every rank.
        weights: Factors by which the loss sum is multiplied before it is differentiated, float64
            [K]: one number, or one for each of K summed objectives. `loss_sum` is not multiplied.

    Returns:
        A GlobalLossResult: `loss_sum` of this rank's rows, `metric_sums` by name, and `gradients`
        by name, at this rank's outputs [B, ...] and the scalar outputs. The gradient at an output
        that `remote_outputs` names is of the weighted losses of all ranks, the others of this
        rank's.
    """
    remote_names = objective.remote_outputs
    local = {name: leaf for name, leaf in leaves.items() if name not in remote_names}
    own = {name: leaves[name].detach() for name in remote_names}
    shapes = shapes_of(own)
    dtype = torch.promote_types(torch.float32, own[remote_names[0]].dtype)
    packed = pack({**own, "valid": valid[:, None]}, dtype)
    packed = F.pad(packed, (0, 0, 0, rows - len(packed)))
    sums = {"loss": weights.new_zeros(())}
    gradients = {name: torch.zeros_like(leaf) for name, leaf in local.items()}
    own_gradients = []
    part_rows = max(1, GATHERED_BYTES // (2 * group.world_size * packed[:1].nbytes))
    for first in range(0, rows, part_rows):
        part = packed[first : first + part_rows]
        remote = group.all_gather(part)
        remote_gradients = torch.zeros_like(remote)
        # The row of this rank that each remote row belongs to; -1 for rows of other ranks.
        positive_row = torch.full((group.world_size, len(part)), -1, device=part.device)
        positive_row[group.rank] = torch.arange(first, first + len(part), device=part.device)
        positive_row = positive_row.flatten()
        for start in range(0, len(remote), objective.chunk_rows):
            chunk = slice(start, start + objective.chunk_rows)
            remote_outputs = unpack(remote[chunk], shapes)
            remote_valid = remote[chunk, -1] > 0
            pairs = _pairwise_chunk(
                objective, local, valid, remote_outputs, remote_valid, positive_row[chunk], weights
            )
            for name, value in {"loss": pairs.loss_sum, **pairs.metric_sums}.items():
                sums[name] = sums[name] + value if name in sums else value
            chunk_gradients = gradients | unpack(remote_gradients[chunk], shapes)
            for name, gradient in pairs.gradients.items():
                chunk_gradients[name].add_(gradient)
        own_gradients.append(group.reduce_scatter(remote_gradients))
    gradients |= unpack(torch.cat(own_gradients)[: len(valid)], shapes)
    return GlobalLossResult(sums.pop("loss"), sums, gradients)


def _pairwise_chunk(
    objective: PairwiseLoss,
    local: Outputs,
    valid: Tensor,
    remote: Outputs,
    remote_valid: Tensor,
    positive_row: Tensor,
    weights: Tensor,
) -> GlobalLossResult:
    """Compute the loss of this rank's rows with some remote rows; the gradients are at both."""
    remote = {name: output.clone().requires_grad_() for name, output in remote.items()}
    loss_sum, metrics = objective.pairwise_loss(local, valid, remote, remote_valid, positive_row)
    inputs = local | remote
    gradients = torch.autograd.grad(
        _weighted(loss_sum, weights),
        list(inputs.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return GlobalLossResult(loss_sum.detach(), metrics, dict(zip(inputs, gradients, strict=True)))


# --- hard negatives: token ids and positions of all ranks, never pixels


@torch.no_grad()
def attach_negatives(
    mining: HardNegativeMining,
    batch: LocalBatch,
    embeddings: Outputs,
    columns: dict[str, Any] | None,
    inputs: Batch,
) -> list[Batch]:
    """Return this rank's micro-batches with the columns of `sample_hard_negatives`.

    Args:
        columns: Outputs of all ranks [G, ...], `valid` bool [G] and the int `offset`, the index of
            this rank's first row among the G; None with a single rank.
        inputs: Columns of all ranks from which negatives are copied, such as `input_ids` [G, T].
    """
    if columns is None:
        columns = {name: embeddings[name] for name in mining.score_outputs}
        columns |= {"valid": concatenate(batch.micro_batches, "valid"), "offset": 0}
    micro_batches = []
    offset = columns["offset"]
    outputs_of_each = _split_by_micro_batch(embeddings, batch.micro_batches)
    for micro_batch, outputs in zip(batch.micro_batches, outputs_of_each, strict=True):
        gathered_rows = {**columns, **inputs, "offset": offset}
        negatives = mining.sample_hard_negatives(outputs, micro_batch, gathered_rows)
        micro_batches.append(micro_batch | negatives)
        offset += len(micro_batch["valid"])
    return micro_batches
