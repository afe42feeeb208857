"""Freezing, float8, activation checkpointing, torch.compile and memory format, applied before the
model is wrapped.

Parameter names do not change, so a checkpoint can be loaded with other settings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmray.engine.collectives import Group
from mmray.engine.optimizer import freeze_parameters
from mmray.engine.parallel.float8 import convert_branches
from mmray.engine.parallel.strategy import strategy_class
from mmray.errors import UsageError
from mmray.models.pixels import NormalizePixels
from mmray.models.protocol import as_model, find_blocks

if TYPE_CHECKING:
    from mmray.config import Optimizer, Train

T = TypeVar("T")
LayerBuffers = list[tuple[nn.Module, dict[str, Tensor | None]]]

# caption lengths under torch.compile: aligned kernels of attention and matrix products
TOKEN_MULTIPLE = 16
# graphs of a block's class: its shapes times training, no gradients, evaluation; then it is eager
RECOMPILE_LIMIT = 64
_recomputation_enabled = True  # changed by `disable_recomputation`
# their layers name rates `drop`
KNOWN_PACKAGES = ("mmray.", "timm.", "torch.", "torchao.", "torchvision.", "transformers.")
_forced_eager = False  # within `force_eager`


def apply_transforms(
    model: nn.Module,
    train: Train,
    optimizer: Optimizer,
    group: Group,
    notify: Callable[[str, str], None] = lambda label, text: None,
) -> nn.Module:
    """Move the model to its device, and apply freezing, float8, activation checkpointing and
    compile.

    Args:
        train: The `train` section, without `auto` in `compile`.
        optimizer: The `optimizer` section, for `freeze`.
        notify: Called with (label, line) if layers compute in float8.

    Returns:
        The same model.

    Raises:
        UsageError: A setting does not suit the model or the device; the message names it.
    """
    freeze_parameters(model, optimizer.freeze)
    strategy_class(train)(group).place(model)
    branches = branches_of(model)
    if train.float8 != "none":
        notify("device", convert_branches(branches, train.float8))
    for name in train.activation_checkpointing:
        if name not in branches:
            raise UsageError(
                f"train.activation_checkpointing: the model has no branch `{name}`; it has "
                f"{', '.join(branches) or 'none'}"
            )
        checkpoint_activations(branches[name], train.compile != "none")
    return compile_branches(model, train)


def branches_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model that are compiled and sharded separately, such as its image
    encoder.
    """
    return as_model(model).branches()


def compile_branches(model: nn.Module, train: Train) -> nn.Module:
    """Compile each block of the branches with torch.compile if `train.compile` is set.

    Blocks of equal structure share a graph, so compile time does not grow with depth (as in
    torchtitan). In the image branch only the number of rows may become dynamic; other branches have
    dynamic shapes, because captions differ. A deep copy of the model is not compiled.

    Args:
        model: The model, changed in place.
        train: The `train` section, without `auto` in `compile`.

    Returns:
        The same model.
    """
    if train.compile == "none":
        return model
    # DDP's graph splits would make the dropout of a forward under DDP differ from that of the first
    # pass (GradCache).
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for name, branch in branches_of(model).items():
        # Without layers that have no weights: for an empty graph (nn.Identity) torch skips the code
        # that blocks share.
        blocks = [block for block in _blocks(branch) if next(block.parameters(), None) is not None]
        # otherwise each operator of the normalization reads and writes all pixels
        pixels = [layer for layer in branch.modules() if isinstance(layer, NormalizePixels)]
        for block in dict.fromkeys([*pixels, *blocks]):
            block.compile(backend=train.compile, dynamic=None if name == "image" else True)
            if name == "image":
                compiled = block._compiled_call_impl
                assert compiled is not None
                block._compiled_call_impl = partial(_call_with_static_sizes, compiled)
    return model


