"""One optimizer step: a share of the global batch in, changed weights out, exactly as if the batch had been one.

A loss is a sum; gradients are divided by the count over all ranks, and since DDP averages, the loss is multiplied by
the world size. Objectives whose rows meet take two passes (GradCache, Gao et al. 2021, section 3): all micro-batches
are embedded, the loss is formed over the gathered global batch, and each micro-batch is forwarded again with the
gradient of its embeddings. The first micro-batch keeps its graph, so one micro-batch is the plain single pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from mmray.objectives.protocol import Objective, Outputs
from mmray.train.feed import Share
from mmray.train.group import Group
from mmray.train.parallel import buffers_kept, synchronised, unwrapped
from mmray.train.precision import Precision
from mmray.train.seeding import seeded

SeedOf = Callable[[int], int]  # micro index -> seed of its forward


@dataclass(frozen=True)
class Learner:
    """Everything a step changes or consults, apart from the rows."""

    model: nn.Module  # as train/parallel.py wrapped it
    objective: Objective
    group: Group
    precision: Precision
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    clip_norm: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What came of a step. Tensors stay where they are: reading one makes the host wait for the device."""

    sums: dict[str, Tensor]  # this rank's: `loss` and the objective's parts, to be divided by the global count
    shared: dict[str, Tensor]  # the same on every rank, such as `logit_scale`
    grad_norm: float
    finite: bool  # False: the step was not taken, on no rank


def optimizer_step(learner: Learner, share: Share, total: Tensor, seed_of: SeedOf) -> StepResult:
    """Forward, backward and update on all ranks together; `total` is the global count of the objective, a scalar."""
    sums, shared = accumulate(learner, share, total, seed_of)
    grad_norm, finite = update(learner)
    return StepResult(sums, shared, grad_norm, finite)


def local_count(objective: Objective, share: Share) -> Tensor:
    """This rank's part of the global count, a float64 scalar."""
    return torch.stack([objective.count(micro) for micro in share.micros]).sum(dtype=torch.float64)


def accumulate(
    learner: Learner, share: Share, total: Tensor, seed_of: SeedOf
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add the gradient of the global batch to the weights, scaled by the scaler; returns local sums, shared outputs."""
    factor = learner.group.world / total.clamp(min=1)
    run = _coupled if learner.objective.coupled else _row_by_row
    return run(learner, share, factor, seed_of)


def update(learner: Learner) -> tuple[float, bool]:
    """Unscale, clip, step when the gradient is finite, and clear it; returns its norm before clipping, and whether.

    All ranks decide alike without asking: after the synchronising backward they hold the same gradients, and one
    rank's NaN or infinity is everyone's.
    """
    learner.scaler.unscale_(learner.optimizer)
    parameters = [p for group in learner.optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters])
    grad_norm = norm.item()
    finite = math.isfinite(grad_norm)
    if finite:
        if 0 < learner.clip_norm < grad_norm:
            clip_grads_with_norm_(parameters, learner.clip_norm, norm)
        learner.scaler.step(learner.optimizer)
        _constrain(unwrapped(learner.model))
    learner.scaler.update()
    learner.optimizer.zero_grad(set_to_none=True)
    return grad_norm, finite


def _constrain(module: nn.Module) -> None:
    constrain = getattr(module, "constrain", None)
    if constrain is not None:
        constrain()


def _forward(learner: Learner, model: nn.Module, share: Share, index: int, seed_of: SeedOf) -> Outputs:
    """Outputs of one micro-batch; a stand-in row leaves no trace in running statistics."""
    kept = buffers_kept(unwrapped(model)) if share.hollow[index] else nullcontext()
    with kept, seeded(seed_of(index), learner.group.device), learner.precision.autocast():
        outputs: Outputs = model(share.micros[index])
        return outputs


def _row_by_row(
    learner: Learner, share: Share, factor: Tensor, seed_of: SeedOf
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Plain accumulation: right for a loss in which every row stands alone."""
    sums: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}
    last = len(share.micros) - 1
    for index, micro in enumerate(share.micros):
        with synchronised(learner.model, last=index == last):
            outputs = _forward(learner, learner.model, share, index, seed_of)
            loss_sum, _, parts = learner.objective.measure(outputs, micro)
            learner.scaler.scale(loss_sum * factor.to(loss_sum.dtype)).backward()
        for name, value in {"loss": loss_sum, **parts}.items():
            sums[name] = sums.get(name, 0) + value.detach()
        shared = {name: outputs[name].detach() for name in learner.objective.shared}
    return sums, shared


