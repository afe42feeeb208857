"""AdamW in groups: matrices decay, biases, norms and the temperature do not; learning rates and freezing by name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Optimizer as Section


LR_SCALE = "lr_scale"  # of a group: its learning rate over that of the schedule


def freeze_parameters(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Weights whose names fit a pattern learn no more. Raises UsageError for a pattern that fits none."""
    for pattern in patterns:
        for name in _fitting(module, pattern, "optimizer.freeze"):
            module.get_parameter(name).requires_grad_(False)
    if patterns and not any(weight.requires_grad for weight in module.parameters()):
        raise UsageError(f"optimizer.freeze: {', '.join(patterns)} leaves no weight that learns")


def build_optimizer(module: nn.Module, section: Section) -> AdamW:
    """Fused AdamW over the parameters that learn (Loshchilov & Hutter 2019), decay only where ndim >= 2."""
    scales = _scales(module, section.lr_multipliers)
    named: dict[tuple[float, int], list[nn.Parameter]] = {}  # by factor, and matrix, vector or scalar
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            named.setdefault((scales.get(name, 1.0), min(weight.ndim, 2)), []).append(
                weight
            )  # a scalar is never sharded
    groups = [
        {"params": named[scale, kind], "weight_decay": section.weight_decay if kind == 2 else 0.0, LR_SCALE: scale}
        for scale, kind in sorted(named, reverse=True)
    ]
    return AdamW(groups, lr=section.lr, betas=(section.betas[0], section.betas[1]), eps=section.eps, fused=True)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """The learning rate of the schedule, times its own factor for each group, for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[LR_SCALE]


def _scales(module: nn.Module, factors: Iterable[str]) -> dict[str, float]:
    """Factor of each weight that a `pattern=factor` fits; the last one counts."""
    scales: dict[str, float] = {}
    for text in factors:
        pattern, _, factor = text.rpartition("=")
        scales |= dict.fromkeys(_fitting(module, pattern, "optimizer.lr_multipliers"), float(factor))
    return scales


def _fitting(module: nn.Module, pattern: str, setting: str) -> list[str]:
    names = [name for name, _ in module.named_parameters()]
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise UsageError(
            f"{setting}: `{pattern}` fits no weight of the model; their names are like {names[0]} and {names[-1]}"
        )
    return found


# Gradient norms and clipping: of all weights as one, or of each branch by itself, sharded or not. For step.py.
ClipGroups = dict[str, list[nn.Parameter]]
WHOLE, REST = "", "rest"


def make_clip_groups(module: nn.Module, clip_per: str) -> ClipGroups:
    """Parameters that share a norm: all (`model`), or each branch and the rest (`branch`). Raises UsageError."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if clip_per == "model":
        return {WHOLE: learning}
    if not hasattr(module, "branches"):
        raise UsageError(f"optimizer.clip_per branch: {type(module).__name__} has no branches(); use `model`")
    branches: dict[str, nn.Module] = module.branches()  # type: ignore[operator]
    groups = {name: [p for p in branch.parameters() if p.requires_grad] for name, branch in branches.items()}
    taken = {id(parameter) for group in groups.values() for parameter in group}
    groups[REST] = [parameter for parameter in learning if id(parameter) not in taken]
    return {name: group for name, group in groups.items() if group}


def grad_norms(groups: ClipGroups) -> Tensor:
    """The gradient norm of each group, in their order; it stays on the device."""
    each = [_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    return torch.stack([norm.to(each[0].device) for norm in each])  # branches may lie on two devices


def clip_gradients(groups: ClipGroups, found: Tensor, of_group: dict[str, float], max_norm: float) -> None:
    """Scale the gradients of each group whose norm is above `max_norm` down to it; 0 does not clip."""
    for norm, (name, group) in zip(found, groups.items(), strict=True):
        if not 0 < max_norm < of_group[name]:
            continue
        for same in _by_kind([p for p in group if p.grad is not None]):
            clip_grads_with_norm_(same, max_norm, norm.to(same[0].device))


def _norm(gradients: list[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(())
    parts = [get_total_norm(same) for same in _by_kind(gradients)]
    whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    if len(whole) == 1:
        return whole[0]
    return torch.linalg.vector_norm(torch.stack([part.to(whole[0].device) for part in whole]))


def _by_kind(tensors: list) -> list[list]:
    """Sharded ones and whole ones apart: torch computes with lists of one kind."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    return [kind for kind in (sharded, plain) if kind]


# The learning rate as a pure function of the step: linear warm-up, then the schedule.
def lr_at(step: int, section: Section, total_steps: int) -> float:
    """Learning rate of step `step`, counted from 0.

    Step `warmup_steps` is the first at the peak; the step after the last would be at the peak x final_lr_fraction,
    except for `constant`. `cosine`: Loshchilov & Hutter 2017, SGDR, equation 5, one period. `cooldown`: the peak, then
    linear (Hägele et al. 2024).
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / (section.warmup_steps + 1)
    progress = min(1.0, (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    height = _height(progress, section)
    return section.lr * (section.final_lr_fraction + (1 - section.final_lr_fraction) * height)


def _height(progress: float, section: Section) -> float:
    """From 1, at the peak, to 0, at the end, by the share of the steps after warm-up that are done."""
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    length = section.cooldown_fraction if section.schedule == "cooldown" else 1.0
    return min(1.0, (1 - progress) / length)


# Weights averaged over the steps of a run, which are then evaluated and exported.
class ExponentialMovingAverage(AveragedModel):
    """Exponential moving average of a model's weights: decay x average + (1 - decay) x weights after each step.

    Begins with the weights after the first step; buffers are the model's. torch's own update sends a device the number
    of steps so far each time, and so has the host wait for it, though no moving average asks for that number.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        share = 1 - self.decay if self.n_averaged else 1.0
        places: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for averaged, weight in zip(self.module.parameters(), model.parameters(), strict=True):
            places[weight.device][0].append(averaged)
            places[weight.device][1].append(weight)
        for averages, weights in places.values():
            torch._foreach_lerp_(averages, weights, share)
        for kept, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            kept.copy_(buffer)
        self.n_averaged += 1