def _call_with_static_sizes(compiled: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call a block so that its graphs are static in all sizes but the first.

    Blocks of a class share their graphs, so after the first two stages of a ResNet torch would take
    the height and width for dynamic.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            torch._dynamo.mark_static(value, list(range(1, value.ndim)))
    return compiled(*args, **kwargs)


def buffers_of(module: nn.Module) -> LayerBuffers:
    """Return the layers of a module that have buffers, and their buffers by name."""
    return [(layer, dict(layer._buffers)) for layer in module.modules() if layer._buffers]


@contextmanager
def with_buffers(buffers: LayerBuffers) -> Iterator[None]:
    """Context manager in which layers have these buffers instead of their own."""
    own = [(layer, dict(layer._buffers)) for layer, _ in buffers]
    for layer, values in buffers:
        layer._buffers.update(values)
    try:
        yield
    finally:
        for layer, values in own:
            layer._buffers.update(values)


def preserve_buffers(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager in which forwards do not change the buffers (running statistics of
    BatchNorm).

    Forwards use copies. Restoring the old values in place would invalidate graphs that saved the
    originals.
    """
    copies: LayerBuffers = [
        (layer, {name: None if value is None else value.clone() for name, value in own.items()})
        for layer, own in buffers_of(module)
    ]
    return with_buffers(copies)


@contextmanager
def force_eager() -> Iterator[None]:
    """Context manager that disables compiled code and CUDA graphs: the model runs eagerly."""
    global _forced_eager
    # Without torch._dynamo nothing is compiled, and importing it takes 1.1 s.
    compiles = "torch._dynamo" in sys.modules
    before = _forced_eager
    _forced_eager = True
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            yield
    finally:
        _forced_eager = before


def is_forced_eager() -> bool:
    """Return True inside the context manager `force_eager`."""
    return _forced_eager


def num_compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported unless something is compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def checkpoint_activations(branch: nn.Module, compiles: bool = False) -> None:
    """Save only the inputs of each block, and recompute the rest in backward (Chen et al. 2016).

    The recomputation draws the same dropout masks and does not update running statistics.
    torch.compile requires that it equals the forward, so blocks with running statistics are
    excluded from its graphs; so are those with dropout, because inductor would draw other masks
    than without gradients (the first pass of GradCache).

    Args:
        branch: A part of the model such as the image encoder; the `forward` of its blocks is
            replaced in place.
        compiles: Whether the branch will be compiled.
    """
    for block in _blocks(branch):
        draws = may_draw_random_numbers(block)
        settings: dict[str, Any] = {"preserve_rng_state": draws}
        has_buffers = next(block.buffers(), None) is not None
        if has_buffers:
            settings["context_fn"] = partial(_recomputation_contexts, block)
        recomputed = (
            torch.compiler.disable(_recomputed)
            if compiles and (draws or has_buffers)
            else _recomputed
        )
        # partials: deepcopy binds them to the copy
        block.forward = partial(recomputed, block.forward, settings)


def _recomputation_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], ...]:
    """Return the context managers of a forward and of its recomputation."""
    return nullcontext(), preserve_buffers(block)


def _recomputed(
    forward: Callable[..., T], settings: dict[str, Any], *args: object, **kwargs: Any
) -> T:
    if not torch.is_grad_enabled() or not _recomputation_enabled:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **settings, **kwargs)


@contextmanager
def disable_recomputation() -> Iterator[None]:
    """Context manager that disables activation checkpointing: activations are saved, not
    recomputed.
    """
    global _recomputation_enabled
    _recomputation_enabled = False
    try:
        yield
    finally:
        _recomputation_enabled = True


def may_draw_random_numbers(block: nn.Module) -> bool:
    """Return True if a forward of a module may draw random numbers.

    That is so for a positive dropout rate, and for layers of packages other than torch,
    torchao, torchvision, timm and transformers, whose code may have any.
    """
    for layer in block.modules():
        values = vars(layer) | getattr(getattr(layer, "config", None), "__dict__", {})
        rates = (value for name, value in values.items() if "drop" in name or name == "p")
        if not type(layer).__module__.startswith(KNOWN_PACKAGES) or any(
            isinstance(rate, int | float) and rate > 0 for rate in rates
        ):
            return True
    return False


def _blocks(branch: nn.Module) -> list[nn.Module]:
    """Return the blocks of a branch; without any, the branch itself."""
    return list(find_blocks(branch)) or [branch]
