"""What a rank measures of itself when a line is due: rates, model FLOP/s, the branches' idle time, load, memory.

loop.py keeps a Meter and reduces over ranks what it tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmray.engine.metrics.flops import model_flops, peak_flops
from mmray.engine.metrics.system import machine_load
from mmray.engine.metrics.writers import Metrics, Rates
from mmray.engine.parallel import wrap
from mmray.engine.parallel.branches import BranchParallel
from mmray.engine.prefetch import Share
from mmray.engine.train_state import Learner
from mmray.errors import is_out_of_memory


@dataclass
class Padding:
    """One rank's tokens and places for them since the last line; `over` makes of the ranks' sums the run's shares."""

    tokens: int = 0
    places: int = 0
    plain_places: int = 0

    def add(self, share: Share) -> None:
        self.tokens += share.tokens
        self.places += share.places
        self.plain_places += share.plain_places

    def take(self, device: torch.device) -> list[Tensor]:
        """Scalars to be summed over ranks; counted anew from here."""
        counted = [self.tokens, self.places, self.plain_places]
        self.tokens = self.places = self.plain_places = 0
        return list(torch.tensor(counted, dtype=torch.float64, device=device))

    @staticmethod
    def over(sums: list[float], by_length: bool) -> Metrics:
        """The share of the places that no token stands in; with buckets also what it were without."""
        tokens, places, plain = sums
        if not places:
            return {}
        unsorted = {"batch/padding_unsorted": 1 - tokens / plain} if by_length else {}
        return {"batch/padding": 1 - tokens / places} | unsorted


@dataclass
class Meter:
    """One rank's figures; `devices`: how many a worker has."""

    rates: Rates
    devices: int = 1
    padding: Padding = field(default_factory=Padding)
    flops_of_row: float | None = None  # a forward and a backward

    def look_at(self, learner: Learner, share: Share) -> None:
        """Count the model's work once, on the first rows that come.

        Without room for it, it waits for the next step: this one meets the same end, and takes smaller micro-batches.
        Raises what says so where ranks wait for each other in a forward.
        """
        if self.flops_of_row is not None:
            return
        first = share.micros[0]
        try:
            flops = model_flops(wrap.unwrap(learner.model), first, learner.precision)
        except (RuntimeError, MemoryError) as error:
            if not learner.may_vote or not is_out_of_memory(error):
                raise
            return
        self.flops_of_row = flops / len(first["valid"])

    def take(self, learner: Learner) -> Metrics:
        """Figures since the last call."""
        device: torch.device = learner.group.device
        metrics = self.rates.take(learner.group.world)
        if metrics:
            rate = (self.flops_of_row or 0.0) * metrics["throughput/samples_per_s"] / learner.group.world / self.devices
            metrics["throughput/tflops_per_device"] = rate / 1e12
            if device.type == "cuda":
                metrics["throughput/utilisation"] = rate / peak_flops(device, learner.precision)
        if isinstance(learner.model, BranchParallel):
            metrics |= learner.model.idle()
        return metrics | machine_load(device) | {"memory/peak_gib": self.rates.phases.memory.look_gib(device)}
