"""GPUs for a test: those of this machine if it has enough, otherwise fake ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.engine.fake_cuda import Waits, made_up_gpus


class CountedByTorch:
    """Counts synchronizations that torch warns about."""

    def __init__(self, told: list[warnings.WarningMessage]):
        self.told = told

    @property
    def count(self) -> int:
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in self.told)


def true(count: int = 1) -> bool:
    """Whether this machine has at least this many GPUs."""
    return torch.cuda.device_count() >= count


@contextmanager
def gpus(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> Iterator[type[Waits] | CountedByTorch]:
    """`count` GPUs and a counter of host synchronizations."""
    if not true(count):
        with made_up_gpus(monkeypatch) as waits:
            yield waits
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield CountedByTorch(told)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def within(kind: str = "") -> float:
    """Tolerance of a float64 run on a GPU against a CPU; generative models have norms in float32."""
    return 1e-5 if kind == "generative" and true() else 1e-9
