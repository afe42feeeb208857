"""AdamW with parameter groups, gradient clipping, learning-rate schedule, and EMA of the weights."""

from __future__ import annotations

import math
from collections import defaultdict
from fnmatch import fnmatchcase
from inspect import unwrap
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from mmray.engine.parallel.strategy import is_dtensor
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Optimizer as OptimizerConfig

LR_SCALE = "lr_scale"  # key of a parameter group: its multiplier of the learning rate
COOLDOWN_FRACTION = 0.2  # of the steps after warm-up, in which the schedule `cooldown` decays


class EagerAdamW(AdamW):
    """AdamW without the decorators of its methods for torch.compile, which import torch._dynamo (1.1 s) when called."""

    add_param_group, zero_grad = unwrap(AdamW.add_param_group), unwrap(AdamW.zero_grad)
    state_dict, load_state_dict = unwrap(AdamW.state_dict), unwrap(AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(AdamW.step))


def freeze_parameters(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match a pattern. Raises UsageError for a pattern without matches."""
    for pattern in patterns:
        for name in _matching(module, pattern, "optimizer.freeze"):
            module.get_parameter(name).requires_grad_(False)
    if patterns and not any(weight.requires_grad for weight in module.parameters()):
        raise UsageError(f"optimizer.freeze: {', '.join(patterns)} leaves no trainable parameter")


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> AdamW:
    """Fused AdamW over the trainable parameters (Loshchilov & Hutter 2019), with weight decay if ndim >= 2.

    The last `pattern=factor` of `lr_multipliers` that matches a parameter applies to it.
    """
    scales: dict[str, float] = {}
    for text in config.lr_multipliers:
        pattern, _, factor = text.rpartition("=")
        scales |= dict.fromkeys(_matching(module, pattern, "optimizer.lr_multipliers"), float(factor))
    by_scale_and_ndim: dict[tuple[float, int], list[nn.Parameter]] = defaultdict(list)
    for name, weight in module.named_parameters():
        if weight.requires_grad:  # scalars in their own group: FSDP does not shard them, fused AdamW takes one kind
            by_scale_and_ndim[scales.get(name, 1.0), min(weight.ndim, 2)].append(weight)
    groups = [
        {"params": weights, "weight_decay": config.weight_decay if ndim == 2 else 0.0, LR_SCALE: scale}
        for (scale, ndim), weights in sorted(by_scale_and_ndim.items(), key=lambda item: item[0], reverse=True)
    ]
    return EagerAdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate for the next step, times the multiplier of each group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[LR_SCALE]


def _matching(module: nn.Module, pattern: str, setting: str) -> list[str]:
    names = [name for name, _ in module.named_parameters()]
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        raise UsageError(f"{setting}: `{pattern}` matches no parameter; names are like {names[0]} and {names[-1]}")
    return matching


def grad_norm(weights: list[nn.Parameter]) -> Tensor:
    """The norm of all gradients, a scalar on the device."""
    norms = [get_total_norm([w.grad for w in part if w.grad is not None]) for part in _by_tensor_type(weights)]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients(weights: list[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients down to `max_norm`."""
    for part in _by_tensor_type(weights):
        clip_grads_with_norm_(part, max_norm, norm)


def _by_tensor_type(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split weights with a gradient into DTensors and plain ones: torch's foreach functions take one kind."""
    weights = [weight for weight in weights if weight.grad is not None]
    sharded = [weight for weight in weights if is_dtensor(weight.grad)]
    plain = [weight for weight in weights if not is_dtensor(weight.grad)]
    return [part for part in (sharded, plain) if part]


def lr_at(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of step `step`, counted from 0: linear warm-up, then the schedule.

    Step `warmup_steps` is the first at the peak; except for `constant`, the step after the last would have peak x
    final_lr_fraction. `cosine`: Loshchilov & Hutter 2017, equation 5. `cooldown`: Hägele et al. 2024.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if config.schedule == "constant":
        decay = 1.0
    elif config.schedule == "cosine":
        decay = (1 + math.cos(math.pi * progress)) / 2
    else:
        decay_fraction = COOLDOWN_FRACTION if config.schedule == "cooldown" else 1.0
        decay = min(1.0, (1 - progress) / decay_fraction)
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * decay)


class ExponentialMovingAverage(AveragedModel):
    """EMA of the weights: average = decay x average + (1 - decay) x weights.

    It starts at the weights after the first step. Buffers are copied.

    torch's update copies the step count to the device each time, which makes the host wait.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        weight = 1 - self.decay if self.n_averaged else 1.0
        torch._foreach_lerp_(list(self.module.parameters()), list(model.parameters()), weight)
        for average, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(buffer)
        self.n_averaged += 1
