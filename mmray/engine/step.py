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

from mmray.data.stream.blocks import TEACHER_COLUMNS
from mmray.engine.grad_cache import GradCache, build_grad_cache
from mmray.engine.optimizer import (
    backward,
    clip_gradients,
    grad_norm,
    step_on_device,
    steps_on_device,
)
from mmray.engine.parallel.transforms import preserve_buffers
from mmray.engine.precision import fork_seeded_rng
from mmray.engine.prefetch import LocalBatch
from mmray.engine.run_state import SeedFn, TrainState
from mmray.models.protocol import as_model
from mmray.objectives.protocol import Batch, Outputs


@dataclass(frozen=True)
class StepResult:
    """Result of a step. Tensors stay on the device: reading one makes the host wait.

    Attributes:
        means: `loss` and the objective's metrics: this rank's part of the mean over the global
            batch, so that the mean is the sum over ranks.
        scalars: Scalar outputs of the model, equal on all ranks, such as `logit_scale`.
        grad_norm: Norm of the gradients before clipping. If it is not finite, no rank applied the
            update.
        stop: Whether some rank requested the end of the run after this step.
        by_source: `GradCache.by_source`.
    """

    means: dict[str, Tensor]
    scalars: dict[str, Tensor]
    grad_norm: float
    stop: bool
    by_source: Tensor

    @property
    def is_finite(self) -> bool:
        """Whether the gradient norm is finite, so that the update was applied."""
        return math.isfinite(self.grad_norm)


def optimizer_step(state: TrainState, batch: LocalBatch, seed_of: SeedFn) -> StepResult:
    """Take one step: forward and backward of all micro-batches, then the update."""
    return apply_update(state, accumulate_gradients(state, batch, seed_of))


def accumulate_gradients(
    state: TrainState, batch: LocalBatch, seed_of: SeedFn, stop: bool = False
) -> GradCache:
    """Add the gradient of the mean loss over the global batch to `grad` of the weights, multiplied
    by the loss scale of fp16.

    Args:
        state: The weights do not change.
        batch: This rank's rows; every rank has equally many micro-batches.
        stop: Whether this rank requests the end of the run after this step.

    Returns:
        The argument of `apply_update`.
    """
    first_outputs: Outputs | None = None
    embeddings: Outputs = {}
    if state.parts.needs_first_pass:
        first_outputs, embeddings = first_pass(state, batch, seed_of)
    cache = build_grad_cache(state, batch, embeddings, stop)
    last = len(cache.micro_batches) - 1
    for index, micro_batch in enumerate(cache.micro_batches):
        with state.strategy.micro_batch(state.model, last=index == last):
            outputs = first_outputs or forward_micro_batch(
                state, state.model, micro_batch, seed_of(index), batch.is_dummy[index]
            )
            tensors, gradients = cache.backward_inputs(state.parts, outputs, index)
            state.memory.sample()  # all activations are in memory now
            backward(tensors, gradients)
        cache.scalars = {
            name: outputs[name].detach() for name in state.objective.scalar_output_names
        }
        # Otherwise they would stay in memory during the next forward.
        del outputs, tensors, gradients
        first_outputs = None
        state.heartbeat.count_progress()
    state.strategy.end_backward(state.model, state.group)
    return cache


def first_pass(
    state: TrainState, batch: LocalBatch, seed_of: SeedFn
) -> tuple[Outputs | None, Outputs]:
    """Embed the rows of all micro-batches, so that a loss can compare all rows of a step
    (GradCache).

    Only the first micro-batch keeps its autograd graph; the others are embedded without gradients.

    Returns:
        The outputs of the first micro-batch with their graph, for the second pass; None with hard
        negatives, because the model has not seen them yet. And the outputs that the loss over all
        rows needs by name, of all micro-batches [rows, ...], and scalar outputs such as
        `logit_scale`, both without graph.
    """
    parts = state.parts
    micro_batches = batch.micro_batches
    names = dict.fromkeys((*parts.gathered_names, *state.objective.scalar_output_names))
    first: Outputs | None = None
    embedded: list[Outputs] = []
    if parts.mining_loss is None:
        with state.strategy.micro_batch(state.model, last=len(micro_batches) == 1):
            first = forward_micro_batch(
                state, state.model, micro_batches[0], seed_of(0), batch.is_dummy[0]
            )
        embedded.append({name: first[name].detach() for name in names})
    model = state.module
    remaining = range(len(embedded), len(micro_batches))
    with torch.no_grad(), preserve_buffers(model) if remaining else nullcontext():
        for index in remaining:
            outputs = forward_micro_batch(
                state, model, micro_batches[index], seed_of(index), batch.is_dummy[index]
            )
            embedded.append({name: outputs[name] for name in names})
            state.heartbeat.count_progress()
    return first, {
        name: value if value.ndim == 0 else torch.cat([outputs[name] for outputs in embedded])
        for name, value in embedded[0].items()
    }


def forward_micro_batch(
    state: TrainState, model: nn.Module, micro_batch: Batch, seed: int, is_dummy: bool
) -> Outputs:
    """Run the model on one micro-batch, with autocast, and return its outputs by name: tensors [B,
    ...] such as `image_embed`, or scalars such as `logit_scale`; and the embeddings of the teacher,
    if the batch has some.
    """
    statistics = preserve_buffers(state.module) if is_dummy else nullcontext()
    random_numbers = fork_seeded_rng(seed, state.group.device)
    with statistics, random_numbers, state.precision.autocast():
        outputs = model(micro_batch)
    teacher = {name: micro_batch[name] for name in TEACHER_COLUMNS if name in micro_batch}
    return {**outputs, **teacher}


def apply_update(state: TrainState, cache: GradCache) -> StepResult:
    """Unscale and clip the gradients, update the weights if they are finite, and zero them.

    All ranks decide alike: after the synchronizing backward their gradients are equal, and a NaN or
    infinity of one rank is in all of them.

    """
    state.scaler.unscale_(state.optimizer)
    weights = list(state.model.parameters())
    device_norm = grad_norm(weights)
    # The only place in a step where the host waits for the device.
    read = state.group.read_later(
        torch.cat([device_norm[None], cache.stop_requests.to(device_norm)])
    )
    on_device = steps_on_device(state.optimizer, weights) and not state.scaler.is_enabled()
    if on_device:
        # queued before the wait, so that the device has work meanwhile
        step_on_device(state.optimizer, weights, device_norm, state.clip_norm)
    norm, stop_requests = read().tolist()
    if math.isfinite(norm):
        if not on_device:
            if 0 < state.clip_norm < norm:
                clip_gradients(weights, device_norm, state.clip_norm)
            state.scaler.step(state.optimizer)
        as_model(state.module).clamp_parameters()
    state.scaler.update()
    zero_gradients(state)
    return StepResult(cache.means, cache.scalars, norm, stop_requests > 0, cache.by_source)


def zero_gradients(state: TrainState) -> None:
    """Zero the gradients; keep the tensors if they are views of the buckets of DDP."""
    state.optimizer.zero_grad(set_to_none=not state.strategy.keeps_gradients(state.model))
