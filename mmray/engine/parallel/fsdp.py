"""FSDP2: each rank has a part of the weights, over all ranks or (HSDP) within a node."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from mmray.engine.parallel.strategy import Strategy

if TYPE_CHECKING:
    from torch import nn

    from mmray.config import Config
    from mmray.engine.collectives import Group


class FSDP(Strategy):
    """Shards the weights over all ranks; one worker trains the model as it is."""

    shards_weights = True
    is_hybrid: ClassVar[bool] = False

    @classmethod
    def unsupported_reasons(cls, config: Config) -> list[str]:
        parallel = config.train.parallel
        reasons = []
        if config.cluster.min_workers < 2:
            needs = f"train.parallel {parallel} shards over workers"
            reasons.append(f"{needs}; set --cluster.workers 2 or more, or use `single`")
        if config.train.precision == "fp16":
            reasons.append(f"{parallel} supports fp32 and bf16; set --train.precision bf16")
        if config.optimizer.kind.startswith("bitsandbytes"):
            reasons.append(
                "optimizer.kind: bitsandbytes cannot update sharded weights; use adamw, or "
                "--train.parallel ddp"
            )
        return reasons

    def place(self, model: nn.Module) -> None:
        # Sharding moves the model part by part, because all of it may not fit. FSDP needs the
        # default memory format.
        pass

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.group.world_size == 1:
            return super().wrap(model)
        from mmray.engine.parallel.sharding import shard
        from mmray.models.protocol import is_sharded

        if is_sharded(model):
            return model
        return shard(model, self.group, self.dtype, hybrid=self.is_hybrid)

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        # FSDP reduces gradients in each micro-batch, because unreduced ones would be unsharded and
        # need the memory that sharding saves. HSDP adds up the shards of other nodes in the last.
        if self.is_sharded:
            from torch.distributed.fsdp import FSDPModule

            assert isinstance(model, FSDPModule)
            model.set_requires_all_reduce(last)
        return nullcontext()

    def end_backward(self, model: nn.Module, group: Group) -> None:
        if not self.is_sharded:
            return
        from mmray.engine.parallel.sharding import replicated

        for parameter in replicated(model):  # FSDP does not reduce these
            if parameter.grad is not None:
                group.all_reduce_sum(parameter.grad).div_(group.world_size)

    def free(self, model: nn.Module) -> None:
        # FSDP keeps the gathered weights of the outermost module after a forward, for the backward,
        # and would use them in the next step although the weights have changed.
        if self.is_sharded:
            from torch.distributed.fsdp import FSDPModule

            assert isinstance(model, FSDPModule)
            model.reshard()


class HSDP(FSDP):
    """Shards within a node and replicates across nodes."""

    is_hybrid = True
