"""The state of a run by parameter names, for every strategy; state_io.py saves it.

Separate from state_io.py, because a run needs it before its first checkpoint imports DCP.
"""

from __future__ import annotations

from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmray.engine.run_state import CheckpointState, DestinationFn

FROM_CONFIG = ("params", "weight_decay", "betas", "eps")  # of a group: a trial of a sweep may resume with other values


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> CheckpointState:
    """Return `optimizer.state_dict()` by the model's parameter names, for every strategy.

    Not DCP's `get_optimizer_state_dict`: it takes a step of an optimizer that has no state yet, and loads nothing into
    one whose gradients exist already, as DDP's do here.
    """
    names, state = _trainable_names(module, optimizer), optimizer.state_dict()
    return {
        "state": {names[index]: dict(values) for index, values in state["state"].items()},
        "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
    }


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: CheckpointState) -> None:
    """Load what `optimizer_state` returned. Raises as `load_state_dict` does."""
    index_of = {name: index for index, name in enumerate(_trainable_names(module, optimizer))}
    pairs = zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    groups = [saved | {key: group[key] for key in FROM_CONFIG if key in group} for saved, group in pairs]
    by_index = {index_of[name]: values for name, values in state["state"].items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def load_destinations(module: nn.Module) -> DestinationFn:
    """Return where to read weights (into the module) and optimizer state (shards like those of its parameter)."""
    weights = {tensor_key("model", name): weight.detach() for name, weight in module.state_dict().items()}
    parameters = {tensor_key(name): weight.detach() for name, weight in module.named_parameters()}

    def destination(key: str, saved: Tensor) -> Tensor:
        like = weights.get(key)
        if like is not None and (like.shape, like.dtype) == (saved.shape, saved.dtype):
            return like
        name = key.removeprefix("optimizer/state/").partition("/")[0]
        like = parameters.get(name) if key.startswith("optimizer/state/") else None
        if like is not None and like.shape == saved.shape:
            return torch.empty_like(like, dtype=saved.dtype)
        return torch.empty_like(saved, device="cpu")

    return destination


def tensor_key(*path: str) -> str:
    """The key of a tensor in a checkpoint, such as `model/NAME`."""
    return "/".join(quote(part, safe=" ") for part in path)


def _trainable_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in the order of its state dict."""
    names = {weight: name for name, weight in module.named_parameters()}
    return [names[weight] for group in optimizer.param_groups for weight in group["params"]]
