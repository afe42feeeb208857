"""One optimizer step: a share of the global batch in, changed weights out, exactly as if the batch had been one.

A loss is a sum; gradients are divided by the count over all ranks, and since DDP averages, the loss is multiplied by
the world size. Objectives whose rows meet take two passes (GradCache, Gao et al. 2021, section 3): all micro-batches
are embedded, the loss is formed over the gathered global batch, and each micro-batch is forwarded again with the
gradient of its embeddings. The first micro-batch keeps its graph, so one micro-batch is the plain single pass.

What of an objective stands alone is measured in that second forward, with a graph of its own micro-batch only. Where
it first needs a partner for each row (matching), the first pass finds it, and then no graph is kept from it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mmray.engine import optimizer as clip
from mmray.engine.grad_cache import couple, gathered_names, travels
from mmray.engine.oom import MemoryVote, NoRoom, said
from mmray.engine.parallel import wrap
from mmray.engine.prefetch import Share
from mmray.engine.train_state import Learner, SeedOf, Sums, forward_of, loss_factors, row_wise_loss
from mmray.errors import is_out_of_memory
from mmray.objectives.protocol import ObjectiveParts, Outputs, split_objective


@dataclass(frozen=True)
class Found:
    """What forward and backward found. Tensors stay where they are: reading one makes the host wait for the device.

    A sum is a vector [K], one number for each count that the objective has (K is 1 but for a sum of objectives).
    """

    sums: dict[str, Tensor]  # this rank's: `loss` and the objective's parts, to be divided by the global counts
    shared: dict[str, Tensor]  # the same on every rank, such as `logit_scale`
    totals: Tensor  # float64 [K + 1], over all ranks: the objective's counts, and how many ranks wish to stop

    @property
    def counts(self) -> Tensor:
        """What the sums are divided by, float64 [K]; 1 where nothing was counted."""
        return self.totals[:-1].clamp(min=1)


@dataclass(frozen=True)
class StepResult(Found):
    """What came of a step, its update included."""

    grad_norm: float
    grad_norms: dict[str, float]  # of each group that is clipped by itself
    finite: bool  # False: the step was not taken, on no rank
    stopping: bool  # some rank wished to end the run after it


def optimizer_step(learner: Learner, share: Share, seed_of: SeedOf, stop: bool = False) -> StepResult:
    """Forward, backward and update on all ranks together; `stop` is this rank's wish to end the run after it.

    Raises NoRoom on all ranks together where the step may be taken again in smaller micro-batches, nothing having
    changed but the running statistics of a BatchNorm that is `local`, which have seen some rows twice then; the error
    itself, on the rank that met it, where the ranks have parted.
    """
    found, error = None, ""
    try:
        found = accumulate(learner, share, seed_of, stop)
    except (RuntimeError, MemoryError) as raised:
        if learner.group.world > 1 or not learner.may_vote or not is_out_of_memory(raised):
            raise
        error = said(raised)
    if found is None:
        raise NoRoom(error)  # here, where the error and what its traceback keeps alive are gone
    with learner.phases("optimizer"):
        grad_norms, finite, stopping = update(learner, found.totals[-1:])
    norm = math.hypot(*grad_norms.values())
    return StepResult(**vars(found), grad_norm=norm, grad_norms=grad_norms, finite=finite, stopping=stopping)


def accumulate(learner: Learner, share: Share, seed_of: SeedOf, stop: bool = False) -> Found:
    """Add the gradient of the global batch to the weights, scaled by the scaler. Raises as `optimizer_step` does."""
    parts = split_objective(learner.objective)
    local = _local_totals(parts, share, stop)
    run = _cached_accumulation if parts.global_loss is not None or parts.mining is not None else _plain_accumulation
    found = run(learner, parts, share, local, seed_of, MemoryVote(learner.group, learner.may_vote, learner.phases))
    with learner.phases("sync"):
        wrap.finalize_gradients(learner.model, learner.group)
    return found


def _local_totals(parts: ObjectiveParts, share: Share, stop: bool) -> Tensor:
    """This rank's part of the objective's counts, and its wish to stop: float64 [K + 1]."""
    objectives = [part for part in (parts.global_loss, parts.local_loss) if part is not None]
    counts = [torch.stack([part.count(micro) for micro in share.micros]).double().sum(0) for part in objectives]
    flat = torch.cat([count.reshape(-1) for count in counts])
    return torch.cat([flat, flat.new_full((1,), stop)])


def update(learner: Learner, wishes: Tensor) -> tuple[dict[str, float], bool, bool]:
    """Unscale, clip, step when the gradient is finite, and clear it; its norms before clipping, whether it was finite.

    wishes: [1], how many ranks wish to stop; whether any does is returned as well, for nowhere else in a step does the
    host wait for the device. All ranks decide alike without asking: after the synchronising backward they hold the same
    gradients, and one rank's NaN or infinity is everyone's.
    """
    learner.scaler.unscale_(learner.optimizer)
    found = clip.norms(learner.clip_groups)
    *norms, wishing = learner.group.read(torch.cat([found, wishes.to(found)])).tolist()
    grad_norms = dict(zip(learner.clip_groups, norms, strict=True))
    finite = all(math.isfinite(norm) for norm in grad_norms.values())
    if finite:
        clip.clip(learner.clip_groups, found, grad_norms, learner.clip_norm)
        learner.scaler.step(learner.optimizer)
        _constrain(wrap.unwrap(learner.model))
        wrap.post_step(learner.model)
    learner.scaler.update()
    wrap.zero_grad(learner.model, learner.optimizer)
    return grad_norms, finite, wishing > 0


def _constrain(module: nn.Module) -> None:
    constrain = getattr(module, "constrain", None)
    if constrain is not None:
        constrain()


@torch.no_grad()
def suspects(learner: Learner, share: Share) -> Tensor:
    """Positions in the run's order of this rank's rows for which the model's outputs are not finite."""
    model, found = wrap.without_sync(learner.model), [torch.zeros(0, dtype=torch.int64)]
    mining = split_objective(learner.objective).mining
    for index, micro in enumerate(share.micros):
        with wrap.preserve_buffers(wrap.unwrap(model)):
            outputs = forward_of(learner, model, micro, share, index, lambda _: 0)
            if mining is not None:  # partners from the same micro-batch: what the model makes of a pair shows as well
                near = {name: outputs[name] for name in mining.score_outputs}
                near |= {name: micro[name] for name in (*mining.gathered_inputs, "valid")}
                paired = micro | mining.sample_hard_negatives(outputs, micro, {**near, "offset": 0})
                outputs = forward_of(learner, model, paired, share, index, lambda _: 0)
        rows = [
            output.reshape(len(output), -1)
            for output in outputs.values()
            if output.ndim > 0 and len(output) == len(micro["pos"])
        ]
        bad = torch.stack([~row.isfinite().all(1) for row in rows]).any(0) & micro["valid"]
        found.append(micro["pos"][bad].cpu())
    return torch.cat(found)


