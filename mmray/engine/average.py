"""Weights averaged over the steps of a run, which are then evaluated and exported."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class MovingAverage(AveragedModel):
    """Exponential moving average of a model's weights: decay x average + (1 - decay) x weights after each step.

    Begins with the weights after the first step; buffers are the model's. torch's own update sends a device the number
    of steps so far each time, and so has the host wait for it, though no moving average asks for that number.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        share = 1 - self.decay if self.n_averaged else 1.0
        places: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for averaged, weight in zip(self.module.parameters(), model.parameters(), strict=True):
            places[weight.device][0].append(averaged)
            places[weight.device][1].append(weight)
        for averages, weights in places.values():
            torch._foreach_lerp_(averages, weights, share)
        for kept, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            kept.copy_(buffer)
        self.n_averaged += 1
