"""The settings that `auto` means on each kind of device, and that given settings win."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mmray.config import Config, Train
from mmray.engine.collectives import Group
from mmray.engine.parallel import device_defaults
from mmray.engine.parallel.device_defaults import (
    DeviceDefaults,
    compile_pays,
    configure_torch,
    resolve_auto,
)
from mmray.engine.parallel.support import unsupported_reasons
from mmray.engine.precision import select_precision
from mmray.errors import UsageError

OLDER = DeviceDefaults("fp16", "none", False)
AMPERE = DeviceDefaults("bf16", "inductor", True)
GPU = torch.device("cuda", 0)
GPUS = [  # name, compute capability, GiB, defaults
    ("V100", (7, 0), 16, OLDER),
    ("V100", (7, 0), 32, OLDER),
    ("T4", (7, 5), 16, OLDER),
    ("A100", (8, 0), 40, AMPERE),
    ("A100", (8, 0), 80, AMPERE),
    ("A10G", (8, 6), 24, AMPERE),
    ("L4", (8, 9), 24, AMPERE),
    ("H100", (9, 0), 80, AMPERE),
    ("H200", (9, 0), 141, AMPERE),
]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by its properties, which records the flags that are set; by default with a compiler."""

    def make(name="H100", capability=(9, 0), gib=80):
        flags = SimpleNamespace(allocator=[], matmul=None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, gib * 2**30))
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", flags.allocator.append)
        monkeypatch.setattr(
            torch, "set_float32_matmul_precision", lambda value: setattr(flags, "matmul", value)
        )
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        monkeypatch.setattr(device_defaults, "compile_problem", lambda _: "")
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
        for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(variable, raising=False)
        return flags

    return make


@pytest.mark.parametrize(("name", "capability", "gib", "defaults"), GPUS)
def test_defaults_of_gpus(gpu, name, capability, gib, defaults):
    flags = gpu(name, capability, gib)
    train = resolve_auto(Train(), Group(device=GPU))
    assert (train.precision, train.compile) == (defaults.precision, defaults.compile)
    assert select_precision("auto", GPU).name == defaults.precision
    text = configure_torch(train, GPU)
    assert text == f"{name}, {gib} GiB: {train.precision}, compile {train.compile}"
    assert (
        flags.matmul == ("high" if defaults.tf32 else "highest") and torch.backends.cudnn.benchmark
    )
    assert torch.backends.cudnn.allow_tf32 == defaults.tf32
    assert flags.allocator == ["expandable_segments:True"]


def test_defaults_of_a_cpu(gpu):
    flags, cpu = gpu(), torch.device("cpu")
    train = resolve_auto(Train(), Group())
    assert (train.precision, train.compile) == ("fp32", "none")
    assert configure_torch(train, cpu) == "" and flags == SimpleNamespace(allocator=[], matmul=None)


def test_given_settings_win(gpu, monkeypatch):
    given = {"precision": "fp32", "compile": "none", "deterministic": True}
    flags = gpu()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    train = resolve_auto(Train(**given), Group(device=GPU))
    assert train == Train(**given)
    configure_torch(train, GPU)
    assert flags == SimpleNamespace(allocator=[], matmul="highest")
    assert not torch.backends.cudnn.benchmark and not torch.backends.cudnn.allow_tf32


def test_gpu_without_a_compiler_is_not_compiled(gpu, monkeypatch):
    gpu()
    monkeypatch.setattr(device_defaults, "compile_problem", lambda _: "gcc: command not found")
    notes = []
    train = resolve_auto(Train(), Group(device=GPU), lambda *note: notes.append(note))
    assert train.compile == "none"
    (label, text) = notes.pop()
    assert label == "device" and text.endswith("(python3-dev). rank 0: gcc: command not found")
    with pytest.raises(
        UsageError,
        match=r"train\.compile inductor: .* Install gcc .* \(python3-dev\), or set train\.compile "
        r"none\. rank 0: gcc: command not found",
    ):
        resolve_auto(Train(compile="inductor"), Group(), notify=lambda *_: pytest.fail())


class TwoRanks(Group):
    """A group in which rank 1 cannot compile."""

    def all_reduce_min(self, value):
        return value

    def all_gather_objects(self, value):
        return [value, "no Python.h"]


def test_ranks_are_eager_if_one_cannot_compile(gpu):
    gpu()
    notes = []
    train = resolve_auto(Train(), TwoRanks(0, 2, GPU), lambda _, text: notes.append(text))
    assert train.compile == "none" and notes[0].endswith(" rank 1: no Python.h")


def test_float8_needs_a_compiler(gpu, monkeypatch):
    gpu()
    assert resolve_auto(Train(float8="rowwise"), Group(device=GPU)).compile == "inductor"
    monkeypatch.setattr(device_defaults, "compile_problem", lambda _: "gcc: command not found")
    train = resolve_auto(Train(float8="rowwise"), Group(device=GPU))
    assert train.compile == "none"
    [reason] = unsupported_reasons(Config(train=train))
    assert reason.startswith("train.float8 is slower than bf16 without torch.compile")


@pytest.mark.parametrize(
    ("gflops", "rows", "steps", "peak", "pays"),
    [
        (0.1, 256, 300, 989e12, False),  # the sample: the host limits its steps
        (0.1, 256, 100_000, 989e12, True),
        (44, 1024, 300, 989e12, False),  # 55 s of ViT-B/32
        (44, 1024, 2_000, 989e12, True),
        (44, 1024, 300, math.nan, True),  # an unknown GPU: 540 s
    ],
)
def test_short_runs_are_not_compiled(gflops, rows, steps, peak, pays):
    assert compile_pays(gflops * 1e9, rows, steps, peak) == pays


@pytest.mark.parametrize(("ranks", "workers"), [("1", "16"), ("8", "2"), ("32", "1")])
def test_ranks_of_a_node_share_its_cores_for_compiling(gpu, monkeypatch, ranks, workers):
    gpu()
    monkeypatch.setattr(device_defaults, "cores", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    resolve_auto(Train(), Group(device=GPU))
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == workers


def test_compiler_is_tried_without_worker_processes(monkeypatch):
    """They would outlive the trial with the folder of its temporary cache."""
    from torch._inductor import config

    threads = []
    run = lambda _: threads.append(config.compile_threads)  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda _: run)
    assert device_defaults.compile_problem(torch.device("cpu")) == "" and threads == [1]


@pytest.mark.compile
@pytest.mark.parametrize(("compiler", "fails"), [("false", True), ("g++", False)])
def test_compiler_is_tried_with_a_kernel(compiler, fails):
    """In a new process, because inductor reads the variable when it is imported."""
    code = (
        "import torch; from mmray.engine.parallel.device_defaults import compile_problem;"
        "print(compile_problem(torch.device('cpu')))"
    )
    environment = os.environ | {"CXX": compiler}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert bool(output.stdout.strip()) == fails, output.stdout
