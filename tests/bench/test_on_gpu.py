"""Step benchmarks on real or simulated GPUs: each arm runs, and both loops take the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmray.bench.batch_shapes import measure_shape
from mmray.bench.step import build_bench
from mmray.config import Batch, Train
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.collectives import Group
from tests.bench.test_step import tiny
from tests.engine.fake_cuda import DEVICES
from tests.engine.gpu_devices import gpus

pytestmark = pytest.mark.usefixtures("one_thread")
GROUP = Group(device=DEVICES[0])


@pytest.mark.parametrize("number", ["fp32", "bf16"])
def test_both_loops_take_the_same_steps(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    with gpus(monkeypatch):
        bench = build_bench(tiny(train=Train(steps=1, log_every=4, precision=number)), GROUP, micro=4)
        took_s, loop_loss = bench.loop_window(4)
        _, bare_loss = bench.bare_window(4)
    assert took_s > 0
    assert loop_loss == pytest.approx(bare_loss, rel=1e-4 if number == "fp32" else 0.02)


def test_batch_shape_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(batch=Batch(micro=2, global_=6))
    with gpus(monkeypatch):
        row = measure_shape(config, GROUP, Path(), resolve_batch_shape(config.batch, 1), 0.01)
    assert row["samples_per_s"] > 0 and 0 < row["peak_gib"] < row["peak_reserved_gib"]
