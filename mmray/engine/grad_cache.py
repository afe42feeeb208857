"""The coupled part of a step: the loss over the rows of all micro-batches and ranks, its gradient at each output.

Between the two passes of a cached step. Rows are gathered, go around a ring, or first look for their partners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmray.engine.gather import Gathered, gather_outputs, row_values
from mmray.engine.oom import MemoryVote
from mmray.engine.partners import borrowed, with_partners
from mmray.engine.prefetch import Share
from mmray.engine.ring import around
from mmray.engine.train_state import Learner, Sums, loss_factors
from mmray.objectives.protocol import Batch, Objective, ObjectiveParts, Outputs, Pairwise

MOST_ROWS_OF_ALL = 1024  # up to here the whole matrix of logits (4 MiB) is formed on every rank


def couple(
    learner: Learner, parts: ObjectiveParts, share: Share, embedded: list[Outputs], local: Tensor, vote: MemoryVote
) -> tuple[Gathered, list[Batch], tuple[Tensor, Tensor], Sums, list[Outputs]]:
    """What was gathered, micro-batches with their partners, loss factors, sums, gradients of each one's outputs.

    Without room for them there are no gradients, but the collectives are held: other ranks wait in them.
    """
    group, objective = learner.group, parts.cross_row
    with learner.phases("sync"):
        gathered = (
            Gathered(group.all_reduce_sum(local))
            if travels(parts)
            else gather_outputs(group, embedded, share, local, gathered_names(parts))
        )
    factors = loss_factors(learner, parts, share, gathered.totals)
    sums = Sums(len(factors[0]), len(factors[1]))
    micros = share.micros
    if (mining := parts.mining) is not None:
        with learner.phases("sync"):
            lent = borrowed(group, mining, share)
        micros = vote.run(lambda: with_partners(mining, share, embedded, gathered, lent))
    gradients: list[Outputs] = [{}] * len(share.micros)
    of_others: Outputs = {}
    if objective is None:
        return gathered, micros, factors, sums, gradients
    if travels(parts) and isinstance(objective, Pairwise):
        leaves = _leaves(objective, embedded)
        valid = torch.cat([micro["valid"] for micro in share.micros])
        loss_sum, further, own = around(objective, leaves, valid, share.rows, factors[0], vote)
        found = LossGradients(loss_sum, further, own, None)
    elif _is_small(objective, gathered):
        found = vote.run(lambda: _loss_of_all(learner, objective, share, embedded, gathered, factors[0]))
    else:
        found = vote.run(lambda: _loss_and_gradients(learner, objective, share, embedded, gathered, factors[0]))
        with learner.phases("sync"):
            packed = gathered.gradient_or_zeros(None if found is None else found.everyone)
            of_others = gathered.unpacked(group.gather_back(packed))
    gradients = vote.run(lambda: _by_micro(share, objective, found, of_others))
    if gradients:
        sums.add({"loss": found.loss_sum, **found.further}, row_wise=False)
    return gathered, micros, factors, sums, gradients


def gathered_names(parts: ObjectiveParts) -> tuple[str, ...]:
    """Outputs of which everyone's rows are looked at."""
    coupled = () if parts.cross_row is None else parts.cross_row.coupled
    return tuple(dict.fromkeys(coupled + (() if parts.mining is None else parts.mining.looks_at)))


def travels(parts: ObjectiveParts) -> bool:
    """Whether rows go around the ring instead of to everyone at once."""
    return isinstance(parts.cross_row, Pairwise) and parts.mining is None


def _is_small(objective: Objective, gathered: Gathered) -> bool:
    """Whether the loss of all ranks' rows costs less than the collective that would bring its gradients together."""
    if gathered.everyone is None or getattr(objective, "row_values", None) != ("valid",):
        return False
    return len(gathered.everyone["valid"]) <= MOST_ROWS_OF_ALL


@dataclass(frozen=True)
class LossGradients:
    """The loss over the global batch, as far as this rank's rows have a part in it."""

    loss_sum: Tensor
    further: dict[str, Tensor]  # sums to log
    own: Outputs  # gradients of this rank's outputs as rows, all micro-batches together, and of the shared outputs
    everyone: Tensor | None  # gradients of all ranks' outputs as columns, packed as they were gathered


def _leaves(objective: Objective, embedded: list[Outputs]) -> Outputs:
    """The outputs of all micro-batches as one, asking for a gradient."""
    leaves = {name: torch.cat([outputs[name].detach() for outputs in embedded]) for name in objective.coupled}
    leaves |= {name: embedded[0][name].clone() for name in objective.shared}
    for leaf in leaves.values():
        leaf.requires_grad_()
    return leaves


def _loss_and_gradients(
    learner: Learner, objective: Objective, share: Share, embedded: list[Outputs], gathered: Gathered, factor: Tensor
) -> LossGradients:
    """The loss of this rank's rows against everyone's, and its gradients at both."""
    leaves = _leaves(objective, embedded)
    with learner.phases("forward"):
        loss_sum, _, further = objective.measure(leaves, row_values(share), gathered.everyone)
        loss = (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
    wanted = [*leaves.values(), *([] if gathered.packed is None else [gathered.packed])]
    with learner.phases("backward"):
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    own = dict(zip(leaves, found, strict=False))
    return LossGradients(loss_sum.detach(), further, own, None if gathered.packed is None else found[-1])


def _loss_of_all(
    learner: Learner, objective: Objective, share: Share, embedded: list[Outputs], gathered: Gathered, factor: Tensor
) -> LossGradients:
    """The loss of all ranks' rows, formed on each of them alike: its gradients at this rank's rows need no collective.

    What belongs to the step rather than to a row would be counted once a rank; it is divided by their number.
    """
    assert gathered.everyone is not None
    world, offset = learner.group.world, gathered.everyone["offset"]
    mine = slice(offset, offset + sum(len(micro["valid"]) for micro in share.micros))
    leaves = _leaves(objective, [gathered.everyone | {name: embedded[0][name] for name in objective.shared}])
    with learner.phases("forward"):
        loss_sum, _, further = objective.measure(leaves, {"valid": gathered.everyone["valid"]})
        loss = (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
    with learner.phases("backward"):
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    own = {name: gradients[name][mine] for name in objective.coupled}
    own |= {name: gradients[name] / world for name in objective.shared}
    return LossGradients(loss_sum.detach() / world, {name: value / world for name, value in further.items()}, own, None)


def _by_micro(share: Share, objective: Objective, found: LossGradients, of_others: Outputs) -> list[Outputs]:
    """Gradients of the outputs of each micro-batch: what this rank's losses gave them, and all ranks' losses."""
    sizes = [len(micro["valid"]) for micro in share.micros]
    flat = {name: found.own[name] + of_others[name] if of_others else found.own[name] for name in objective.coupled}
    sliced = {name: gradient.split(sizes) for name, gradient in flat.items()}
    whole = {name: found.own[name] for name in objective.shared}
    return [whole | {name: sliced[name][index] for name in sliced} for index in range(len(sizes))]
