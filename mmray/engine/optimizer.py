"""Optimizers with parameter groups, gradient clipping, learning-rate schedules, and EMA of the
weights.

`optimizer.kind` and `optimizer.schedule` name a built-in one or your own; README.md has an example.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from inspect import unwrap
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Muon, Optimizer

from mmray import plugins
from mmray.engine.collectives import is_dtensor, to_local
from mmray.errors import UsageError, suggest
from mmray.models.protocol import as_model, find_blocks

if TYPE_CHECKING:
    from mmray.config import Optimizer as OptimizerConfig

Groups = list[dict[str, Any]]
LAST_BLOCKS = re.compile(r"(\w+)\[:-(\d+)\]")  # a value of optimizer.freeze, such as `text[:-2]`
LR_SCALE = "lr_scale"  # key of a parameter group: its multiplier of the learning rate
IS_HIDDEN = "is_hidden"  # key of a parameter group: its weights are matrices between hidden states
# CLIP's epsilon for ViTs; torch's 1e-8 is too small for gradients in bf16.
EPSILON = 1e-6
BUILT_IN = {"adamw": f"{__name__}:EagerAdamW", "muon": f"{__name__}:MuonAndAdamW"}
NORM_EPSILON = 1e-6  # as in torch's clip_grads_with_norm_
COOLDOWN_FRACTION = 0.2  # share of the steps after warm-up in which the schedule `cooldown` decays


class EagerAdamW(AdamW):
    """AdamW (Loshchilov & Hutter 2019) without the decorators for torch.compile, which import
    torch._dynamo (1.1 s).

    Args:
        groups: Parameter groups, dicts with `params` and options such as `weight_decay`.
        settings: Further arguments of AdamW; `fused` is True by default.
    """

    add_param_group = unwrap(AdamW.add_param_group)
    zero_grad = unwrap(AdamW.zero_grad)
    state_dict = unwrap(AdamW.state_dict)
    load_state_dict = unwrap(AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(AdamW.step))

    def __init__(self, groups: Groups, **settings: Any) -> None:
        super().__init__(groups, **{"fused": True} | settings)


class MuonAndAdamW(Optimizer):
    """Muon (Jordan et al. 2024) for hidden matrices and AdamW for all other weights, as one
    optimizer.

    Updates of Muon are scaled to the size of AdamW's (Liu et al. 2025, section 2.2), so that both
    take the same learning rate and weight decay.

    It has the interface of torch.optim.Optimizer: `step()`, `zero_grad()`, `state_dict()` and
    `param_groups`.

    Args:
        groups: Parameter groups with `params`, `weight_decay` and `is_hidden` (Muon if True).
        lr: Learning rate.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
        settings: Further arguments of Muon.
    """

    def __init__(
        self, groups: Groups, lr: float, betas: tuple[float, float], eps: float, **settings: Any
    ) -> None:
        hidden = [group for group in groups if group[IS_HIDDEN]]
        others = [group for group in groups if not group[IS_HIDDEN]]
        self._optimizers: list[Optimizer] = []
        if hidden:
            self._optimizers.append(
                Muon(hidden, lr=lr, **{"adjust_lr_fn": "match_rms_adamw"} | settings)
            )
        if others:
            self._optimizers.append(EagerAdamW(others, lr=lr, betas=betas, eps=eps))
        super().__init__(
            [group for optimizer in self._optimizers for group in optimizer.param_groups], {}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both optimizers.

        Args:
            closure: Not supported; must be None.
        """
        groups = iter(self.param_groups)
        # assigned in each step, because load_state_dict replaces groups and state
        for optimizer in self._optimizers:
            optimizer.param_groups = list(islice(groups, len(optimizer.param_groups)))
            optimizer.state = self.state
            optimizer.step()