def _coupled(
    learner: Learner, share: Share, factor: Tensor, seed_of: SeedOf
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Cached accumulation: the gradient of a loss over all rows, with one micro-batch's activations in memory."""
    model, objective, last = learner.model, learner.objective, len(share.micros) - 1
    with synchronised(model, last=last == 0):
        first = _forward(learner, model, share, 0, seed_of)
    embedded = [_detached(first, objective)]
    with torch.no_grad(), buffers_kept(unwrapped(model)) if last else nullcontext():
        for index in range(1, len(share.micros)):
            embedded.append(_detached(_forward(learner, unwrapped(model), share, index, seed_of), objective))
    sums, gradients = _loss_and_gradients(learner, share, embedded, factor)
    for index in range(len(share.micros)):
        with synchronised(model, last=index == last):
            outputs = first if index == 0 else _forward(learner, model, share, index, seed_of)
            names = objective.coupled + (objective.shared if index == last else ())  # shared gradients count once
            _backward(outputs, gradients[index], names)
    return sums, {name: embedded[0][name] for name in objective.shared}


def _detached(outputs: Outputs, objective: Objective) -> Outputs:
    return {name: outputs[name].detach() for name in (*objective.coupled, *objective.shared)}


def _backward(outputs: Outputs, gradients: Outputs, names: tuple[str, ...]) -> None:
    """Continue the backward from given gradients of the outputs; outputs of frozen branches take none."""
    learning = [name for name in names if outputs[name].requires_grad]
    torch.autograd.backward([outputs[name] for name in learning], [gradients[name] for name in learning])


def _loss_and_gradients(
    learner: Learner, share: Share, embedded: list[Outputs], factor: Tensor
) -> tuple[dict[str, Tensor], list[Outputs]]:
    """Loss over the gathered global batch, and its gradient at the outputs of each micro-batch of this rank."""
    objective = learner.objective
    leaves = {name: torch.cat([outputs[name] for outputs in embedded]) for name in objective.coupled}
    leaves |= {name: embedded[0][name].clone() for name in objective.shared}
    for leaf in leaves.values():
        leaf.requires_grad_()
    rows = {
        name: torch.cat([micro[name] for micro in share.micros])
        for name, tensor in share.micros[0].items()
        if tensor.ndim == 1
    }
    coupled = {name: leaves[name] for name in objective.coupled}
    loss_sum, _, parts = objective.measure(leaves, rows, _everyone(learner.group, coupled, rows["valid"], share.rows))
    loss = learner.scaler.scale(loss_sum * factor.to(loss_sum.dtype))
    flat = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    sizes = [len(micro["valid"]) for micro in share.micros]
    sliced = {name: flat[name].split(sizes) for name in objective.coupled}
    whole = {name: flat[name] for name in objective.shared}
    gradients = [whole | {name: sliced[name][index] for name in sliced} for index in range(len(sizes))]
    return {"loss": loss_sum.detach(), **parts}, gradients


def _everyone(group: Group, coupled: Outputs, valid: Tensor, rows: int) -> dict[str, Any] | None:
    """The coupled outputs of all ranks, padded to `rows` a rank; one collective forward, one backward.

    They go packed side by side with `valid`, in float32 at least, so that sums over ranks do not round to bfloat16.
    """
    if group.world == 1:
        return None
    columns = [output.flatten(1) for output in coupled.values()]
    dtype = torch.promote_types(torch.float32, columns[0].dtype)
    packed = torch.cat([*(column.to(dtype) for column in columns), valid.to(dtype)[:, None]], dim=1)
    gathered = group.gather(F.pad(packed, (0, 0, 0, rows - len(packed))))
    *parts, flags = gathered.split([*(column.shape[1] for column in columns), 1], dim=1)
    everyone: dict[str, Any] = {
        name: part.reshape(-1, *output.shape[1:]) for (name, output), part in zip(coupled.items(), parts, strict=True)
    }
    return everyone | {"valid": flags[:, 0] > 0, "offset": group.rank * rows}
