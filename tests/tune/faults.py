"""Faults of trials, brought in by the callback path that users have; none of this is in the package."""

import torch


class OutOfMemory:
    """As a GPU that is too small would: at the second step, on every rank."""

    def on_step(self, step, metrics):
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