def freeze_parameters(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match a pattern.

    Args:
        module: The model, changed in place.
        patterns: Each is a shell pattern of parameter names, such as `image.tower.*`; the name of a
            part, a key of what the model's `parameter_parts()` returns; or `BRANCH[:-N]`, such as
            `image[:-2]`, for all of a branch except its last N blocks (such as transformer layers)
            and what follows them (LiT, Zhai et al. 2022, arXiv:2111.07991).

    Raises:
        UsageError: A pattern has no match, or no trainable parameter is left.
    """
    for pattern in patterns:
        if matched := LAST_BLOCKS.fullmatch(pattern):
            layers, num_blocks = _layers(module, matched[1], "optimizer.freeze")
            last = num_blocks - int(matched[2])
            if last < 0:
                raise UsageError(
                    f"optimizer.freeze: `{pattern}`: the branch has only {num_blocks} blocks"
                )
            names = [name for name, layer in layers.items() if layer <= last]
        else:
            names = _matching(module, pattern, "optimizer.freeze")
        for name in names:
            module.get_parameter(name).requires_grad_(False)
    if patterns and not any(weight.requires_grad for weight in module.parameters()):
        raise UsageError(f"optimizer.freeze: {', '.join(patterns)} leaves no trainable parameter")


def _layers(module: nn.Module, branch: str, setting: str) -> tuple[dict[str, int], int]:
    """Number the weights of a branch by layer, as BEiT does (Bao et al. 2022, arXiv:2106.08254).

    Args:
        branch: Name of one of its branches.
        setting: Name of the setting, for errors.

    Returns:
        Layer of each weight by name: 0 before the first block, n in block n of L, L + 1 after the
        last one, such as the projection; and L.

    Raises:
        UsageError: The model has no such branch, or the branch has no blocks.
    """
    branches = as_model(module).branches()
    if branch not in branches:
        raise UsageError(
            f"{setting}: the model has no branch `{branch}`; {suggest(branch, branches)}"
        )
    blocks = list(find_blocks(branches[branch]))
    if not blocks:
        raise UsageError(f"{setting}: the branch `{branch}` has no blocks")
    block_of = {
        weight: number for number, block in enumerate(blocks, 1) for weight in block.parameters()
    }
    names = {weight: name for name, weight in module.named_parameters()}
    layers = {}
    layer = 0  # weights are in the order of the forward pass
    for weight in branches[branch].parameters():
        if weight in block_of:
            layer = block_of[weight]
            layers[names[weight]] = layer
        else:
            layers[names[weight]] = len(blocks) + 1 if layer else 0
    return layers, len(blocks)


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer that `config.kind` names over the trainable parameters.

    Weights with two or more dimensions get weight decay. The last `pattern=factor` of
    `lr_multipliers` that matches a parameter applies to it. With `layer_decay` the learning rate of
    a block is that of the next block times the factor.

    Args:
        config: The `optimizer` section. A user's class in `kind`, such as `torch.optim:SGD`, is
            called with (groups, lr=..., **settings), where groups are dicts with `params`,
            `weight_decay` and `lr_scale`, and settings those of `optimizer.settings`.

    Returns:
        A torch optimizer; each of its parameter groups has the multiplier of the learning rate as
        `lr_scale`, besides `params` and `weight_decay`.

    Raises:
        UsageError: The class cannot be imported or called, or a pattern matches no parameter.
    """
    scales: dict[str, float] = {}
    for text in config.lr_multipliers:
        pattern, _, factor = text.rpartition("=")
        scales |= dict.fromkeys(
            _matching(module, pattern, "optimizer.lr_multipliers"), float(factor)
        )
    for text in config.layer_decay:
        branch, _, factor = text.rpartition("=")
        layers, num_blocks = _layers(module, branch, "optimizer.layer_decay")
        for name, layer in layers.items():
            decay = float(factor) ** (num_blocks + 1 - layer)
            scales[name] = scales.get(name, 1.0) * decay
    hidden = _hidden_matrices(module) if config.kind == "muon" else set()
    by_key: dict[tuple[float, int, bool], list[nn.Parameter]] = defaultdict(list)
    for name, weight in module.named_parameters():
        # scalars in their own group: FSDP does not shard them, fused AdamW takes one kind
        if weight.requires_grad:
            by_key[scales.get(name, 1.0), min(weight.ndim, 2), weight in hidden].append(weight)
    groups: Groups = []
    for scale, ndim, is_hidden in sorted(by_key, reverse=True):
        group: dict[str, Any] = {
            "params": by_key[scale, ndim, is_hidden],
            "weight_decay": config.weight_decay if ndim == 2 else 0.0,
            LR_SCALE: scale,
        }
        if config.kind == "muon":
            group[IS_HIDDEN] = is_hidden
        groups.append(group)
    optimizer = _construct(config, groups)
    # `zero_grad` takes one kernel per dtype instead of one per weight
    optimizer.defaults["foreach"] = True
    return optimizer


def _construct(config: OptimizerConfig, groups: Groups) -> Optimizer:
    arguments: dict[str, Any] = {"lr": config.lr}
    if config.kind in BUILT_IN:
        arguments |= {"betas": config.betas, "eps": EPSILON}
    name = BUILT_IN.get(config.kind, config.kind)
    build = plugins.load_class(name, "optimizer.kind", tuple(BUILT_IN))
    try:
        optimizer = build(groups, **arguments | config.settings)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"optimizer.kind: cannot build `{config.kind}`: {error}; see optimizer.settings"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer.kind: `{config.kind}` built a {type(optimizer).__name__}, no "
            "torch.optim.Optimizer"
        )
    return optimizer


