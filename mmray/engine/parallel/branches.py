"""A worker with a GPU for each branch: the image encoder on the first, the text encoder on the
second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmray.engine.parallel.strategy import Strategy, one_worker_reasons
from mmray.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mmray.config import Config


class Branches(Strategy):
    """Both branches run at the same time, because kernels are launched asynchronously and autograd
    has a thread per device.
    """

    num_devices = 2

    @classmethod
    def unsupported_reasons(cls, config: Config) -> list[str]:
        model = config.model
        reasons = one_worker_reasons(config)
        if not model.shares_only_loss:
            reasons.append(
                "train.parallel branches needs an image and a text tower without other parts such "
                f"as a decoder, not `{model.kind}`; use `ddp`"
            )
        if model.drops_at_random:
            problem = "train.parallel branches cannot repeat dropout masks"
            reasons.append(f"{problem}; set model.text.dropout and model.patch_dropout to 0")
        return reasons

    def place(self, model: nn.Module) -> None:
        super().place(model)
        place_branches(model, self.group.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model  # `place` moved its branches to their devices


def two_devices(device: torch.device) -> tuple[torch.device, torch.device]:
    """Return the two GPUs of a worker for `train.parallel` `branches`, or the CPU twice.

    The image encoder is on the first GPU and the text encoder on the second.

    Args:
        device: The worker's first GPU, or the CPU.

    Raises:
        UsageError: There is only one GPU.
    """
    import torch

    if device.type != "cuda":
        return device, device
    if torch.cuda.device_count() < 2:
        raise UsageError(
            "train.parallel branches: a worker needs two GPUs, and torch sees one. "
            "Use --train.parallel ddp"
        )
    return device, torch.device("cuda", 1 - (device.index or 0))


def place_branches(module: nn.Module, device: torch.device) -> None:
    """Move the text branch of a model to the second GPU; inputs and outputs of the model stay on
    the first.

    Kernels are launched asynchronously, and autograd has a thread per device, so both branches run
    at the same time.

    Args:
        module: The model, with `branches()`, on the first GPU; changed in place.
        device: The worker's first GPU, or the CPU, on which nothing moves.

    Raises:
        UsageError: There is only one GPU.
    """
    first, second = two_devices(device)
    columns = ("input_ids", "attention_mask")

    def copy_inputs(text: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            value.to(next(text.parameters()).device, non_blocking=True) for value in inputs
        )

    def copy_captions(
        model: nn.Module, inputs: tuple[dict[str, Tensor]]
    ) -> tuple[dict[str, Tensor]]:
        # Before any kernel of the step is queued, because a copy between devices waits for the
        # queues of both.
        text = model.branches()["text"]  # type: ignore[operator]
        copies = copy_inputs(text, tuple(inputs[0][name] for name in columns))
        return (inputs[0] | dict(zip(columns, copies, strict=True)),)

    text = module.branches()["text"].to(second)  # type: ignore[operator]
    module.register_forward_pre_hook(copy_captions)
    # The embedding methods bypass the forward of the model, and so its hook.
    text.register_forward_pre_hook(copy_inputs)
    text.register_forward_hook(lambda _, inputs, output: output.to(first))
