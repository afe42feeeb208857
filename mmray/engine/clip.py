"""Gradient norms and clipping: of all weights as one, or of each branch by itself, sharded or not. For step.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mmray.errors import UsageError

Groups = dict[str, list[nn.Parameter]]
WHOLE, REST = "", "rest"


def groups_of(module: nn.Module, clip: str) -> Groups:
    """What is clipped together: everything (`global`), or (`branches`) each branch, and the rest. Raises UsageError."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if clip == "global":
        return {WHOLE: learning}
    if not hasattr(module, "branches"):
        raise UsageError(f"optimizer.clip branches: a {type(module).__name__} has no branches(); take `global`")
    branches: dict[str, nn.Module] = module.branches()  # type: ignore[operator]
    groups = {name: [p for p in branch.parameters() if p.requires_grad] for name, branch in branches.items()}
    taken = {id(parameter) for group in groups.values() for parameter in group}
    groups[REST] = [parameter for parameter in learning if id(parameter) not in taken]
    return {name: group for name, group in groups.items() if group}


def norms(groups: Groups) -> Tensor:
    """The gradient norm of each group, in their order; it stays on the device."""
    each = [_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    return torch.stack([norm.to(each[0].device) for norm in each])  # branches may lie on two devices


def clip(groups: Groups, found: Tensor, of_group: dict[str, float], max_norm: float) -> None:
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
