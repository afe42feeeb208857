"""Where the rows of all micro-batches and ranks meet: the loss over the global batch, and its gradient at each output.

Between the two passes of a cached step. Rows are gathered, go around a ring, or first look for their partners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmray.objectives.protocol import Batch, Objective, Outputs, Pairwise, Sorts
from mmray.train.feed import Share
from mmray.train.gather import Met, gathered, row_values
from mmray.train.learner import Learner, Sums, factors_of
from mmray.train.partners import borrowed, with_partners
from mmray.train.ring import around
from mmray.train.trial import Trial

MOST_ROWS_OF_ALL = 1024  # up to here the whole matrix of logits (4 MiB) is formed on every rank


def meet(
    learner: Learner, parts: Sorts, share: Share, embedded: list[Outputs], local: Tensor, trial: Trial
) -> tuple[Met, list[Batch], tuple[Tensor, Tensor], Sums, list[Outputs]]:
    """Where the ranks met, micro-batches with their partners, factors, sums, gradients of each micro-batch's outputs.

    Without room for them there are no gradients, but the collectives are held: other ranks wait in them.
    """
    group, objective = learner.group, parts.meeting
    with learner.phases("sync"):
        met = (
            Met(group.all_reduce_sum(local))
            if travels(parts)
            else gathered(group, embedded, share, local, meeting_names(parts))
        )
    factors = factors_of(learner, parts, share, met.totals)
    sums = Sums(len(factors[0]), len(factors[1]))
    micros = share.micros
    if (mining := parts.mining) is not None:
        with learner.phases("sync"):
            lent = borrowed(group, mining, share)
        micros = trial.of(lambda: with_partners(mining, share, embedded, met, lent))
    gradients: list[Outputs] = [{}] * len(share.micros)
    theirs: Outputs = {}
    if objective is None:
        return met, micros, factors, sums, gradients
    if travels(parts) and isinstance(objective, Pairwise):
        leaves = _leaves(objective, embedded)
        valid = torch.cat([micro["valid"] for micro in share.micros])
        loss_sum, further, own = around(objective, leaves, valid, share.rows, factors[0], trial)
        lossy = Lossy(loss_sum, further, own, None)
    elif _is_small(objective, met):
        lossy = trial.of(lambda: _loss_of_all(learner, objective, share, embedded, met, factors[0]))
    else:
        lossy = trial.of(lambda: _loss_and_gradients(learner, objective, share, embedded, met, factors[0]))
        with learner.phases("sync"):
            found = None if lossy is None else lossy.everyone
            theirs = met.unpacked(group.gather_back(met.gradient_or_zeros(found)))
    gradients = trial.of(lambda: _by_micro(share, objective, lossy, theirs))
    if gradients:
        sums.add({"loss": lossy.loss_sum, **lossy.parts}, standing=False)
    return met, micros, factors, sums, gradients


def meeting_names(parts: Sorts) -> tuple[str, ...]:
    """Outputs of which everyone's rows are looked at."""
    coupled = () if parts.meeting is None else parts.meeting.coupled
    return tuple(dict.fromkeys(coupled + (() if parts.mining is None else parts.mining.looks_at)))


def travels(parts: Sorts) -> bool:
    """Whether rows go around the ring instead of to everyone at once."""
    return isinstance(parts.meeting, Pairwise) and parts.mining is None


def _is_small(objective: Objective, met: Met) -> bool:
    """Whether the loss of all ranks' rows costs less than the collective that would bring its gradients together."""
    if met.everyone is None or getattr(objective, "row_values", None) != ("valid",):
        return False
    return len(met.everyone["valid"]) <= MOST_ROWS_OF_ALL


@dataclass(frozen=True)
class Lossy:
    """The loss over the global batch, as far as this rank's rows have a part in it."""

    loss_sum: Tensor
    parts: dict[str, Tensor]
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
    learner: Learner, objective: Objective, share: Share, embedded: list[Outputs], met: Met, factor: Tensor
) -> Lossy:
    """The loss of this rank's rows against everyone's, and its gradients at both."""
    leaves = _leaves(objective, embedded)
    with learner.phases("forward"):
        loss_sum, _, parts = objective.measure(leaves, row_values(share), met.everyone)
        loss = (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
    wanted = [*leaves.values(), *([] if met.packed is None else [met.packed])]
    with learner.phases("backward"):
        found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    own = dict(zip(leaves, found, strict=False))
    return Lossy(loss_sum.detach(), parts, own, None if met.packed is None else found[-1])


def _loss_of_all(
    learner: Learner, objective: Objective, share: Share, embedded: list[Outputs], met: Met, factor: Tensor
) -> Lossy:
    """The loss of all ranks' rows, formed on each of them alike: its gradients at this rank's rows need no collective.

    What belongs to the step rather than to a row would be counted once a rank; it is divided by their number.
    """
    assert met.everyone is not None
    world, offset = learner.group.world, met.everyone["offset"]
    mine = slice(offset, offset + sum(len(micro["valid"]) for micro in share.micros))
    leaves = _leaves(objective, [met.everyone | {name: embedded[0][name] for name in objective.shared}])
    with learner.phases("forward"):
        loss_sum, _, parts = objective.measure(leaves, {"valid": met.everyone["valid"]})
        loss = (loss_sum.reshape(-1) * factor.to(loss_sum.dtype)).sum()
    with learner.phases("backward"):
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    own = {name: gradients[name][mine] for name in objective.coupled}
    own |= {name: gradients[name] / world for name in objective.shared}
    return Lossy(loss_sum.detach() / world, {name: part / world for name, part in parts.items()}, own, None)


def _by_micro(share: Share, objective: Objective, lossy: Lossy, theirs: Outputs) -> list[Outputs]:
    """Gradients of the outputs of each micro-batch: what this rank's losses gave them, and all ranks' losses."""
    sizes = [len(micro["valid"]) for micro in share.micros]
    flat = {name: lossy.own[name] + theirs[name] if theirs else lossy.own[name] for name in objective.coupled}
    sliced = {name: gradient.split(sizes) for name, gradient in flat.items()}
    whole = {name: lossy.own[name] for name in objective.shared}
    return [whole | {name: sliced[name][index] for name in sliced} for index in range(len(sizes))]
