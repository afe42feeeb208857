"""Rates exclude the first step;

FLOPs, MFU, GPU metrics and peak memory; a set of rows has one hash.
"""

from __future__ import annotations

import math
import mmap
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmray.data.stream.order import SamplePlan
from mmray.engine.collectives import Group
from mmray.engine.loop import Trainer
from mmray.engine.metrics import meters
from mmray.engine.metrics import timers as timers_module
from mmray.engine.metrics.meters import Meter, model_flops_of_row, rows_sha
from mmray.engine.metrics.timers import PeakMemory, Throughput
from mmray.engine.parallel.transforms import checkpoint_activations
from mmray.engine.precision import Precision
from tests.engine import toy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
BF16, FP32 = Precision("bf16", torch.bfloat16, "cuda"), Precision("fp32", None, "cuda")


@pytest.fixture
def spend(monkeypatch):
    """spend(seconds) moves the clock, which does not move otherwise."""
    clock_s = [0.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: clock_s[0])
    return lambda seconds: clock_s.append(clock_s.pop() + seconds)


def test_rates_are_of_the_wall_clock_without_the_first_step_and_evaluation(spend):
    rates = Throughput()
    spend(100)
    rates.add(wait_s=90, rows=64, tokens=9)
    spend(7)
    rates.lap("evaluate")
    assert rates.compute(2) == {}
    spend(1)
    rates.lap("log")  # of the first line
    for seconds, rows in ((1, 64), (3, 32)):
        spend(seconds)
        rates.add(wait_s=seconds / 4, rows=rows, tokens=6)
        for name in ("checkpoint", "callbacks"):
            spend(0.25)
            rates.lap(name)
    spend(4)
    rates.lap("evaluate")
    assert rates.compute(2) == {
        "time/wall_s": 10,
        "time/log_s": 1,
        "time/checkpoint_s": 0.5,
        "time/callbacks_s": 0.5,
        "time/step_s": 2,
        "time/step_p50_s": 2,
        "time/step_p95_s": pytest.approx(2.9),
        "time/first_step_s": 100,
        "time/data_wait_s": 0.5,
        "time/data_wait_share": 0.25,
        "throughput/samples_per_s": 16,
        "throughput/tokens_per_s": 4,
    }
    assert rates.compute(2) == {}


class Adapted(torch.nn.Module):
    """Convolution, frozen layers with LoRA on one of them, attention, and a head; all matrix
    products are known.
    """

    def __init__(self):
        super().__init__()
        self.pixels = torch.nn.Conv2d(3, 8, 2, stride=2)
        self.before, self.base, self.after = (torch.nn.Linear(8, 8) for _ in range(3))
        self.down, self.up = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 8, bias=False)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, batch):
        rows = self.before(self.pixels(batch["image"]).flatten(2).transpose(1, 2).relu()).relu()
        rows = (self.base(rows) + self.up(self.down(rows))).relu()
        mixed = (rows @ rows.transpose(1, 2)).softmax(-1) @ rows
        return {"logits": self.head(self.after(mixed).relu())}


@pytest.mark.parametrize(
    "trainable",
    [("pixels", "before", "base", "after", "down", "up", "head"), ("down", "up"), ("base", "head")],
)
def test_flops_equal_those_of_a_real_forward_and_backward(trainable):
    model, batch = Adapted(), {"image": torch.rand(4, 3, 8, 8), "valid": torch.ones(4)}
    for name, layer in model.named_children():
        layer.requires_grad_(name in trainable)
    with FlopCounterMode(display=False) as counter:
        model(batch)["logits"].sum().backward()
    assert model_flops_of_row(model, batch, toy.FP32) == counter.get_total_flops() / 4


def test_flops_do_not_count_recomputed_activations():
    rows = toy.rows(4, 0)
    plain, recomputed = toy.Branched(), toy.Branched()
    checkpoint_activations(recomputed.text)
    expected = model_flops_of_row(plain, rows, toy.FP32)
    assert model_flops_of_row(recomputed, rows, toy.FP32) == expected > 0


