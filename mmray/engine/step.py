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
from mmray.engine.grad_cache import cached_loss_gradients, gathered_output_names, uses_ring
from mmray.engine.oom import OomGuard, RecoverableOom, error_text
from mmray.engine.parallel import wrap
from mmray.engine.prefetch import LocalBatch
from mmray.engine.run_state import LossMeter, SeedFn, TrainState, forward_micro_batch, loss_factors, weighted_local_loss
from mmray.errors import is_out_of_memory
from mmray.objectives.protocol import ObjectiveParts, Outputs, split_objective


@dataclass(frozen=True)
class AccumulationResult:
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
class StepResult(AccumulationResult):
    """What came of a step, its update included."""

    grad_norm: float
    grad_norms: dict[str, float]  # of each group that is clipped by itself
    finite: bool  # False: the step was not taken, on no rank
    stopping: bool  # some rank wished to end the run after it


def optimizer_step(state: TrainState, share: LocalBatch, seed_of: SeedFn, stop: bool = False) -> StepResult:
    """Forward, backward and update on all ranks together; `stop` is this rank's wish to end the run after it.

    Raises NoRoom on all ranks together where the step may be taken again in smaller micro-batches, nothing having
    changed but the running statistics of a BatchNorm that is `local`, which have seen some rows twice then; the error
    itself, on the rank that met it, where the ranks have parted.
    """
    found, error = None, ""
    try:
        found = accumulate_gradients(state, share, seed_of, stop)
    except (RuntimeError, MemoryError) as raised:
        if state.group.world > 1 or not state.can_recover_oom or not is_out_of_memory(raised):
            raise
        error = error_text(raised)
    if found is None:
        raise RecoverableOom(error)  # here, where the error and what its traceback keeps alive are gone
    with state.timers("optimizer"):
        grad_norms, finite, stopping = apply_update(state, found.totals[-1:])
    norm = math.hypot(*grad_norms.values())
    return StepResult(**vars(found), grad_norm=norm, grad_norms=grad_norms, finite=finite, stopping=stopping)


def accumulate_gradients(
    state: TrainState, share: LocalBatch, seed_of: SeedFn, stop: bool = False
) -> AccumulationResult:
    """Add the gradient of the global batch to the weights, scaled by the scaler. Raises as `optimizer_step` does."""
    parts = split_objective(state.objective)
    local = _local_totals(parts, share, stop)
    run = _cached_accumulation if parts.global_loss is not None or parts.mining is not None else _plain_accumulation
    found = run(state, parts, share, local, seed_of, OomGuard(state.group, state.can_recover_oom, state.timers))
    with state.timers("sync"):
        wrap.finalize_gradients(state.model, state.group)
    return found


def _local_totals(parts: ObjectiveParts, share: LocalBatch, stop: bool) -> Tensor:
    """This rank's part of the objective's counts, and its wish to stop: float64 [K + 1]."""
    objectives = [part for part in (parts.global_loss, parts.local_loss) if part is not None]
    counts = [torch.stack([part.count(micro) for micro in share.micro_batches]).double().sum(0) for part in objectives]
    flat = torch.cat([count.reshape(-1) for count in counts])
    return torch.cat([flat, flat.new_full((1,), stop)])


def apply_update(state: TrainState, wishes: Tensor) -> tuple[dict[str, float], bool, bool]:
    """Unscale, clip, step when the gradient is finite, and clear it; its norms before clipping, whether it was finite.

    wishes: [1], how many ranks wish to stop; whether any does is returned as well, for nowhere else in a step does the
    host wait for the device. All ranks decide alike without asking: after the synchronising backward they hold the same
    gradients, and one rank's NaN or infinity is everyone's.
    """
    state.scaler.unscale_(state.optimizer)
    found = clip.grad_norms(state.clip_groups)
    *norms, wishing = state.group.to_host(torch.cat([found, wishes.to(found)])).tolist()
    grad_norms = dict(zip(state.clip_groups, norms, strict=True))
    finite = all(math.isfinite(norm) for norm in grad_norms.values())
    if finite:
        clip.clip_gradients(state.clip_groups, found, grad_norms, state.clip_norm)
        state.scaler.step(state.optimizer)
        _constrain(wrap.unwrap(state.model))
        wrap.post_step(state.model)
    state.scaler.update()
    wrap.zero_grad(state.model, state.optimizer)
    return grad_norms, finite, wishing > 0


def _constrain(module: nn.Module) -> None:
    constrain = getattr(module, "constrain", None)
    if constrain is not None:
        constrain()


