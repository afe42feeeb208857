"""AdamW in groups: matrices decay, biases, norms and the temperature do not; learning rates and freezing by name."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import AdamW, Optimizer

from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Optimizer as Section

SCALE = "lr_scale"  # of a group: its learning rate over that of the schedule


def freeze(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Weights whose names fit a pattern learn no more. Raises UsageError for a pattern that fits none."""
    for pattern in patterns:
        for name in _fitting(module, pattern, "optimizer.freeze"):
            module.get_parameter(name).requires_grad_(False)
    if patterns and not any(weight.requires_grad for weight in module.parameters()):
        raise UsageError(f"optimizer.freeze: {', '.join(patterns)} leaves no weight that learns")


def build(module: nn.Module, section: Section) -> AdamW:
    """Fused AdamW over the parameters that learn (Loshchilov & Hutter 2019), decay only where ndim >= 2."""
    scales = _scales(module, section.lr_scale)
    named: dict[tuple[float, int], list[nn.Parameter]] = {}  # by factor, and matrix, vector or scalar
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            named.setdefault((scales.get(name, 1.0), min(weight.ndim, 2)), []).append(
                weight
            )  # a scalar is never sharded
    groups = [
        {"params": named[scale, kind], "weight_decay": section.weight_decay if kind == 2 else 0.0, SCALE: scale}
        for scale, kind in sorted(named, reverse=True)
    ]
    return AdamW(groups, lr=section.lr, betas=(section.betas[0], section.betas[1]), eps=section.eps, fused=True)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """The learning rate of the schedule, times its own factor for each group, for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[SCALE]


def _scales(module: nn.Module, factors: Iterable[str]) -> dict[str, float]:
    """Factor of each weight that a `pattern=factor` fits; the last one counts."""
    scales: dict[str, float] = {}
    for text in factors:
        pattern, _, factor = text.rpartition("=")
        scales |= dict.fromkeys(_fitting(module, pattern, "optimizer.lr_scale"), float(factor))
    return scales


def _fitting(module: nn.Module, pattern: str, setting: str) -> list[str]:
    names = [name for name, _ in module.named_parameters()]
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise UsageError(
            f"{setting}: `{pattern}` fits no weight of the model; their names are like {names[0]} and {names[-1]}"
        )
    return found
