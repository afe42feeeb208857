"""One optimizer step with the gradient of the whole global batch, however it is split into
micro-batches and ranks.

README.md, section "One step", describes the two passes of objectives whose rows interact
(GradCache). The local loss is computed in the second pass, with the graph of one micro-batch.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmray.engine.grad_cache import GradCache, attach_own_negatives, build_grad_cache
from mmray.engine.oom import OomGuard, RecoverableOom
from mmray.engine.optimizer import clip_gradients, grad_norm
from mmray.engine.parallel import strategy
from mmray.engine.precision import fork_seeded_rng
from mmray.engine.prefetch import LocalBatch, dummy_batch
from mmray.engine.run_state import SeedFn, TrainState
from mmray.errors import first_line, is_out_of_memory
from mmray.objectives.protocol import Batch, Outputs


@dataclass(frozen=True)
class StepResult:
    """Result of a step. Tensors stay on the device: reading one makes the host wait.

    A sum is a vector [K], one number for each count of the objective (K is 1 except for a sum of
    objectives).
    """

    sums: dict[str, Tensor]  # this rank's: `loss` and the objective's parts
    counts: Tensor  # float64 [K], at least 1, over all ranks: the divisors of the sums
    scalars: dict[str, Tensor]  # equal on all ranks, such as `logit_scale`
    grad_norm: float  # if it is not finite, no rank applied the update
    stop: bool  # some rank requested to end the run after this step

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.grad_norm)


def optimizer_step(
    state: TrainState, batch: LocalBatch, seed_of: SeedFn, stop: bool = False
) -> StepResult:
    """Forward, backward and update on all ranks together; `stop` is this rank's request to end the
    run afterwards.

    Raises RecoverableOom on all ranks together if the step can be retried with smaller
    micro-batches. Nothing has changed then except gradients, and running statistics of a `local`
    BatchNorm, which have seen some rows twice. If a rank that runs out of memory leaves a
    collective that others wait in, it raises the original error.
    """
    error = ""
    guard = oom_guard(state)
    try:
        cache, scalars = accumulate_gradients(state, batch, seed_of, stop, guard)
    except (RuntimeError, MemoryError) as raised:
        if state.group.world_size > 1 or not state.can_recover_oom or not is_out_of_memory(raised):
            raise
        error = first_line(raised)
    if error:
        # outside `except`: the traceback would keep the step's tensors alive
        raise RecoverableOom(error)
    with state.timers("optimizer"):
        grad_norm, stop_requested = apply_update(state, cache.num_stop_requests, guard)
    return StepResult(cache.sums, cache.loss_counts, scalars, grad_norm, stop_requested)


def oom_guard(state: TrainState) -> OomGuard:
    """Return the guard of one accumulation.

    A single rank needs none: no other rank waits for it in a collective.
    """
    return OomGuard(state.group, enabled=state.can_recover_oom and state.group.world_size > 1)


def accumulate_gradients(
    state: TrainState,
    batch: LocalBatch,
    seed_of: SeedFn,
    stop: bool = False,
    guard: OomGuard | None = None,
) -> tuple[GradCache, Outputs]:
    """Add the gradient of the global batch to the weights, scaled by the scaler; it is NaN if
    `guard` caught an OOM.

    Return the GradCache, which has the sums and counts of the loss, and the scalar outputs.
    """
    parts, guard = state.parts, guard or OomGuard(state.group)
    first_outputs: Outputs | None = None
    detached: list[Outputs] = []
    if parts.global_loss is not None or parts.mining_loss is not None:
        first_outputs, detached = guard.run(lambda: first_pass(state, batch, seed_of)) or (None, [])
        if guard.error is not None:
            batch = dummy_batch(batch)
            first_outputs, detached = first_pass(state, batch, seed_of, keep_graph=False)
    cache = build_grad_cache(state, batch, detached, stop, guard)
    scalars: Outputs = {}

    def forward(index: int) -> list[tuple[Tensor, Tensor | None]]:
        """Return the tensors that the backward of a micro-batch starts at, with their gradients."""
        nonlocal first_outputs
        micro_batch, outputs = cache.micro_batches[index], first_outputs
        first_outputs = None  # so that its graph is freed after the backward
        if outputs is None:
            outputs = forward_micro_batch(state, state.model, micro_batch, batch, index, seed_of)
        scalars.update(
            {name: outputs[name].detach() for name in state.objective.scalar_output_names}
        )
        backward_inputs = cache.backward_inputs(parts.global_loss, outputs, index)
        if parts.local_loss is not None:
            loss_sum, _, metrics = parts.local_loss.compute_loss(outputs, micro_batch)
            cache.add({"loss": loss_sum, **metrics}, local_loss=True)
            backward_inputs.append(
                ((loss_sum.reshape(-1) * cache.loss_weights[1].to(loss_sum.dtype)).sum(), None)
            )
        return backward_inputs

    def backward(backward_inputs: list[tuple[Tensor, Tensor | None]]) -> None:
        with state.timers("backward"):
            torch.autograd.backward(
                [tensor for tensor, _ in backward_inputs], [grad for _, grad in backward_inputs]
            )

    last = len(batch.micro_batches) - 1
    for index in range(last):
        with strategy.maybe_no_sync(state.model, last=False):
            guard.run(lambda index=index: backward(forward(index)))  # type: ignore[misc]
    with strategy.maybe_no_sync(state.model, last=True):
        backward_inputs = guard.run(lambda: forward(last))
        if guard.error is not None:
            first_outputs = None
            backward_inputs = nan_gradients(state, dummy_batch(batch), seed_of)
        backward(backward_inputs)
    with state.timers("sync"):
        strategy.average_replicated_gradients(state.model, state.group)
    return cache, scalars


def forward_micro_batch(
    state: TrainState,
    model: nn.Module,
    micro_batch: Batch,
    batch: LocalBatch,
    index: int,
    seed_of: SeedFn,
) -> Outputs:
    """Outputs of one micro-batch; a dummy row leaves running statistics unchanged.

    All forwards use this function.
    """
    preserved = (
        strategy.preserve_buffers(strategy.unwrap(model))
        if batch.is_dummy[index]
        else nullcontext()
    )
    seed = fork_seeded_rng(seed_of(index), state.group.device)
    with state.timers("forward"), preserved, seed, state.precision.autocast():
        return model(micro_batch)


def nan_gradients(
    state: TrainState, dummy: LocalBatch, seed_of: SeedFn
) -> list[tuple[Tensor, Tensor | None]]:
    """Outputs of a dummy row with NaN as their gradients, where the last backward of a rank without
    memory starts.

    So it takes part in the all-reduce that the other ranks wait in, and the norm is NaN on all of
    them.
    """
    (micro_batch,) = attach_own_negatives(state, dummy)
    outputs = forward_micro_batch(state, state.model, micro_batch, dummy, 0, seed_of)
    return [
        (output, torch.full_like(output, math.nan))
        for output in outputs.values()
        if output.requires_grad
    ]


def first_pass(
    state: TrainState, batch: LocalBatch, seed_of: SeedFn, keep_graph: bool = True
) -> tuple[Outputs | None, list[Outputs]]:
    """First pass: return the outputs of the first micro-batch with its graph, and those of all
    without.

    With hard negatives the former are None, because the model has not seen the negatives yet.
    """
    model, parts, micro_batches = state.model, state.parts, batch.micro_batches
    names = dict.fromkeys((*parts.gathered_names, *state.objective.scalar_output_names))
    first: Outputs | None = None
    detached: list[Outputs] = []
    if parts.mining_loss is None and keep_graph:
        with strategy.maybe_no_sync(model, last=len(micro_batches) == 1):
            first = forward_micro_batch(state, model, micro_batches[0], batch, 0, seed_of)
        detached.append({name: first[name].detach() for name in names})
    inner, missing = strategy.unwrap(model), range(len(detached), len(micro_batches))
    with torch.no_grad(), strategy.preserve_buffers(inner) if missing else nullcontext():
        for index in missing:
            outputs = forward_micro_batch(state, inner, micro_batches[index], batch, index, seed_of)
            detached.append({name: outputs[name].detach() for name in names})
    return first, detached


def apply_update(
    state: TrainState, num_stop_requests: Tensor, guard: OomGuard
) -> tuple[float, bool]:
    """Unscale, clip, step if the gradient is finite, and zero it.

    Return the norm before clipping, and whether any rank requested a stop. Raises RecoverableOom if
    a rank ran out of memory, which only a norm that is not finite can mean.

    num_stop_requests: [1], read here because this is the only place in a step where the host waits
    for the device. All ranks decide alike: after the synchronizing backward their gradients are
    equal, and a NaN or infinity of one rank is in all of them.
    """
    state.scaler.unscale_(state.optimizer)
    weights = list(state.model.parameters())
    device_norm = grad_norm(weights)
    norm, requests = state.group.to_host(
        torch.cat([device_norm[None], num_stop_requests.to(device_norm)])
    ).tolist()
    if not math.isfinite(norm) and guard.any_rank_failed():
        # unchanged; the gradients can be unscaled again
        state.scaler.update(state.scaler.get_scale())
        raise RecoverableOom(guard.error or "")
    if math.isfinite(norm):
        if 0 < state.clip_norm < norm:
            clip_gradients(weights, device_norm, state.clip_norm)
        state.scaler.step(state.optimizer)
        clamp_parameters = getattr(strategy.unwrap(state.model), "clamp_parameters", None)
        if clamp_parameters is not None:
            clamp_parameters()
    state.scaler.update()
    zero_gradients(state)
    return norm, requests > 0


def zero_gradients(state: TrainState) -> None:
    """Free the gradients, but not under DDP, where they are views of the buckets and every step has
    all of them.
    """
    state.optimizer.zero_grad(set_to_none=not isinstance(state.model, DistributedDataParallel))
