"""Parallel strategies (`train.parallel`): how a model is distributed over workers and devices.

A strategy is a subclass of Strategy and an entry in STRATEGIES of mmray.builtin, or named as
`package.module:Class`. The driver reads what a strategy needs before a worker starts, so its module
imports torch in functions only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from mmray.builtin import STRATEGIES
from mmray.plugins import load_part

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mmray.config import Config, Train
    from mmray.engine.collectives import Group


class Strategy:
    """One worker with one device; the base of other strategies, which override what differs.

    Args:
        dtype: Dtype of autocast, in which a sharded model gathers weights; None: that of the
            weights.

    Attributes:
        num_devices: GPUs of a worker.
        shards_weights: Whether each of several ranks has a part of the weights.
    """

    num_devices: ClassVar[int] = 1
    shards_weights: ClassVar[bool] = False

    def __init__(self, group: Group, dtype: torch.dtype | None = None) -> None:
        self.group = group
        self.dtype = dtype

    @classmethod
    def unsupported_reasons(cls, config: Config) -> list[str]:
        """Return why this strategy cannot train with these settings, as sentences with a fix.

        Called before a run starts, and on each worker, where no setting is `auto`.
        """
        return one_worker_reasons(config)

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has a part of the weights only."""
        return self.shards_weights and self.group.world_size > 1

    def place(self, model: nn.Module) -> None:
        """Move a model to the devices of this rank, before it is compiled and wrapped."""
        model.to(self.group.device)
        if self.group.device.type == "cuda":
            use_channels_last(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model for training on all ranks, with the weights of rank 0."""
        return model.to(self.group.device)

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Return a context manager for forward and backward of a micro-batch, in which gradients
        are reduced over ranks only if it is the `last` of the step.
        """
        return nullcontext()

    def end_backward(self, model: nn.Module, group: Group) -> None:
        """Reduce the gradients that no backward reduces; a collective call of the group."""

    def keeps_gradients(self, model: nn.Module) -> bool:
        """Return whether gradients are views of buffers, so that they are zeroed in place."""
        return False

    def free(self, model: nn.Module) -> None:
        """Free weights that an evaluation has gathered."""


def use_channels_last(model: nn.Module) -> None:
    """Store the weights of 2-D convolutions in the memory format in which tensor cores convolve.

    The model's own `to(memory_format=torch.channels_last)` fails if a weight has five dimensions,
    as in the patch embedding of Qwen-VL.
    """
    import torch

    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.to(memory_format=torch.channels_last)


def one_worker_reasons(config: Config) -> list[str]:
    """Return why a strategy of one worker cannot train with several; [] for one."""
    workers = config.cluster.max_workers
    parallel = config.train.parallel
    needs = f"train.parallel {parallel} uses one worker; set --cluster.workers 1 (got {workers})"
    return [] if workers == 1 else [needs]


def strategy_class(train: Train) -> type[Strategy]:
    """Return the class that `train.parallel` names. Raises UsageError."""
    strategy: type[Strategy] = load_part(train.parallel, "train.parallel", STRATEGIES)
    return strategy