def _hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Matrices, except embeddings and output heads (as many rows as the largest embedding)."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    vocab_size = max((part.num_embeddings for part in embeddings), default=0)
    matrices = {
        weight for weight in module.parameters() if weight.ndim == 2 and len(weight) != vocab_size
    }
    return matrices - {part.weight for part in embeddings}


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate for the next step, times the multiplier of each parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)


def _matching(module: nn.Module, pattern: str, setting: str) -> list[str]:
    """Return the parameters that a pattern matches, or those of the part with this name.

    Raises UsageError if there are none.
    """
    parts = as_model(module).parameter_parts()
    if pattern in parts:
        return list(parts[pattern])
    names = [name for name, _ in module.named_parameters()]
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        raise UsageError(
            f"{setting}: `{pattern}` matches no parameter; names are like {names[0]} "
            f"and {names[-1]}"
        )
    return matching


def backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to `grad` of the weights as torch.autograd.backward does, which imports sympy
    to compare shapes: a second of CPU time before the first step.

    Args:
        tensors: Tensors with a graph.
        gradients: The gradient at each, of its shape; None: of a scalar, 1.
    """
    given = [
        torch.ones_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]
    _GivenGradients.apply(*tensors, *given).backward()


class _GivenGradients(torch.autograd.Function):
    """A scalar whose gradients at the first half of the arguments are the second half."""

    @staticmethod
    def forward(ctx: Any, *tensors_and_gradients: Tensor) -> Tensor:
        ctx.gradients = tensors_and_gradients[len(tensors_and_gradients) // 2 :]
        return tensors_and_gradients[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.gradients, *(None for _ in ctx.gradients))


def grad_norm(weights: list[nn.Parameter]) -> Tensor:
    """Return the L2 norm of all gradients, a scalar tensor on the device; a collective if they are
    sharded.

    Args:
        weights: The parameters; those without a gradient are skipped.
    """
    norms = [
        get_total_norm([w.grad for w in part if w.grad is not None])
        for part in _by_tensor_type(weights)
    ]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients(weights: list[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients down in place, so that their norm is at most `max_norm`."""
    for part in _by_tensor_type(weights):
        clip_grads_with_norm_(part, max_norm, norm)


def steps_on_device(optimizer: Optimizer, weights: list[nn.Parameter]) -> bool:
    """Return True if `step_on_device` supports the optimizer: fused AdamW of unsharded weights."""
    is_fused = isinstance(optimizer, EagerAdamW) and optimizer.defaults["fused"]
    return is_fused and not any(is_dtensor(weight) for weight in weights)


def step_on_device(
    optimizer: Optimizer, weights: list[nn.Parameter], norm: Tensor, max_norm: float
) -> None:
    """Take a step with clipped gradients, or none if their norm is not finite, without waiting for
    the GPU.

    Skipping leaves weights, moments and step counts unchanged.

    Args:
        optimizer: Fused AdamW, whose kernel clips in float32 while it reads the gradients.
        weights: All weights of the model.
        norm: L2 norm of all gradients, a scalar tensor on the device.
        max_norm: Maximum norm of the gradients, which are scaled down to it; 0: no clipping.
    """
    fused: Any = optimizer
    fused.found_inf = norm.isfinite().logical_not().float()
    if max_norm > 0 and norm.dtype == torch.float32:
        fused.grad_scale = ((norm + NORM_EPSILON) / max_norm).clamp(min=1)
    elif max_norm > 0:
        clip_gradients(weights, norm, max_norm)
    try:
        fused.step()
    finally:
        fused.found_inf = fused.grad_scale = None


