"""The engine on GPUs, real or fake, takes the steps of a CPU and synchronizes once per step.

The checks of tests/gpu/device_checks.py also run without pytest: `python -m tests.gpu`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mmray.bench import conversations
from mmray.config import recipes
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.slots import PixelSlots
from mmray.engine import build as engine_build
from mmray.engine import loop, worker
from mmray.engine.checkpoint.staging import HostStager
from mmray.engine.collectives import Group
from mmray.engine.parallel.strategy import use_channels_last
from mmray.engine.prefetch import DeviceCopier, make_local_batch, register_pinned
from mmray.engine.step import accumulate_gradients, optimizer_step
from mmray.errors import OutOfMemoryError
from mmray.training.resolve import with_written_weights
from tests.engine import toy
from tests.engine.fake_cuda import CPU, DEVICES, fake_gpus, gpus, has_gpus, local_batch_on
from tests.engine.single_worker import make_prepared, run_worker
from tests.gpu import device_checks
from tests.gpu.device_checks import MODELS

GPU = DEVICES[0]
LONG_PLAN = SamplePlan(num_rows=20, global_batch_size=8, world_size=1, seed=1, steps=6)


@pytest.fixture(scope="module", autouse=True)
def transformers_imported():
    """transformers imports modules when a model is built, which fails if torch.cuda is replaced."""
    for kind in MODELS:
        device_checks.bench_of(kind, CPU)


def test_fake_gpus_refuse_mixed_devices_and_count_synchronizations(monkeypatch):
    with fake_gpus(monkeypatch) as syncs:
        numbers = torch.ones(3, device=GPU) * 2
        for elsewhere in (CPU, DEVICES[1]):
            with pytest.raises(RuntimeError, match="same device"):
                numbers + torch.ones(3, device=elsewhere)
        assert syncs.count == 0
        reads = (torch.Tensor.cpu, torch.nonzero, lambda it: it.tolist(), lambda it: it[it > 0])
        for count, read in enumerate(reads, 1):
            read(numbers)
            assert syncs.count == count


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    ["sigmoid", "classification + sigmoid", "contrastive + 0.5 * matching"],
)
def test_step_of_each_objective_synchronizes_once_with_gradients_of_a_cpu(monkeypatch, kind):
    batch = make_local_batch(toy.cut(toy.rows(9, 0, invalid=(4,)), 4))

    def gradient(device):
        state = toy.train_state(
            toy.Toy(kind=kind).double(), Group(device=device), toy.objective(kind)
        )
        accumulate_gradients(state, local_batch_on(batch, device), lambda index: index)
        return torch.cat(
            [p.grad.cpu().flatten() for p in state.model.parameters() if p.grad is not None]
        )

    expected = gradient(CPU)
    with gpus(monkeypatch) as syncs:
        assert torch.allclose(gradient(GPU), expected, rtol=1e-9, atol=1e-12)
        state = toy.train_state(toy.Toy(kind=kind), Group(device=GPU), toy.objective(kind))
        moved, before = local_batch_on(batch, GPU), syncs.count
        assert optimizer_step(state, moved, lambda index: index).is_finite
        assert syncs.count == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_run_on_gpu_equals_run_on_cpu_and_resumes(monkeypatch, kind):
    with gpus(monkeypatch):
        differences = device_checks.check_run(kind, GPU)
    if not has_gpus():
        assert differences["resumed"] == 0 and differences["from_cpu"] < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS if has_gpus() else ["clip"])
def test_accumulated_step_on_gpu_equals_whole_batch(monkeypatch, kind):
    with gpus(monkeypatch):
        device_checks.check_accumulation(kind, GPU)


def test_weights_of_2d_convolutions_are_stored_channels_last_and_others_as_they_are():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 2), torch.nn.Conv3d(3, 8, 2))
    expected = [weight.clone() for weight in model.parameters()]
    use_channels_last(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[1].weight.is_contiguous()
    assert all(map(torch.equal, model.parameters(), expected))


@pytest.mark.gpu
def test_packed_conversations_on_gpu_have_the_loss_of_padded_ones(monkeypatch):
    monkeypatch.setattr(conversations, "NUM_ROWS", 8)
    monkeypatch.setattr(conversations, "MIN_STEPS", 1)
    config = with_written_weights(recipes.sample_vlm().with_cluster(workers=1))
    small = config.batch.replace(micro=2, global_=4)
    train = config.train.replace(precision="fp32", compile="none")
    config = config.replace(batch=small, train=train)
    with gpus(monkeypatch):
        result = conversations._measure(config, Group(device=GPU), None, pairs=1, window_s=0.01)
    packed, padded = (row["loss"] for row in result["rows"])
    assert packed == pytest.approx(padded, rel=1e-3 if has_gpus() else 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(
    not has_gpus(),
    reason="a fake GPU cannot run compiled code; tests/engine/parallel does on a CPU",
)
@pytest.mark.parametrize("kind", MODELS)
def test_compiled_run_on_gpu_equals_eager_run(kind):
    device_checks.check_compiled(kind, GPU)


@pytest.mark.gpu
@pytest.mark.skipif(
    not has_gpus(),
    reason="a fake GPU has no graphs; parallel/test_cuda_graphs.py tests their use on a CPU",
)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_run_with_cuda_graphs_equals_eager_run(kind):
    device_checks.check_graphs(kind, GPU)


def test_oom_of_prefetched_batch_restarts(monkeypatch):
    copy, calls = DeviceCopier.__call__, iter(range(10**6))

    def fail_at_second(copier, batch):
        if next(calls) == 1:
            raise torch.OutOfMemoryError("allocation failed for the next batch")
        return copy(copier, batch)

    monkeypatch.setattr(DeviceCopier, "__call__", fail_at_second)
    message = (
        r"out of memory at step 2 with micro-batches of 3 rows "
        r"\(rank 0: allocation failed for the next batch"
    )
    with fake_gpus(monkeypatch), pytest.raises(OutOfMemoryError, match=message) as raised:
        toy.run(toy.Toy().double().to(GPU), LONG_PLAN, Group(device=GPU))
    assert raised.value.retry_shape.micro_batch_size == 2


class Stream:
    """Steps that stall after `stall_after` steps until interrupted, and are slow to end."""

    def __init__(self, plan, stall_after=10**6):
        self.plan, self.stall_after, self.interrupted = plan, stall_after, threading.Event()
        self.stalled = threading.Event()

    def steps(self):
        for number, micro_batches in enumerate(toy.steps_of(self.plan, 0)):
            if number == self.stall_after:
                self.stalled.set()
                assert self.interrupted.wait(60)
            yield micro_batches
        time.sleep(0.5)


STALL_AFTER = {"success": 10**6, "stop": 3, "error": 3, "out of memory": 1}


@pytest.mark.parametrize("end", STALL_AFTER)
def test_stream_can_be_closed_when_the_loop_ends(monkeypatch, end):
    """The prefetch thread has left the stream, even if it was waiting for rows: the generator
    `steps` could not be closed otherwise.
    """
    stream, model, calls = Stream(LONG_PLAN, STALL_AFTER[end]), toy.Toy(), itertools.count(1)

    def reach(step):
        return next(calls) == step and stream.stalled.wait(60)

    def fail_at_step_3(step, metrics):
        if reach(3):
            raise KeyError("of the user")

    options = {"interrupt_stream": stream.interrupted.set}
    if end == "stop":
        options["stop"] = lambda: reach(3)
    elif end == "error":
        options["callbacks"] = (SimpleNamespace(on_step=fail_at_step_3),)
    elif end == "out of memory":
        model = toy.MemoryLimitedToy(toy.MemoryFault(max_rows=0))
    raised = {"error": pytest.raises(KeyError), "out of memory": pytest.raises(OutOfMemoryError)}
    steps = stream.steps()
    with fake_gpus(monkeypatch):
        spec = toy.train_spec(model.double().to(GPU), LONG_PLAN, Group(device=GPU), **options)
        with raised.get(end, nullcontext()):
            result = loop.train_loop(spec, steps)
            assert result.status == {"success": "finished", "stop": "stopped"}[end]
    steps.close()


@pytest.mark.gpu
@pytest.mark.parametrize("invalid", [(), (8,), (2,)])
def test_pixels_are_copied_from_the_shared_memory_that_holds_them(monkeypatch, invalid):
    """At once, unless an unreadable row is between others: then the step is gathered first."""
    slots = PixelSlots(2, 9, (3, toy.SIDE, toy.SIDE))
    rows = toy.rows(9, 0, invalid)
    slots.pixels[1] = rows["image"].numpy()
    shared = rows | {"image": torch.from_numpy(slots.pixels[1])}
    expected = make_local_batch(toy.cut(rows, 4)).micro_batches
    notes = []
    with gpus(monkeypatch), register_pinned(slots.pixels, lambda *note: notes.append(note)):
        copier = DeviceCopier(GPU)
        copied = copier(make_local_batch(toy.cut(shared, 4)))
        copier.wait()
        slots.pixels[:] = 0
        on_cpu = [
            {name: tensor.cpu() for name, tensor in micro_batch.items()}
            for micro_batch in copied.batch.micro_batches
        ]
    assert len(copied.memory) == (1 if invalid == (2,) else 2) and not notes
    for micro_batch, plain in zip(on_cpu, expected, strict=True):
        assert micro_batch.keys() == plain.keys()
        assert all(torch.equal(micro_batch[name], plain[name]) for name in plain)


def test_step_is_copied_at_once_through_memory_that_is_reused(monkeypatch):
    """A ragged step, with columns of every type and one without elements; the host overwrites the
    memory afterwards.
    """
    steps = [toy.cut(toy.rows(rows, step, invalid=(1,)), 4) for step, rows in enumerate((9, 9, 40))]
    for micro_batches in steps:
        micro_batches[0]["empty"] = torch.zeros(4, 0)
    with gpus(monkeypatch):
        copier, pins, copied = DeviceCopier(GPU), [], []
        for micro_batches in steps:
            batch = copier(make_local_batch(micro_batches))
            pins.append(copier._pinned)
            torch.cuda.synchronize()
            copied.append(
                [
                    {name: tensor.cpu() for name, tensor in each.items()}
                    for each in batch.batch.micro_batches
                ]
            )
            assert all(
                tensor.device == GPU
                for each in batch.batch.micro_batches
                for tensor in each.values()
            )
    assert pins[0] is pins[1] and len(pins[2]) > len(pins[1])
    for step, micro_batches in zip(copied, steps, strict=True):
        for got, expected in zip(step, make_local_batch(micro_batches).micro_batches, strict=True):
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_copy_of_a_checkpoint_is_awaited_by_its_write_and_on_the_device_by_the_next_update(
    monkeypatch,
):
    calls, weight = [], torch.nn.Parameter(torch.ones(2))
    weight.grad, optimizer = torch.ones(2), torch.optim.SGD([weight], lr=0.1)
    side = SimpleNamespace(
        device=GPU, wait_stream=calls.append, synchronize=lambda: calls.append("host")
    )
    compute = SimpleNamespace(wait_stream=calls.append)
    with fake_gpus(monkeypatch):
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
        stager = HostStager()
        staged = stager.stage({"w": torch.ones(2, device=GPU), "step": torch.ones(())})
        assert list(staged) == ["step", "w"]  # the host waits for the copy of a scalar
        assert all(tensor.device == CPU for tensor in staged.values()) and calls == [compute]
        optimizer.step()
        assert calls == [compute, side]
        stager.synchronize_staging()
        stager.close()
        optimizer.step()
    assert calls == [compute, side, "host", "host"]


@pytest.mark.gpu
def test_half_precision_synchronizes_once_per_step(monkeypatch):
    with gpus(monkeypatch) as syncs:
        device_checks.check_half_precision("clip", GPU, syncs)


@pytest.mark.gpu
def test_branches_on_two_gpus_equal_one_device(monkeypatch):
    with gpus(monkeypatch, count=2):
        device_checks.check_branches("clip", GPU)


class Driver:
    """The library of the driver, whose cuInit returns only when the imports have started."""

    def __init__(self, error: int, imports: Event) -> None:
        self.error = error
        self.imports = imports
        self.started = Event()
        self.gpus: list[int] = []

    def cuInit(self, flags):
        self.started.set()
        assert self.imports.wait(30)
        return self.error

    def cuDeviceGet(self, gpu, index):
        gpu._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, gpu):
        self.gpus.append(gpu.value)
        return 0


@pytest.mark.parametrize("error", [0, 999, None], ids=["sound", "failing", "missing"])
def test_worker_starts_cuda_during_its_imports_and_selects_its_gpu(monkeypatch, tmp_path, error):
    """Code that names no device would otherwise create a context on the first GPU."""
    prepared, selected, imports = make_prepared(tmp_path / "set"), [], Event()
    driver = Driver(error, imports)

    def load(name):
        if error is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    def import_libraries(_):
        assert not selected and (error is None or driver.started.wait(30))
        imports.set()

    def select(device):
        selected.extend([device, *driver.gpus])

    def seed(*_):
        raise KeyError(*selected)

    with fake_gpus(monkeypatch):
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(torch.cuda, "set_device", select)
        monkeypatch.setattr(worker, "import_libraries", import_libraries)
        monkeypatch.setattr(worker, "seed_everything", seed)
        with pytest.raises(KeyError) as raised:
            run_worker(prepared, tmp_path / "run", 4, options={"device": DEVICES[1]})
    # torch finds the context of its GPU, and otherwise creates it as before
    assert raised.value.args == ((DEVICES[1], 1) if error == 0 else (DEVICES[1],))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"micro": "auto", "precision": "auto", "ema": 0.9, "activation_checkpointing": ("text",)},
        {"parallel": "branches"},
    ],
)
def test_worker_probes_trains_evaluates_and_saves(monkeypatch, tmp_path, settings):
    """In float32 the results equal those of a CPU."""
    prepared, options = make_prepared(tmp_path / "set"), {"micro": 4} | settings
    _, expected, _ = run_worker(prepared, tmp_path / "cpu", **options | {"precision": "fp32"})
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    build_model = engine_build.build_model

    def build_with_limit(config, group, *args, **kwargs):
        # inductor, which models may import, reads it then
        assert "TORCHINDUCTOR_COMPILE_THREADS" in os.environ
        if has_gpus():  # it would draw other random weights than a CPU
            group = replace(group, device=CPU)
        return build_model(config, group, *args, **kwargs)

    monkeypatch.setattr(engine_build, "build_model", build_with_limit)
    with gpus(monkeypatch, count=2 if "parallel" in settings else 1):
        state, lines, notes = run_worker(
            prepared, tmp_path / "gpu", options={"device": GPU}, **options
        )
    assert {leaf.device for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)} == {CPU}
    assert [line["rows_sha"] for line in lines] == [line["rows_sha"] for line in expected]
    assert ("micro-batches of 8 rows fit" in notes) == (settings.get("micro") == "auto")
    # without a try of the compiler, which a fake GPU fails
    assert "compile none: the run is too short to earn it" in notes
    assert not any("torch.compile cannot build" in note for note in notes)
    # a GPU sums in another order
    close = 0.1 if "precision" in settings else 0.01 if has_gpus() else 1e-4
    assert lines[-1]["evaluate/loss"] == pytest.approx(expected[-1]["evaluate/loss"], rel=close)
    assert lines[-1]["evaluate/rows"] == 22
