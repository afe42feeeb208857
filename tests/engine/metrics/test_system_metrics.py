"""GPU metrics from NVML, and model FLOPs utilization of fake devices."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from mmray.engine.metrics import meters as flops
from mmray.engine.metrics import meters as system
from mmray.engine.metrics.meters import Meter
from mmray.engine.metrics.timers import PhaseTimers, Throughput
from mmray.engine.precision import Precision
from tests.engine import toy

CUDA = torch.device("cuda", 1)
UUID = "1234-ab"


class NVMLError(Exception):
    pass


def refuse(*_):
    raise NVMLError("not told")


def nvml(**changes):
    """NVML of a machine whose second GPU is 73 % busy and uses 3 GiB."""
    told = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {f"GPU-{UUID}": "second"}[uuid],
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu={"second": 73}[handle], memory=5),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used={"second": 3 * 2**30}[handle], total=2**40),
    }
    return SimpleNamespace(NVMLError=NVMLError, **told | changes)


@pytest.fixture
def told(monkeypatch):
    """Metrics of a GPU from this NVML, or without NVML."""

    def told(module):
        system._handle.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
        return system.machine_load(CUDA)

    yield told
    system._handle.cache_clear()


def test_gpu_is_queried_by_uuid(told):
    found = told(nvml())
    assert (found["gpu/busy_percent"], found["gpu/memory_gib"]) == (73.0, 3.0)
    assert found["host/memory_gib"] == pytest.approx(psutil.virtual_memory().used / 2**30, rel=0.5)


@pytest.mark.parametrize(
    "module",
    [
        None,  # not installed
        nvml(nvmlInit=refuse),  # no driver
        nvml(nvmlDeviceGetHandleByUUID=refuse),
        nvml(nvmlDeviceGetUtilizationRates=refuse),  # a MIG slice
        nvml(nvmlDeviceGetMemoryInfo=refuse),
    ],
)
def test_unavailable_nvml_values_are_nan(told, module):
    found = told(module)
    assert found.keys() == {"host/cpu_percent", "host/memory_gib", "gpu/busy_percent", "gpu/memory_gib"}
    assert math.isnan(found["gpu/busy_percent"]) and math.isnan(found["gpu/memory_gib"])


def test_nvml_is_not_queried_on_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refuse))
    assert system.machine_load(torch.device("cpu")).keys() == {"host/cpu_percent", "host/memory_gib"}


BF16, FP32 = Precision("bf16", torch.bfloat16, "cuda"), Precision("fp32", None, "cuda")


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", BF16, 989),
        ("NVIDIA H100 80GB HBM3", FP32, 67),
        ("NVIDIA H100 PCIe", BF16, 756),
        ("NVIDIA H100 NVL", BF16, 835),
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA A10G", BF16, 70),
        ("NVIDIA A10", BF16, 125),
        ("NVIDIA L40S", BF16, 362),
        ("NVIDIA L40", BF16, 181),
        ("NVIDIA L4", BF16, 121),
        ("NVIDIA GH200 480GB", BF16, 989),
        ("NVIDIA GB200", BF16, 2500),
        ("Tesla T4", FP32, 8.1),
        ("NVIDIA RTX A4000", BF16, None),  # no A40
        ("NVIDIA RTX A1000", BF16, None),  # no A100
        ("NVIDIA T400", BF16, None),
        ("Made-up 9000", BF16, None),
    ],
)
def test_peak_flops_are_by_device_name_and_none_if_unknown(monkeypatch, name, precision, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = flops.peak_flops(CUDA, precision)
    assert math.isnan(found) if tflops is None else found == tflops * 1e12


@pytest.mark.parametrize(("precision", "peak_tflops"), [(BF16, 200), (FP32, 10)])
def test_mfu_is_achieved_over_peak_flops_of_a_device(monkeypatch, precision, peak_tflops):
    """Four workers with two devices each: 800 rows per second of 25 GFLOP are 20 TFLOP/s, or 2.5 per device."""
    monkeypatch.setitem(flops.PEAKS, "Made-up 9000", (200, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Made-up 9000 SXM")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**30)
    monkeypatch.setattr("mmray.engine.metrics.meters.machine_load", lambda device: {"gpu/busy_percent": 73.0})
    rates = Throughput(PhaseTimers(torch.device("cpu")))
    meter = Meter(rates, devices=2, flops_of_row=25e9)
    group = SimpleNamespace(device=CUDA, world=4)
    state = SimpleNamespace(group=group, precision=precision, model=toy.Toy())
    for step_s in (60, 0.5, 1.5):  # the first is left out
        rates.add(step_s, 0.0, rows=800, tokens=1)
    metrics = meter.compute(state)
    assert metrics["throughput/samples_per_s"] == 800
    assert metrics["throughput/tflops_per_device"] == pytest.approx(2.5)
    assert metrics["throughput/mfu"] == pytest.approx(2.5 / peak_tflops)
    assert (metrics["memory/peak_gib"], metrics["gpu/busy_percent"]) == (5.0, 73.0)