@torch.no_grad()
def nonfinite_samples(state: TrainState, share: LocalBatch) -> Tensor:
    """Positions in the run's order of this rank's rows for which the model's outputs are not finite."""
    model, found = wrap.without_sync(state.model), [torch.zeros(0, dtype=torch.int64)]
    mining = split_objective(state.objective).mining
    for index, micro in enumerate(share.micro_batches):
        with wrap.preserve_buffers(wrap.unwrap(model)):
            outputs = forward_micro_batch(state, model, micro, share, index, lambda _: 0)
            if mining is not None:  # partners from the same micro-batch: what the model makes of a pair shows as well
                near = {name: outputs[name] for name in mining.score_outputs}
                near |= {name: micro[name] for name in (*mining.gathered_inputs, "valid")}
                paired = micro | mining.sample_hard_negatives(outputs, micro, {**near, "offset": 0})
                outputs = forward_micro_batch(state, model, paired, share, index, lambda _: 0)
        rows = [
            output.reshape(len(output), -1)
            for output in outputs.values()
            if output.ndim > 0 and len(output) == len(micro["pos"])
        ]
        bad = torch.stack([~row.isfinite().all(1) for row in rows]).any(0) & micro["valid"]
        found.append(micro["pos"][bad].cpu())
    return torch.cat(found)


def _plain_accumulation(
    state: TrainState, parts: ObjectiveParts, share: LocalBatch, local: Tensor, seed_of: SeedFn, vote: OomGuard
) -> AccumulationResult:
    """Plain accumulation: right for a loss in which every row stands alone."""
    local_loss = parts.local_loss
    assert local_loss is not None
    with state.timers("sync"):
        totals = state.group.all_reduce_sum(local)
    _, factor = loss_factors(state, parts, share, totals)
    sums = LossMeter(0, len(factor))

    def forward(index: int) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = forward_micro_batch(state, state.model, share.micro_batches[index], share, index, seed_of)
        scaled = weighted_local_loss(local_loss, outputs, share.micro_batches[index], factor, sums)
        return scaled, {name: outputs[name].detach() for name in state.objective.scalar_outputs}

    def backward(index: int) -> None:
        scaled, _ = forward(index)
        with state.timers("backward"):
            scaled.backward()

    last = len(share.micro_batches) - 1
    for index in range(last):
        with wrap.maybe_no_sync(state.model, last=False):
            vote.run(partial(backward, index))
    with wrap.maybe_no_sync(state.model, last=True):
        scaled, shared = vote.run_and_sync(lambda: forward(last))
        with state.timers("backward"):
            scaled.backward()
    return AccumulationResult(sums.found, shared, totals)


def _cached_accumulation(
    state: TrainState, parts: ObjectiveParts, share: LocalBatch, local: Tensor, seed_of: SeedFn, vote: OomGuard
) -> AccumulationResult:
    """Cached accumulation: the gradient of a loss over all rows, with one micro-batch's activations in memory."""
    model, last = state.model, len(share.micro_batches) - 1
    first, embedded = vote.run_and_sync(lambda: _embed(state, parts, share, seed_of))
    if last == 0 and first and not uses_ring(parts):
        # Only the loss is left before the ranks meet: one vote a step will do. On the ring they meet within the loss.
        vote.can_recover_oom = False
    gathered, micro_batches, factors, sums, gradients = cached_loss_gradients(
        state, parts, share, embedded, local, vote
    )

    def forward(index: int) -> Outputs:
        return first.pop() if first else forward_micro_batch(state, model, micro_batches[index], share, index, seed_of)

    def backward(index: int, outputs: Outputs) -> None:
        roots = _roots(parts, outputs, gradients[index], with_shared=index == last)
        if parts.local_loss is not None:
            roots.append((weighted_local_loss(parts.local_loss, outputs, micro_batches[index], factors[1], sums), None))
        with state.timers("backward"):
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])

    def again(index: int) -> None:
        backward(index, forward(index))

    for index in range(last):
        with wrap.maybe_no_sync(model, last=False):
            vote.run(partial(again, index))
    with wrap.maybe_no_sync(model, last=True):
        backward(last, vote.run_and_sync(lambda: forward(last)))
    return AccumulationResult(
        sums.found, {name: embedded[0][name] for name in state.objective.scalar_outputs}, gathered.totals
    )


def _embed(
    state: TrainState, parts: ObjectiveParts, share: LocalBatch, seed_of: SeedFn
) -> tuple[list[Outputs], list[Outputs]]:
    """Outputs of the first micro-batch with its graph, in a list to be taken from; and of all without.

    Where partners are to be found no graph is of use: the model has not yet seen them.
    """
    model, micro_batches = state.model, share.micro_batches
    names = dict.fromkeys((*gathered_output_names(parts), *state.objective.scalar_outputs))
    first: list[Outputs] = []
    if parts.mining is None:
        with wrap.maybe_no_sync(model, last=len(micro_batches) == 1):
            first.append(forward_micro_batch(state, model, micro_batches[0], share, 0, seed_of))
    embedded = [{name: outputs[name].detach() for name in names} for outputs in first]
    inside, missing = wrap.without_sync(model), range(len(first), len(micro_batches))
    with torch.no_grad(), wrap.preserve_buffers(wrap.unwrap(model)) if missing else nullcontext():
        for index in missing:
            outputs = forward_micro_batch(state, inside, micro_batches[index], share, index, seed_of)
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