def test_flops_of_matching_include_the_hard_negatives():
    model, objective = toy.Toy(kind="matching"), toy.objective("matching")
    model.log_scale.requires_grad_(False)
    plan = SamplePlan(num_rows=8, global_batch_size=8, world_size=1, seed=1, steps=1)
    trainer = Trainer(toy.train_spec(model, plan, objective=objective), None)
    steps = list(toy.steps_of(plan, 0))
    trainer.train(steps)
    rows = steps[0][0]
    negatives = {"negative_ids": rows["input_ids"], "negative_mask": rows["attention_mask"]}
    expected = model_flops_of_row(model, rows | negatives, toy.FP32)
    assert trainer.meter.flops_of_row == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", BF16, 989),
        ("NVIDIA H100 80GB HBM3", FP32, 67),
        ("NVIDIA H100 PCIe", BF16, 756),
        ("NVIDIA A10G", BF16, 70),
        ("NVIDIA A10", BF16, 125),
        ("NVIDIA RTX A4000", BF16, None),  # no A40
    ],
)
def test_peak_flops_are_by_device_name_and_none_if_unknown(monkeypatch, name, precision, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    flops = meters.peak_flops(CUDA, precision)
    assert math.isnan(flops) if tflops is None else flops == tflops * 1e12


@pytest.mark.parametrize(("precision", "peak_tflops"), [(BF16, 200), (FP32, 10)])
def test_mfu_is_achieved_over_peak_flops_of_a_device(monkeypatch, spend, precision, peak_tflops):
    """Four workers with two devices each: 800 rows per second of 25 GFLOP are 20 TFLOP/s, or 2.5
    per device.
    """
    monkeypatch.setitem(meters.PEAK_TFLOPS, "Made-up 9000", (200, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Made-up 9000 SXM")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**30)
    monkeypatch.setattr(meters, "machine_load", lambda device: {"gpu/busy_percent": 73.0})
    rates = Throughput()
    group = Group(world_size=4, device=CUDA)
    for step_s in (60, 0.5, 1.5):  # the first is left out
        spend(step_s)
        rates.add(0.0, rows=800, tokens=1)
    metrics = Meter(
        rates, PeakMemory(CUDA), group, precision, devices=2, flops_of_row=25e9
    ).compute()
    assert metrics["throughput/samples_per_s"] == 800
    assert metrics["throughput/tflops_per_device"] == pytest.approx(2.5)
    assert metrics["throughput/mfu"] == pytest.approx(2.5 / peak_tflops)
    assert (metrics["memory/peak_gib"], metrics["gpu/busy_percent"]) == (5.0, 73.0)


@pytest.mark.parametrize(
    ("utilization", "busy"),
    [
        (lambda _: 73, 73.0),
        (Mock(side_effect=ModuleNotFoundError("nvidia-ml-py is not installed")), math.nan),
    ],
)
def test_gpu_metrics_are_those_of_nvml_and_nan_without_it(monkeypatch, utilization, busy):
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * 2**30, 8 * 2**30))
    metrics = meters.machine_load(CUDA)
    assert metrics["host/memory_gib"] == pytest.approx(
        psutil.virtual_memory().used / 2**30, rel=0.5
    )
    assert metrics["gpu/memory_gib"] == 3.0
    assert metrics["gpu/busy_percent"] == pytest.approx(busy, nan_ok=True)


def test_rows_hash_does_not_depend_on_order():
    keys = torch.tensor([3, -5, 2**62])
    expected = "f3fbe98ff7a73904"  # hashlib over struct.pack("<3q", -5, 3, 2**62)
    assert rows_sha(keys) == rows_sha(keys.flip(0)) == expected
    assert rows_sha(keys) != rows_sha(keys[:2])


def test_peak_memory_includes_start_of_backward():
    memory = PeakMemory(CPU)
    before_gib = memory.peak_gib()
    # 0.25 GiB directly from the system, because the allocator may reuse memory of earlier tests.
    activations = mmap.mmap(-1, 2**28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, 2**28, mmap.PAGESIZE):
        activations[page] = 1
    memory.sample()
    activations.close()
    assert before_gib + 0.2 < memory.peak_gib() < 64  # of this process
