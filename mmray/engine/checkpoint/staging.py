"""Copies of the state of a run in host memory, from which a thread writes a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class HostStager:
    """Copies tensors of a state into host memory, which each `stage` reuses; for a GPU it is
    pinned.

    A GPU copies on a side stream while the next step computes; only the optimizer's update waits
    for the copy, on the device. torch's DefaultStager makes the host wait, or does not wait for the
    optimizer's kernels before it copies.

    Tensors of less than 5 bytes, such as AdamW's step counts, are not pinned, so the host waits for
    their copies. They are copied first, because a stream copies in order.
    """

    def __init__(self) -> None:
        self._buffers: StateDictStager | None = None
        self._streams: list[torch.cuda.Stream] = []
        self._hook: RemovableHandle | None = None
        self._source: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors of a state to the host.

        The copies of an earlier call are overwritten, because the same host memory is used again.
        Write them to storage before the next call.

        Args:
            state_dict: Tensors by key; a GPU copies them on a side stream.

        Returns:
            The copies by key; those of GPU tensors are complete after `synchronize_staging`.
        """
        if self._buffers is None:
            devices = {
                tensor.device for tensor in state_dict.values() if tensor.device.type == "cuda"
            }
            self._buffers = StateDictStager(pin_memory=bool(devices))
            self._streams = [torch.cuda.Stream(device) for device in devices]
            self._hook = register_optimizer_step_pre_hook(self._before_update) if devices else None
        with ExitStack() as stack:
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            by_size = dict(sorted(state_dict.items(), key=lambda item: item[1].nbytes))
            copies = self._buffers.stage(by_size, non_blocking=bool(self._streams))
        # Tensors only of this save must not be freed before they are copied.
        self._source = state_dict
        return copies

    def synchronize_staging(self) -> None:
        """Wait until the copies of the last `stage` are complete."""
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Wait for the copies and free the buffers."""
        self.synchronize_staging()
        if self._hook is not None:
            self._hook.remove()
        if self._buffers is not None:
            self._buffers.close()

    def _before_update(self, *_: object) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
