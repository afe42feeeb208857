"""Branch parallelism: the two branches of a model on two devices of one worker.

Branches share only the loss, so there is no pipeline: forward and backward of both run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mmray.engine.metrics.timers import DeviceTimer
from mmray.errors import UsageError

BRANCH_INPUTS = {"image": ("image",), "text": ("input_ids", "attention_mask")}  # columns of a batch that a branch reads


def two_devices(device: torch.device) -> tuple[torch.device, torch.device]:
    """Return the two GPUs of a worker, or the CPU twice. Raises UsageError if there is only one GPU."""
    if device.type != "cuda":
        return device, device
    if torch.cuda.device_count() < 2:
        raise UsageError("train.parallel branches needs two GPUs in one worker, and this one sees one; take `ddp`")
    return device, torch.device("cuda", 1 - (device.index or 0))


class BranchParallel(nn.Module):
    """Run the branch `image` on the first device and `text` on the second; inputs and outputs are on the first."""

    def __init__(self, module: nn.Module, devices: tuple[torch.device, ...]):
        super().__init__()
        branches: dict[str, nn.Module] = module.branches()  # type: ignore[operator]
        self.module, self.devices = module, devices
        self._branches = [(branches[name], columns) for name, columns in BRANCH_INPUTS.items()]
        # Hooks, so that the model's own forward and its embedding methods work too.
        branches["text"].to(devices[1])
        self._hooks = (
            branches["text"].register_forward_pre_hook(
                lambda _, inputs: tuple(value.to(devices[1], non_blocking=True) for value in inputs)
            ),
            branches["text"].register_forward_hook(lambda _, inputs, output: output.to(devices[0])),
        )
        self._busy = [DeviceTimer(device) for device in devices]
        self._elapsed = [DeviceTimer(device) for device in devices]  # of the concurrent work, including waits
        self._second = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmray-branch")
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call the join's backward

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        def run(index: int) -> Tensor:
            branch, columns = self._branches[index]
            return branch(*(batch[name] for name in columns))

        outputs = self._run_both(run)
        joined = tuple(output.detach() for output in outputs)
        if torch.is_grad_enabled():
            joined = _Join.apply(self._anchor, self, outputs, *joined)
        embeds = {f"{name}_embed": output for name, output in zip(BRANCH_INPUTS, joined, strict=True)}
        return embeds | self.module.scalar_outputs()  # type: ignore[operator]

    def backward(self, outputs: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
        """Run the backward of both devices from the gradients of the joined outputs."""
        self._run_both(lambda index: outputs[index].requires_grad and outputs[index].backward(gradients[index]))

    def close(self) -> None:
        """End the second thread and remove the hooks, so that the module can be wrapped again."""
        self._second.shutdown()
        for hook in self._hooks:
            hook.remove()

    def idle(self) -> dict[str, float]:
        """Return the idle fraction of each device since the last call, of the time of concurrent work."""
        elapsed_s = max(*(timer.pop_s() for timer in self._elapsed), 1e-12)
        busy_s = [timer.pop_s() for timer in self._busy]
        return {f"branches/idle_share_{index}": max(0.0, 1 - busy / elapsed_s) for index, busy in enumerate(busy_s)}

    def _run_both(self, work: Callable[[int], Any]) -> list[Any]:
        """Run the work of both devices concurrently; the second thread inherits grad mode and autocast."""
        device_type, grad = self.devices[0].type, torch.is_grad_enabled()
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        results: list[Any] = [None, None]

        def run(index: int) -> None:
            with self._busy[index].running():
                results[index] = work(index)

        def run_second() -> None:
            device = torch.cuda.device(self.devices[1]) if device_type == "cuda" else nullcontext()
            # Run its backward in this thread: the first device's autograd thread waits for it, so it would deadlock.
            alone = torch.autograd.set_multithreading_enabled(False)
            autocast = torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False)
            with device, alone, torch.set_grad_enabled(grad), autocast:
                run(1)

        with self._elapsed[0].running(), self._elapsed[1].running():
            other = self._second.submit(run_second)
            try:
                run(0)
            finally:
                other.result()
        return results


class _Join(torch.autograd.Function):
    """Join the outputs of both devices; the backward runs on both."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, model: BranchParallel, outputs: Any, *joined: Tensor) -> tuple[Tensor, ...]:
        ctx.model, ctx.outputs = model, outputs
        return tuple(output.clone() for output in joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.model.backward(ctx.outputs, gradients)
        return None, None, None, *(None for _ in gradients)
