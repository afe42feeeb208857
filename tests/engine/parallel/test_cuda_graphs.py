"""CUDA graphs of branches with a recorder that runs on a CPU, and what has no graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmray.config import ImageTower, Train
from mmray.engine.batch import BatchShape
from mmray.engine.parallel import cuda_graphs
from mmray.engine.parallel.cuda_graphs import (
    EAGER_CALLS,
    BranchGraphs,
    CudaRecorder,
    graph_branches,
)
from mmray.engine.parallel.transforms import force_eager, preserve_buffers
from mmray.models.build import build
from tests.engine import toy
from tests.engine.recipe_models import MODELS, VOCAB, WITH_DROPOUT
from tests.gpu import device_checks

GPU = torch.device("cuda", 0)


class CpuRecorder:
    """Repeats functions by calling them; their results keep the first tensors, as in a graph."""

    def __init__(self, free: float = 1.0, host_share: float = 1.0) -> None:
        self.free = free
        self.host_share = host_share
        self.replays = 0

    def timed(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        return function(), lambda: self.host_share

    def warm_up(self, function: Callable[[], Any]) -> None:
        function()

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with_gradients = torch.is_grad_enabled()
        result = function()

        def replay() -> None:
            self.replays += 1
            with torch.set_grad_enabled(with_gradients):
                repeated = function()
            for fixed, value in zip(tree_leaves(result), tree_leaves(repeated), strict=True):
                if fixed is not None:
                    fixed.copy_(value)

        return result, replay

    def free_fraction(self) -> float:
        return self.free


def use_graphs(
    name: str, branch: nn.Module, notes: list[tuple[str, str]], **options: Any
) -> CpuRecorder:
    recorder = CpuRecorder(**options)
    notify = lambda label, text: notes.append((label, text))  # noqa: E731
    branch._compiled_call_impl = BranchGraphs(name, branch, recorder, notify)  # type: ignore[assignment]
    return recorder


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.frozen(self.layer(rows).tanh())


def rows(seed: int, count: int = 2) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def take_step(tower: nn.Module, inputs: Tensor) -> Any:
    """Forward and backward without earlier gradients; return the output."""
    tower.zero_grad(set_to_none=True)
    output = tower(inputs)
    loss = output[0].sum() if isinstance(output, tuple) else output.sum()
    loss.backward()
    return output


def test_replayed_gradients_equal_eager_ones() -> None:
    """Also after an update; forwards without gradients run eagerly."""
    plain, tower = Tower(), Tower()
    notes: list[tuple[str, str]] = []
    recorder = use_graphs("image", tower, notes)
    for step in range(EAGER_CALLS + 4):
        for model in (plain, tower):
            model.zero_grad(set_to_none=True)
            output = model(rows(step))
            with torch.no_grad():
                model(rows(99))
            output.square().sum().backward()
            with torch.no_grad():
                model.layer.weight -= 0.1 * model.layer.weight.grad
        torch.testing.assert_close(tower.layer.weight.grad, plain.layer.weight.grad, rtol=0, atol=0)
    torch.testing.assert_close(tower.layer.weight, plain.layer.weight, rtol=0, atol=0)
    assert recorder.replays == 2 * 4  # forward and backward
    assert tower.frozen.weight.grad is None and notes == []


def test_accumulation_runs_eagerly_and_keeps_earlier_gradients() -> None:
    """The second forward of a step finds gradients, which may be in the memory of the graph."""
    plain, tower = Tower(), Tower()
    recorder = use_graphs("image", tower, [])
    for step in range(EAGER_CALLS + 3):
        for model in (plain, tower):
            model.zero_grad(set_to_none=True)
            for micro in range(2):
                model(rows(10 * step + micro)).square().sum().backward()
        torch.testing.assert_close(tower.layer.weight.grad, plain.layer.weight.grad, rtol=0, atol=0)
    assert recorder.replays == 2 * 3


def test_forward_runs_eagerly_until_the_backward_of_the_previous_one() -> None:
    tower = Tower()
    recorder = use_graphs("image", tower, [])
    for step in range(EAGER_CALLS + 1):
        take_step(tower, rows(step))
    before = recorder.replays
    tower.zero_grad()
    first, second = tower(rows(7)), tower(rows(8))
    assert recorder.replays == before + 1
    torch.testing.assert_close(second, Tower()(rows(8)), rtol=0, atol=0)
    torch.testing.assert_close(first, Tower()(rows(7)), rtol=0, atol=0)
    del first  # dropped without a backward, as after an out-of-memory error
    tower(rows(9))
    assert recorder.replays == before + 2


def test_rare_shapes_evaluation_and_forced_eager_code_have_no_graphs() -> None:
    tower = Tower()
    recorder = use_graphs("image", tower, [])
    for count in range(1, 6):
        for _ in range(EAGER_CALLS):
            take_step(tower, rows(0, count))
    tower.eval()
    for _ in range(5):
        take_step(tower, rows(0))
    tower.train()
    with force_eager():
        for _ in range(5):
            take_step(tower, rows(0))
    inner = rows(0).requires_grad_()
    for _ in range(5):
        take_step(tower, inner)
    for _ in range(5):
        with torch.no_grad():
            tower(rows(0))
    assert recorder.replays == 0


def test_captured_forward_reads_the_buffers_that_outlive_the_scope_of_their_copies() -> None:
    """A dummy row is forwarded with copies of the buffers, which are then freed."""

    class WithBuffer(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.ones(3, dtype=torch.float64))
            self.seen: list[Tensor] = []

        def forward(self, rows: Tensor) -> Tensor:
            self.seen.append(self.offset)
            return super().forward(rows) + self.offset

    tower = WithBuffer()
    original = tower.offset
    recorder = use_graphs("image", tower, [])
    for step in range(EAGER_CALLS + 1):
        tower.seen.clear()
        tower.zero_grad()
        with preserve_buffers(tower):
            tower(rows(step)).sum().backward()
            assert tower.offset is not original
    # warm-up and capture; the recorder's replay calls the forward again
    assert tower.seen[0] is original and tower.seen[1] is original and recorder.replays == 2
    assert tower.offset is original


def test_forward_that_keeps_the_device_busy_has_no_graphs() -> None:
    tower, notes = Tower(), []
    recorder = use_graphs("image", tower, notes, host_share=0.5)
    for step in range(EAGER_CALLS + 3):
        take_step(tower, rows(step))
    assert recorder.replays == 0 and notes == []


def test_number_of_graphs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    tower = Tower()
    recorder = use_graphs("image", tower, [])
    for count in (1, 2):
        for _ in range(EAGER_CALLS + 1):
            output = take_step(tower, rows(0, count))
            torch.testing.assert_close(output, Tower()(rows(0, count)), rtol=0, atol=0)
    assert recorder.replays == 2


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("memory", "no CUDA graphs for image: they would leave less than 40% of the memory free"),
        ("error", "no CUDA graphs for image: operation not permitted when stream is capturing"),
        ("tuple", "no CUDA graphs for image: it returns a tuple instead of a tensor"),
    ],
)
def test_branch_that_cannot_be_captured_stays_eager(problem: str, text: str) -> None:
    class Pair(Tower):
        def forward(self, rows: Tensor) -> Any:
            return super().forward(rows), rows

    tower, notes = Pair() if problem == "tuple" else Tower(), []
    options = {"free": 0.1} if problem == "memory" else {}
    recorder = use_graphs("image", tower, notes, **options)
    if problem == "error":

        def fail(function: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        recorder.record = fail  # type: ignore[method-assign]
    for step in range(EAGER_CALLS + 3):
        output = take_step(tower, rows(step))
        output = output[0] if problem == "tuple" else output
        torch.testing.assert_close(output, Tower()(rows(step)), rtol=0, atol=0)
    assert notes == [("device", text)] and recorder.replays == 0


class Capture:
    """torch.cuda.graph: if the captured function fails, its stream and its pool stay in use."""

    streams: list[SimpleNamespace]  # the last one is current
    open_pools: list[str]
    valid = 0

    def __init__(self, graph: Any, pool: str = "own", **options: Any) -> None:
        self.pool = pool
        self.stream = options["stream"]

    def __enter__(self) -> None:
        self.streams.append(self.stream)
        self.open_pools.append(self.pool)

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.open_pools.remove(self.pool)
        self.streams.pop()
        Capture.valid += 1


def test_invalid_capture_leaves_neither_its_stream_nor_its_memory_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = SimpleNamespace(device_index=0, stream_id=0)
    side = SimpleNamespace(device_index=0, stream_id=1)
    released: list[str] = []
    monkeypatch.setattr(Capture, "streams", [compute], raising=False)
    monkeypatch.setattr(Capture, "open_pools", [], raising=False)
    monkeypatch.setattr(Capture, "valid", 0)
    functions: dict[str, Any] = {
        "graph": Capture,
        "CUDAGraph": lambda: SimpleNamespace(replay=None, reset=lambda: None),
        "graph_pool_handle": lambda: "shared",
        "Stream": lambda device: side,
        "current_stream": lambda device: Capture.streams[-1],
        "set_stream": Capture.streams.append,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    close = lambda device, pool: Capture.open_pools.remove(pool)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", close, raising=False)
    release = lambda device, pool: released.append(pool)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    recorder = CudaRecorder(torch.device("cpu"))

    def synchronize() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(synchronize)
    assert Capture.streams[-1] is compute and Capture.open_pools == [] and released == ["shared"]
    assert Capture.valid == 1  # a capture of one kernel, which resets the generator
    assert recorder.record(lambda: "result")[0] == "result" and Capture.valid == 2


def test_copy_of_a_branch_has_no_graphs() -> None:
    tower = Tower()
    recorder = use_graphs("image", tower, [])
    average = copy.deepcopy(tower)
    for step in range(EAGER_CALLS + 3):
        take_step(average, rows(step))
    assert recorder.replays == 0


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_run_with_graphs_equals_eager_run(kind: str) -> None:
    weights = []
    for with_graphs in (False, True):
        bench = device_checks.bench_of(kind, torch.device("cpu"))
        branches = bench.model.branches() if with_graphs else {}  # type: ignore[operator]
        recorders = [use_graphs(name, branch, []) for name, branch in branches.items()]
        weights.append(device_checks.train(bench, device_checks.WHOLE, steps=6))
        assert all(recorder.replays == 2 * (6 - EAGER_CALLS) for recorder in recorders)
    toy.assert_equal_weights(weights[1], weights[0])


ONE_PASS = BatchShape(8, 8, world_size=1)


@pytest.mark.parametrize(
    ("settings", "shape", "line"),
    [
        ({}, ONE_PASS, "CUDA graphs for image, text"),
        ({"cuda_graphs": "off"}, ONE_PASS, "no CUDA graphs: train.cuda_graphs is off"),
        ({}, BatchShape(8, 4, 1), "no CUDA graphs: several micro-batches a step"),
        # after an out-of-memory error
        ({}, ONE_PASS.halved(), "no CUDA graphs: several micro-batches a step"),
        ({}, BatchShape(8, 4, 2), "no CUDA graphs: several workers (train.parallel ddp)"),
        (
            {"parallel": "fsdp"},
            BatchShape(8, 4, 2),
            "no CUDA graphs: several workers (train.parallel fsdp)",
        ),
        (
            {"parallel": "branches"},
            ONE_PASS,
            "no CUDA graphs: train.parallel branches copies between devices in a forward",
        ),
        (
            {"activation_checkpointing": ("text",)},
            ONE_PASS,
            "no CUDA graphs: train.activation_checkpointing is set",
        ),
    ],
)
def test_line_names_what_has_no_graphs(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], shape: BatchShape, line: str
) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", lambda device: CpuRecorder())
    branches = build(MODELS["clip"][0], VOCAB).train().branches()
    train = Train(**settings)
    assert graph_branches(branches, train, shape, GPU, lambda *_: None) == line
    has_graphs = {isinstance(b._compiled_call_impl, BranchGraphs) for b in branches.values()}
    assert has_graphs == {line.startswith("CUDA graphs for image")}
    assert graph_branches(branches, train, shape, torch.device("cpu"), lambda *_: None) == ""


def test_dropout_and_running_statistics_have_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", lambda device: CpuRecorder())
    spec = WITH_DROPOUT.model_copy(update={"image": ImageTower(name="resnet18")})
    branches = build(spec, VOCAB).train().branches()
    line = graph_branches(branches, Train(), ONE_PASS, GPU, lambda *_: None)
    assert line == (
        "CUDA graphs for no branch; not for image: BatchNorm2d updates running statistics; "
        "not for text: it has dropout, or layers of other packages"
    )