def _by_tensor_type(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split weights with a gradient into DTensors and plain ones: torch's foreach functions take
    one kind.
    """
    weights = [weight for weight in weights if weight.grad is not None]
    sharded = [weight for weight in weights if is_dtensor(weight.grad)]
    plain = [weight for weight in weights if not is_dtensor(weight.grad)]
    return [part for part in (sharded, plain) if part]


def lr_at(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then the schedule.

    In the warm-up it is lr x (step + 1) / (warmup_steps + 1), so step `warmup_steps` is the first
    at the peak `lr`. Then it is lr x (final_lr_fraction + (1 - final_lr_fraction) x f), where f
    falls from 1 to 0 at the step after the last: as `cosine` (Loshchilov & Hutter 2017, equation
    5), `linear`, or `cooldown` (1, then linear in the last 20 % of the steps after the warm-up;
    Hägele et al. 2024). For `constant` f is 1.

    Args:
        step: Number of the step, counted from 0.
        config: The `optimizer` section. A user's function in `schedule` is called with (step,
            total_steps) after the warm-up and returns f.
        total_steps: Number of steps of the run.

    Raises:
        UsageError: A user's function cannot be imported, or returns a negative, infinite or NaN f.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if ":" in config.schedule:
        decay = float(plugins.load_class(config.schedule, "optimizer.schedule")(step, total_steps))
        if not 0 <= decay < math.inf:
            problem = f"`{config.schedule}` returned {decay} for step {step} of {total_steps}"
            raise UsageError(
                f"optimizer.schedule: {problem}; return a factor of the learning rate, 0 or more"
            )
    elif config.schedule == "constant":
        decay = 1.0
    elif config.schedule == "cosine":
        decay = (1 + math.cos(math.pi * progress)) / 2
    else:
        decay_fraction = COOLDOWN_FRACTION if config.schedule == "cooldown" else 1.0
        decay = min(1.0, (1 - progress) / decay_fraction)
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * decay)


class ExponentialMovingAverage:
    """EMA of the weights: average = decay x average + (1 - decay) x weights.

    It starts at the weights after the first step. Of a sharded model each rank averages its shard.
    Buffers, such as running statistics of BatchNorm, are not averaged.

    `update()` is called after each step; in a block `with swapped():` the model has the average.

    Args:
        model: The model, not wrapped; it may be sharded.
        decay: Weight of the old average, 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        weights = dict(model.named_parameters())
        self._weights = {name: weight.detach() for name, weight in weights.items()}
        self._averages = {name: weight.clone() for name, weight in self._weights.items()}
        first_names = {weight: name for name, weight in weights.items()}
        # The names of all weights, also of those that are tied to another.
        self._names = {
            name: first_names[weight]
            for name, weight in model.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of the model after a step to the average."""
        share = 1 - self.decay if self.num_updates else 1.0
        # torch's AveragedModel copies the step count to the device each time, which makes the host
        # wait.
        torch._foreach_lerp_(
            [to_local(average) for average in self._averages.values()],
            [to_local(weight) for weight in self._weights.values()],
            share,
        )
        self.num_updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context manager in which the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # One weight at a time, so that memory for one is enough.
        for name, average in self._averages.items():
            weight = to_local(self._weights[name])
            current = weight.clone()
            weight.copy_(to_local(average))
            to_local(average).copy_(current)

    def state_dict(self, model_state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the averaged weights and the buffers of `model_state`, by their name with the
        prefix `module.`, and the number of updates as `n_averaged` (int64 scalar).

        torch's AveragedModel has the same state_dict.
        """
        state = {
            f"module.{name}": self._averages[self._names[name]] if name in self._names else value
            for name, value in model_state.items()
        }
        return state | {"n_averaged": torch.tensor(self.num_updates)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, without the buffers."""
        self.num_updates = int(state["n_averaged"])
        for name, average in self._averages.items():
            to_local(average).copy_(to_local(state[f"module.{name}"]))