def _plain_accumulation(
    learner: Learner, parts: ObjectiveParts, share: Share, local: Tensor, seed_of: SeedOf, vote: MemoryVote
) -> Found:
    """Plain accumulation: right for a loss in which every row stands alone."""
    local_loss = parts.local_loss
    assert local_loss is not None
    with learner.phases("sync"):
        totals = learner.group.all_reduce_sum(local)
    _, factor = loss_factors(learner, parts, share, totals)
    sums = Sums(0, len(factor))

    def forward(index: int) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = forward_of(learner, learner.model, share.micros[index], share, index, seed_of)
        scaled = row_wise_loss(local_loss, outputs, share.micros[index], factor, sums)
        return scaled, {name: outputs[name].detach() for name in learner.objective.scalar_outputs}

    def backward(index: int) -> None:
        scaled, _ = forward(index)
        with learner.phases("backward"):
            scaled.backward()

    last = len(share.micros) - 1
    for index in range(last):
        with wrap.maybe_no_sync(learner.model, last=False):
            vote.run(partial(backward, index))
    with wrap.maybe_no_sync(learner.model, last=True):
        scaled, shared = vote.run_and_agree(lambda: forward(last))
        with learner.phases("backward"):
            scaled.backward()
    return Found(sums.found, shared, totals)


def _cached_accumulation(
    learner: Learner, parts: ObjectiveParts, share: Share, local: Tensor, seed_of: SeedOf, vote: MemoryVote
) -> Found:
    """Cached accumulation: the gradient of a loss over all rows, with one micro-batch's activations in memory."""
    model, last = learner.model, len(share.micros) - 1
    first, embedded = vote.run_and_agree(lambda: _embed(learner, parts, share, seed_of))
    if last == 0 and first and not travels(parts):
        # Only the loss is left before the ranks meet: one vote a step will do. On the ring they meet within the loss.
        vote.may_vote = False
    gathered, micros, factors, sums, gradients = couple(learner, parts, share, embedded, local, vote)

    def forward(index: int) -> Outputs:
        return first.pop() if first else forward_of(learner, model, micros[index], share, index, seed_of)

    def backward(index: int, outputs: Outputs) -> None:
        roots = _roots(parts, outputs, gradients[index], with_shared=index == last)
        if parts.local_loss is not None:
            roots.append((row_wise_loss(parts.local_loss, outputs, micros[index], factors[1], sums), None))
        with learner.phases("backward"):
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])

    def again(index: int) -> None:
        backward(index, forward(index))

    for index in range(last):
        with wrap.maybe_no_sync(model, last=False):
            vote.run(partial(again, index))
    with wrap.maybe_no_sync(model, last=True):
        backward(last, vote.run_and_agree(lambda: forward(last)))
    return Found(sums.found, {name: embedded[0][name] for name in learner.objective.scalar_outputs}, gathered.totals)


def _embed(
    learner: Learner, parts: ObjectiveParts, share: Share, seed_of: SeedOf
) -> tuple[list[Outputs], list[Outputs]]:
    """Outputs of the first micro-batch with its graph, in a list to be taken from; and of all without.

    Where partners are to be found no graph is of use: the model has not yet seen them.
    """
    model, micros = learner.model, share.micros
    names = dict.fromkeys((*gathered_names(parts), *learner.objective.scalar_outputs))
    first: list[Outputs] = []
    if parts.mining is None:
        with wrap.maybe_no_sync(model, last=len(micros) == 1):
            first.append(forward_of(learner, model, micros[0], share, 0, seed_of))
    embedded = [{name: outputs[name].detach() for name in names} for outputs in first]
    inside, missing = wrap.without_sync(model), range(len(first), len(micros))
    with torch.no_grad(), wrap.preserve_buffers(wrap.unwrap(model)) if missing else nullcontext():
        for index in missing:
            outputs = forward_of(learner, inside, micros[index], share, index, seed_of)
            embedded.append({name: outputs[name].detach() for name in names})
    return first, embedded


def _roots(
    parts: ObjectiveParts, outputs: Outputs, gradients: Outputs, with_shared: bool
) -> list[tuple[Tensor, Tensor | None]]:
    """Outputs to go backward from, with their cached gradients; those of frozen branches take none.

    Outputs that belong to the step take their gradient once.
    """
    if parts.global_loss is None:
        return []
    names = parts.global_loss.gathered_outputs + (parts.global_loss.scalar_outputs if with_shared else ())
    return [(outputs[name], gradients[name]) for name in names if outputs[name].requires_grad]
