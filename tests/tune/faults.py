"""Faults in trials, injected as user callbacks."""

import torch


class OutOfMemory:
    """Raise an OOM at the second step, on every rank."""

    def on_step(self, step, metrics):
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
