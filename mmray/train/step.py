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
class Found:
    """What forward and backward found. Tensors stay where they are: reading one makes the host wait for the device."""

    sums: dict[str, Tensor]  # this rank's: `loss` and the objective's parts, to be divided by the global count
    shared: dict[str, Tensor]  # the same on every rank, such as `logit_scale`
    totals: Tensor  # float64 [2], over all ranks: the objective's count, and how many ranks wish to stop


@dataclass(frozen=True)
class StepResult(Found):
    """What came of a step, its update included."""

    grad_norm: float
    finite: bool  # False: the step was not taken, on no rank


def optimizer_step(learner: Learner, share: Share, seed_of: SeedOf, stop: bool = False) -> StepResult:
    """Forward, backward and update on all ranks together; `stop` is this rank's wish to end the run after it."""
    found = accumulate(learner, share, seed_of, stop)
    grad_norm, finite = update(learner)
    return StepResult(**vars(found), grad_norm=grad_norm, finite=finite)


def accumulate(learner: Learner, share: Share, seed_of: SeedOf, stop: bool = False) -> Found:
    """Add the gradient of the global batch to the weights, scaled by the scaler."""
    local = _local_totals(learner.objective, share, stop)
    run = _coupled if learner.objective.coupled else _row_by_row
    return run(learner, share, local, seed_of)


def _local_totals(objective: Objective, share: Share, stop: bool) -> Tensor:
    """This rank's part of the objective's count, and its wish to stop: float64 [2]."""
    count = torch.stack([objective.count(micro) for micro in share.micros]).sum(dtype=torch.float64)
    return torch.stack([count, count.new_full((), stop)])


def _factor(learner: Learner, totals: Tensor) -> Tensor:
    """From a rank's loss sum to its part of the mean over all ranks; times the world, for DDP averages."""
    return learner.group.world / totals[0].clamp(min=1)


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


def _row_by_row(learner: Learner, share: Share, local: Tensor, seed_of: SeedOf) -> Found:
    """Plain accumulation: right for a loss in which every row stands alone."""
    totals = learner.group.all_reduce_sum(local)
    factor = _factor(learner, totals)
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
    return Found(sums, shared, totals)


def _coupled(learner: Learner, share: Share, local: Tensor, seed_of: SeedOf) -> Found:
    """Cached accumulation: the gradient of a loss over all rows, with one micro-batch's activations in memory."""
    model, objective, last = learner.model, learner.objective, len(share.micros) - 1
    with synchronised(model, last=last == 0):
        first = _forward(learner, model, share, 0, seed_of)
    embedded = [_detached(first, objective)]
    with torch.no_grad(), buffers_kept(unwrapped(model)) if last else nullcontext():
        for index in range(1, len(share.micros)):
            embedded.append(_detached(_forward(learner, unwrapped(model), share, index, seed_of), objective))
    sums, gradients, totals = _loss_and_gradients(learner, share, embedded, local)
    for index in range(len(share.micros)):
        with synchronised(model, last=index == last):
            outputs = first if index == 0 else _forward(learner, model, share, index, seed_of)
            names = objective.coupled + (objective.shared if index == last else ())  # shared gradients count once
            _backward(outputs, gradients[index], names)
    return Found(sums, {name: embedded[0][name] for name in objective.shared}, totals)


def _detached(outputs: Outputs, objective: Objective) -> Outputs:
    return {name: outputs[name].detach() for name in (*objective.coupled, *objective.shared)}


def _backward(outputs: Outputs, gradients: Outputs, names: tuple[str, ...]) -> None:
    """Continue the backward from given gradients of the outputs; outputs of frozen branches take none."""
    learning = [name for name in names if outputs[name].requires_grad]
    torch.autograd.backward([outputs[name] for name in learning], [gradients[name] for name in learning])


def _loss_and_gradients(
    learner: Learner, share: Share, embedded: list[Outputs], local: Tensor
) -> tuple[dict[str, Tensor], list[Outputs], Tensor]:
    """Loss over the gathered global batch, its gradient at the outputs of each micro-batch of this rank, the totals."""
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
    everyone, totals = _everyone(learner.group, coupled, rows["valid"], share.rows, local)
    loss_sum, _, parts = objective.measure(leaves, rows, everyone)
    loss = learner.scaler.scale(loss_sum * _factor(learner, totals).to(loss_sum.dtype))
    flat = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    sizes = [len(micro["valid"]) for micro in share.micros]
    sliced = {name: flat[name].split(sizes) for name in objective.coupled}
    whole = {name: flat[name] for name in objective.shared}
    gradients = [whole | {name: sliced[name][index] for name in sliced} for index in range(len(sizes))]
    return {"loss": loss_sum.detach(), **parts}, gradients, totals


def _everyone(
    group: Group, coupled: Outputs, valid: Tensor, rows: int, local: Tensor
) -> tuple[dict[str, Any] | None, Tensor]:
    """The coupled outputs of all ranks, padded to `rows` a rank, and the sum of `local`; one collective each way.

    They go packed side by side with `valid`, in float32 at least, so that sums over ranks do not round to bfloat16;
    `local` rides along as a first row, for on slow links the number of collectives counts, not their size.
    """
    if group.world == 1:
        return None, local
    columns = [output.flatten(1) for output in coupled.values()]
    dtype = torch.promote_types(torch.float32, columns[0].dtype)
    packed = torch.cat([*(column.to(dtype) for column in columns), valid.to(dtype)[:, None]], dim=1)
    header = F.pad(local.to(dtype), (0, packed.shape[1] - len(local)))[None]
    gathered = group.gather(torch.cat([header, F.pad(packed, (0, 0, 0, rows - len(packed)))]))
    by_rank = gathered.view(group.world, rows + 1, -1)
    totals = by_rank[:, 0, : len(local)].detach().double().sum(0)
    *parts, flags = by_rank[:, 1:].flatten(0, 1).split([*(column.shape[1] for column in columns), 1], dim=1)
    everyone: dict[str, Any] = {
        name: part.reshape(-1, *output.shape[1:]) for (name, output), part in zip(coupled.items(), parts, strict=True)
    }
    return everyone | {"valid": flags[:, 0] > 0, "offset": group.rank * rows}, totals
