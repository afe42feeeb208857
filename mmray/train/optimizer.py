"""AdamW in two groups: matrices decay; biases, norms and the temperature do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.optim import AdamW, Optimizer

if TYPE_CHECKING:
    from mmray.config import Optimizer as Section


def build(module: nn.Module, section: Section) -> AdamW:
    """Fused AdamW over the parameters that learn (Loshchilov & Hutter 2019), decay only where ndim >= 2."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in learning if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=section.lr, betas=(section.betas[0], section.betas[1]), eps=section.eps, fused=True)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """The learning rate of every group, for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
