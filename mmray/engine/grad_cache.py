"""The coupled part of a step: the loss over the rows of all micro-batches and ranks, its gradient at each output.

Between the two passes of a cached step. Rows are gathered, go around a ring, or first look for their partners.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.oom import OomGuard
from mmray.engine.prefetch import LocalBatch
from mmray.engine.run_state import LossMeter, TrainState, loss_factors
from mmray.objectives.protocol import Batch, HardNegativeMining, Objective, ObjectiveParts, Outputs, Pairwise


# The loss of all pairs, with the texts of the other ranks coming by one rank at a time instead of all at once.
#
# For step.py, in place of the gather, where an objective is a sum over pairs (sigmoid). Embeddings travel around the
# ring
# of ranks with their gradients and are home again after as many hops as there are ranks. Memory on a rank: its own
# rows,
# one visiting rank's, and `chunk` columns of scores, whatever the number of ranks.
# Source: Zhai et al. 2023 (SigLIP, arXiv:2303.15343), section 3.3, with the gradients sent along.
def ring_loss(
    objective: Pairwise, leaves: Outputs, valid: Tensor, rows: int, factor: Tensor, vote: OomGuard
) -> tuple[Tensor, dict[str, Tensor], Outputs]:
    """This rank's loss sum, its parts, and the gradient of (all ranks' losses x factor) at its own outputs.

    leaves: outputs of this rank's rows that require gradients. rows: the same on every rank, at least this rank's.
    factor: what the loss is multiplied by before the backward, the loss scale among it. A rank that finds no room hands
    the visitors on as they are, and what it returns is of no use: the others wait for them, until all ranks vote.
    """
    home = {name: leaf for name, leaf in leaves.items() if name not in objective.rotating_outputs}
    gradients = {name: torch.zeros_like(leaf) for name, leaf in home.items()}
    sums = {"loss": factor.new_zeros(())}
    visitors = _packed({name: leaves[name].detach() for name in objective.rotating_outputs}, valid, rows)

    def receive(visitors: Tensor, own: bool) -> None:
        for first in range(0, rows, objective.chunk):
            chunk = slice(first, min(first + objective.chunk, rows))
            outputs, flags = _unpacked(visitors[chunk], leaves, objective.rotating_outputs)
            found, further = objective.pairwise_loss(home, valid, outputs, flags, first if own else None)
            asked = {**home, **outputs}
            flat = torch.autograd.grad(found * factor.to(found.dtype), list(asked.values()))
            theirs = _gradients_of(visitors[chunk], leaves, objective.rotating_outputs)
            for name, gradient in zip(asked, flat, strict=True):
                (gradients if name in home else theirs)[name].add_(gradient)
            for name, value in {"loss": found.detach(), **further}.items():
                sums[name] = sums[name] + value if name in sums else value

    for hop in range(vote.group.world):
        vote.run(partial(receive, visitors, own=hop == 0))
        visitors = vote.group.ring_shift(visitors)
    returned = _gradients_of(visitors, leaves, objective.rotating_outputs)
    loss = sums.pop("loss")
    return loss, sums, gradients | {name: returned[name][: len(valid)] for name in objective.rotating_outputs}


def _packed(outputs: Outputs, valid: Tensor, rows: int) -> Tensor:
    """Visiting rows side by side with their gradients so far, and `valid`: [rows, 2 x width + 1], one message a hop."""
    values = torch.cat([output.flatten(1) for output in outputs.values()], dim=1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    packed = torch.cat([values, torch.zeros_like(values), valid.to(values.dtype)[:, None]], dim=1)
    return F.pad(packed, (0, 0, 0, rows - len(packed)))


def _unpacked(visitors: Tensor, like: Outputs, names: tuple[str, ...]) -> tuple[Outputs, Tensor]:
    """The visiting outputs, as leaves of a graph of their own, and their `valid`."""
    width = (visitors.shape[1] - 1) // 2
    outputs = _split(visitors[:, :width], like, names)
    return {name: output.clone().requires_grad_() for name, output in outputs.items()}, visitors[:, -1] > 0


def _gradients_of(visitors: Tensor, like: Outputs, names: tuple[str, ...]) -> Outputs:
    """Views of the gradients that travel with the rows."""
    width = (visitors.shape[1] - 1) // 2
    return _split(visitors[:, width : 2 * width], like, names)


def _split(columns: Tensor, like: Outputs, names: tuple[str, ...]) -> Outputs:
    parts = columns.split([like[name][0].numel() for name in names], dim=1)
    return {name: part.view(-1, *like[name].shape[1:]) for name, part in zip(names, parts, strict=True)}


# The rows of all ranks beside this rank's own: packed, gathered in one collective, unpacked again.
#
# step.py asks here for what an objective whose rows meet must see: the coupled outputs of the global batch.
@dataclass(frozen=True)
class GatheredOutputs:
    """The coupled outputs of all ranks. Alone, `packed` and `everyone` are None: the rows of the batch are everyone."""

    totals: Tensor  # float64, the sum of what the ranks brought as `local`
    packed: Tensor | None = None  # [world x (1 + rows), columns], a leaf that takes gradients
    everyone: dict[str, Any] | None = None  # as Objective.compute_loss wants it, views of `packed`
    shapes: dict[str, torch.Size] | None = None  # of this rank's coupled outputs, and their order in the columns

    def gradient_or_zeros(self, found: Tensor | None) -> Tensor:
        """The gradient of `packed`, zeros where this rank had no room to find it: its partners wait for some."""
        if self.packed is None:
            return self.totals
        return torch.zeros_like(self.packed) if found is None else found

    def unpacked(self, gradient: Tensor) -> Outputs:
        """This rank's part [1 + rows, columns] as gradients of its coupled outputs; empty when alone."""
        if self.shapes is None:
            return {}
        widths = [prod(shape[1:]) for shape in self.shapes.values()]
        parts = gradient[1:, : sum(widths)].split(widths, dim=1)
        return {
            name: part[: shape[0]].reshape(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def row_values(share: LocalBatch) -> Batch:
    """The tensors of a share that hold one value a row, over all its micro-batches."""
    names = [name for name, tensor in share.micro_batches[0].items() if tensor.ndim == 1]
    return {name: torch.cat([micro[name] for micro in share.micro_batches]) for name in names}


def gather_outputs(
    group: Group, embedded: list[Outputs], share: LocalBatch, local: Tensor, gathered_outputs: tuple[str, ...]
) -> GatheredOutputs:
    """The coupled outputs of all ranks, padded to `share.rows` a rank, and the sum of `local`, in one collective.

    They go packed side by side with `valid`, in float32 at least, so that sums over ranks do not round to bfloat16;
    `local` rides along as a first row, for on slow links the number of collectives counts, not their size.
    """
    if group.world == 1:
        return GatheredOutputs(local)
    outputs = {name: torch.cat([part[name] for part in embedded]) for name in gathered_outputs}
    columns = [output.flatten(1) for output in outputs.values()]
    dtype = torch.promote_types(torch.float32, columns[0].dtype)
    valid = torch.cat([micro["valid"] for micro in share.micro_batches])
    rows = torch.cat([*(column.to(dtype) for column in columns), valid.to(dtype)[:, None]], dim=1)
    rows = F.pad(rows, (0, max(0, len(local) - rows.shape[1])))  # a sum of many objectives brings many counts
    header = F.pad(local.to(dtype), (0, rows.shape[1] - len(local)))[None]
    packed = group.all_gather(torch.cat([header, F.pad(rows, (0, 0, 0, share.rows - len(rows)))])).requires_grad_()
    by_rank = packed.view(group.world, share.rows + 1, -1)
    totals = by_rank[:, 0, : len(local)].detach().double().sum(0)
    widths = [column.shape[1] for column in columns]
    *parts, flags, _ = by_rank[:, 1:].flatten(0, 1).split([*widths, 1, rows.shape[1] - sum(widths) - 1], dim=1)
    everyone: dict[str, Any] = {
        name: part.reshape(-1, *output.shape[1:]) for (name, output), part in zip(outputs.items(), parts, strict=True)
    }
    everyone |= {"valid": flags[:, 0].detach() > 0, "offset": group.rank * share.rows}
    return GatheredOutputs(totals, packed, everyone, {name: output.shape for name, output in outputs.items()})


# Partners for rows: what the ranks lend each other so that each row can be given another row's caption.
#
# For step.py, between its two passes, beside gather.py. What travels is token ids and positions; never pixels.
@torch.no_grad()
def attach_negatives(
    mining: HardNegativeMining, share: LocalBatch, embedded: list[Outputs], gathered: GatheredOutputs, lent: Batch
) -> list[Batch]:
    """The share's micro-batches with the columns that `mining` finds for their rows."""
    if gathered.everyone is None:
        known = {name: torch.cat([outputs[name] for outputs in embedded]) for name in mining.score_outputs}
        known |= {**lent, "valid": torch.cat([micro["valid"] for micro in share.micro_batches])}
        offset = 0
    else:
        known = {**{name: gathered.everyone[name].detach() for name in mining.score_outputs}, **lent}
        known |= {"valid": gathered.everyone["valid"]}
        offset = gathered.everyone["offset"]
    micro_batches = []
    for micro, outputs in zip(share.micro_batches, embedded, strict=True):
        micro_batches.append(micro | mining.sample_hard_negatives(outputs, micro, {**known, "offset": offset}))
        offset += len(micro["valid"])
    return micro_batches


def gather_negative_inputs(group: Group, mining: HardNegativeMining, share: LocalBatch) -> Batch:
    """Columns of the batch that partners lend, of all ranks, each rank's padded to `share.rows`; in one collective.

    They are whole numbers, and go packed side by side, each as wide as the widest of any rank.
    """
    columns = {name: _joined([micro[name] for micro in share.micro_batches]) for name in mining.gathered_inputs}
    if group.world == 1:
        return columns
    widest = -group.all_reduce_min(-max(column[0].numel() for column in columns.values()))
    filled = [_filled(column, share.rows, widest) for column in columns.values()]
    packed = torch.cat([column.long().reshape(share.rows, -1) for column in filled], dim=1)
    everyone = group.all_gather(packed).split([column[0].numel() for column in filled], dim=1)
    return {
        name: part.reshape(-1, *column.shape[1:]).to(column.dtype)
        for name, column, part in zip(columns, filled, everyone, strict=True)
    }


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows of all micro-batches, the narrow ones (captions are trimmed) filled up with zeros."""
    widest = max(part[0].numel() for part in parts)
    return torch.cat([_filled(part, len(part), widest) for part in parts])


def _filled(column: Tensor, rows: int, width: int) -> Tensor:
    """[B] or [B, T] -> [rows, ...], zeros where there was nothing."""
    if column.ndim == 1:
        return F.pad(column, (0, rows - len(column)))
    return F.pad(column, (0, width - column.shape[1], 0, rows - len(column)))


MOST_ROWS_OF_ALL = 1024  # up to here the whole matrix of logits (4 MiB) is formed on every rank


def cached_loss_gradients(
    state: TrainState,
    parts: ObjectiveParts,
    share: LocalBatch,
    embedded: list[Outputs],
    local: Tensor,
    vote: OomGuard,
) -> tuple[GatheredOutputs, list[Batch], tuple[Tensor, Tensor], LossMeter, list[Outputs]]:
    """What was gathered, micro-batches with their partners, loss factors, sums, gradients of each one's outputs.

    Without room for them there are no gradients, but the collectives are held: other ranks wait in them.
    """
    group, objective = state.group, parts.global_loss
    with state.timers("sync"):
        gathered = (
            GatheredOutputs(group.all_reduce_sum(local))
            if uses_ring(parts)
            else gather_outputs(group, embedded, share, local, gathered_output_names(parts))
        )
    factors = loss_factors(state, parts, share, gathered.totals)
    sums = LossMeter(len(factors[0]), len(factors[1]))
    micro_batches = share.micro_batches
    if (mining := parts.mining) is not None:
        with state.timers("sync"):
            lent = gather_negative_inputs(group, mining, share)
        micro_batches = vote.run(lambda: attach_negatives(mining, share, embedded, gathered, lent))
    gradients: list[Outputs] = [{}] * len(share.micro_batches)
    of_others: Outputs = {}
    if objective is None:
        return gathered, micro_batches, factors, sums, gradients
    if uses_ring(parts) and isinstance(objective, Pairwise):
        leaves = _leaves(objective, embedded)
        valid = torch.cat([micro["valid"] for micro in share.micro_batches])
        loss_sum, further, own = ring_loss(objective, leaves, valid, share.rows, factors[0], vote)
        found = CachedGradients(loss_sum, further, own, None)
    elif _is_small(objective, gathered):
        found = vote.run(lambda: _loss_of_all(state, objective, share, embedded, gathered, factors[0]))
    else:
        found = vote.run(lambda: _loss_and_gradients(state, objective, share, embedded, gathered, factors[0]))
        with state.timers("sync"):
            packed = gathered.gradient_or_zeros(None if found is None else found.everyone)
            of_others = gathered.unpacked(group.reduce_scatter(packed))
    gradients = vote.run(lambda: _by_micro(share, objective, found, of_others))
    if gradients:
        sums.add({"loss": found.loss_sum, **found.further}, local_loss=False)
    return gathered, micro_batches, factors, sums, gradients


def gathered_output_names(parts: ObjectiveParts) -> tuple[str, ...]:
    """Outputs of which everyone's rows are looked at."""
    gathered_outputs = () if parts.global_loss is None else parts.global_loss.gathered_outputs
    return tuple(dict.fromkeys(gathered_outputs + (() if parts.mining is None else parts.mining.score_outputs)))


def uses_ring(parts: ObjectiveParts) -> bool:
    """Whether rows go around the ring instead of to everyone at once."""
    return isinstance(parts.global_loss, Pairwise) and parts.mining is None


def _is_small(objective: Objective, gathered: GatheredOutputs) -> bool:
    """Whether the loss of all ranks' rows costs less than the collective that would bring its gradients together."""
    if gathered.everyone is None or getattr(objective, "row_values", None) != ("valid",):
        return False
    return len(gathered.everyone["valid"]) <= MOST_ROWS_OF_ALL


@dataclass(frozen=True)
class CachedGradients:
    """The loss over the global batch, as far as this rank's rows have a part in it."""

    loss_sum: Tensor
    further: dict[str, Tensor]  # sums to log
    own: Outputs  # gradients of this rank's outputs as rows, all micro-batches together, and of the shared outputs
    everyone: Tensor | None  # gradients of all ranks' outputs as columns, packed as they were gathered


def _leaves(objective: Objective, embedded: list[Outputs]) -> Outputs:
    """The outputs of all micro-batches as one, asking for a gradient."""
    leaves = {name: torch.cat([outputs[name].detach() for outputs in embedded]) for name in objective.gathered_outputs}
    leaves |= {name: embedded[0][name].clone() for name in objective.scalar_outputs}
    for leaf in leaves.values():
        leaf.requires_grad_()
    return leaves


def _loss_and_gradients(
    state: TrainState,
    objective: Objective,
    share: LocalBatch,
    embedded: list[Outputs],
    gathered: GatheredOutputs,
    factor: Tensor,
) -> CachedGradients:
    """The loss of this rank's rows against everyone's, and its gradients at both."""
    leaves = _leaves(objective, embedded)
    with state.timers("forward"):
        loss_sum, _, further = objective.compute_loss(leaves, row_values(share), gathered.everyone)
        loss = (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
    wanted = [*leaves.values(), *([] if gathered.packed is None else [gathered.packed])]
    with state.timers("backward"):
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    own = dict(zip(leaves, found, strict=False))
    return CachedGradients(loss_sum.detach(), further, own, None if gathered.packed is None else found[-1])


def _loss_of_all(
    state: TrainState,
    objective: Objective,
    share: LocalBatch,
    embedded: list[Outputs],
    gathered: GatheredOutputs,
    factor: Tensor,
) -> CachedGradients:
    """The loss of all ranks' rows, formed on each of them alike: its gradients at this rank's rows need no collective.

    What belongs to the step rather than to a row would be counted once a rank; it is divided by their number.
    """
    assert gathered.everyone is not None
    world, offset = state.group.world, gathered.everyone["offset"]
    mine = slice(offset, offset + sum(len(micro["valid"]) for micro in share.micro_batches))
    leaves = _leaves(objective, [gathered.everyone | {name: embedded[0][name] for name in objective.scalar_outputs}])
    with state.timers("forward"):
        loss_sum, _, further = objective.compute_loss(leaves, {"valid": gathered.everyone["valid"]})
        loss = (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
    with state.timers("backward"):
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    own = {name: gradients[name][mine] for name in objective.gathered_outputs}
    own |= {name: gradients[name] / world for name in objective.scalar_outputs}
    return CachedGradients(
        loss_sum.detach() / world, {name: value / world for name, value in further.items()}, own, None
    )


def _by_micro(share: LocalBatch, objective: Objective, found: CachedGradients, of_others: Outputs) -> list[Outputs]:
    """Gradients of the outputs of each micro-batch: what this rank's losses gave them, and all ranks' losses."""
    sizes = [len(micro["valid"]) for micro in share.micro_batches]
    flat = {
        name: found.own[name] + of_others[name] if of_others else found.own[name] for name in objective.gathered_outputs
    }
    sliced = {name: gradient.split(sizes) for name, gradient in flat.items()}
    whole = {name: found.own[name] for name in objective.scalar_outputs}
    return [whole | {name: sliced[name][index] for name in sliced} for index in range(len(sizes))]
