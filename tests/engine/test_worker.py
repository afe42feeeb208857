"""One worker without Ray: it probes its micro-batch, resumes, and is deterministic if requested."""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from mmray.config import CustomModel, Train, recipes
from mmray.engine import build as engine_build
from mmray.engine import memory_probe, worker
from mmray.engine.checkpoint import state_io
from mmray.engine.collectives import Group
from mmray.engine.heartbeat import Heartbeat
from mmray.engine.parallel.transforms import num_compiled_graphs
from mmray.engine.worker import _report_first
from mmray.engine.worker_context import DriverHandle
from mmray.errors import UsageError
from mmray.models.build import build
from tests.engine import recipe_models
from tests.engine.single_worker import make_prepared, run_worker
from tests.training import runs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("worker") / "set")


@pytest.mark.parametrize("group_by_length", [False, True])
def test_worker_records_probed_micro_batch_and_trains_with_it(
    prepared, tmp_path, monkeypatch, group_by_length
):
    fixed, lines, notes = run_worker(
        prepared, tmp_path / "fixed", 4, group_by_length=group_by_length
    )
    assert not any("rows fit" in note for note in notes)
    one_row = lines[0]["memory/activations_gib"] / 4 * 2**30
    memory = SimpleNamespace(
        available=5.5 * one_row * memory_probe.PEAK_PER_SAVED / memory_probe.HOST_FRACTION, used=0
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    auto, auto_lines, notes = run_worker(
        prepared, tmp_path / "auto", "auto", group_by_length=group_by_length
    )
    assert "micro-batches of 4 rows fit" in notes
    assert {line["batch/micro"] for line in lines + auto_lines} == {4}
    assert abs(lines[0]["train/loss"] - lines[-1]["train/loss"]) > 0.01
    same = ("rows_sha", "train/loss", "batch/padding")
    assert [[line[name] for name in same] for line in lines] == [
        [line[name] for name in same] for line in auto_lines
    ]
    assert runs.same_weights(fixed["model"], auto["model"])


class WithoutEvaluation(nn.Module):
    """A user's model that trains but does not support evaluation."""

    def __init__(self, spec, vocab_size):
        super().__init__()
        self.towers = runs.DoubleTowers(spec, vocab_size)

    def forward(self, batch):
        return self.towers(batch)


def test_user_model_without_evaluation_is_refused_before_first_step(prepared, tmp_path):
    inputs = runs.config("made", tmp_path, "inputs").model.inputs
    model = CustomModel(kind=f"{__name__}:WithoutEvaluation", inputs=inputs)
    with pytest.raises(
        UsageError, match="has no embed_image and no embed_text, which evaluation calls"
    ):
        run_worker(prepared, tmp_path / "evaluated", 4, model=model)
    assert not (tmp_path / "evaluated" / "metrics.jsonl").exists()
    _, lines, _ = run_worker(prepared, tmp_path / "unevaluated", 4, model=model, evaluate=False)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_resumed_worker_frees_checkpoint_and_gives_same_weights(prepared, tmp_path, monkeypatch):
    whole, _, _ = run_worker(prepared, tmp_path / "whole", 4, checkpoint_every=2)
    loaded, alive, load, progress = [], [], state_io.load, []

    def load_and_track(*args, **kwargs):
        state = load(*args, **kwargs)
        loaded.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    with monkeypatch.context() as patch:
        patch.setattr(state_io, "load", load_and_track)
        patch.setattr(Heartbeat, "count_progress", lambda _: progress.append(len(loaded)))
        patch.setattr(
            Heartbeat, "on_step", lambda *_: alive.append(sum(it() is not None for it in loaded))
        )
        options = {"checkpoint": tmp_path / "whole" / "checkpoints" / "step-2"}
        resumed, _, _ = run_worker(
            prepared, tmp_path / "resumed", 4, options=options, checkpoint_every=2
        )
    assert loaded and alive == [0, 0]
    assert progress[0] == 0  # reading a request counts, so a long load is no hang
    assert runs.same_weights(whole["model"], resumed["model"])


@pytest.fixture
def default_determinism(monkeypatch):
    """Restore the global state that `seed_everything` sets."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("default_determinism")
def test_deterministic_runs_are_bitwise_equal(prepared, tmp_path):
    """With dropout; earlier random numbers of the process do not matter."""
    first, lines, _ = run_worker(prepared, tmp_path / "first", 4, 0.3, deterministic=True)
    assert (
        torch.are_deterministic_algorithms_enabled()
        and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    )
    torch.rand(1000)
    second, second_lines, _ = run_worker(prepared, tmp_path / "second", 4, 0.3, deterministic=True)
    assert [line["train/loss"] for line in lines] == [line["train/loss"] for line in second_lines]
    assert runs.same_weights(first["model"], second["model"])


def test_evaluation_compiles_nothing(prepared, tmp_path):
    """Graphs without gradients would take longer to compile than a few batches save."""
    torch.compiler.reset()  # other tests of this process may have compiled these graphs
    before = num_compiled_graphs()
    _, lines, _ = run_worker(prepared, tmp_path / "run", 4, compile="eager")
    assert "evaluate/loss" in lines[-1]
    graphs = [line["compile/graphs"] for line in lines]
    assert graphs[0] > before and set(graphs) == {graphs[0]}


def test_dry_run_is_in_training_mode(prepared, tmp_path, monkeypatch):
    """Otherwise it would measure and compile a step without dropout and float8."""
    modes = []

    def build_in_evaluation_mode(*args, **kwargs):  # as transformers reads weights
        return build_model(*args, **kwargs).eval()

    def record_modes(config, model, *args):
        modes.extend(layer.training for layer in model.modules())
        return dry_run(config, model, *args)

    build_model, dry_run = engine_build.build_model, worker.dry_run
    monkeypatch.setattr(engine_build, "build_model", build_in_evaluation_mode)
    monkeypatch.setattr(worker, "dry_run", record_modes)
    run_worker(prepared, tmp_path / "run", 4, evaluate=False)
    assert modes and all(modes)


def test_packing_is_checked_without_what_depends_on_the_other_rows():
    """Dropout would make packed rows differ, so they would be padded."""

    class Packed(nn.Module):
        packed = True

        def differs_if_packed(self):
            return self.training

    model, messages = Packed(), []
    driver = DriverHandle(messages.append, lambda: False, lambda _: 0, None)
    engine_build.check_packing("fp32", model, Group(), driver)
    assert model.packed and messages == []


def test_first_batch_is_reported_and_not_kept_in_memory():
    class Rows(list):
        """Can be weakly referenced."""

    seen = []
    driver = DriverHandle(seen.append, lambda: False, lambda _: 0, None)
    steps = _report_first((Rows([number]) for number in range(3)), driver)
    assert seen == []
    first = weakref.ref(next(steps))
    assert [message["stage"] for message in seen] == ["waiting for the first batch", "first step"]
    assert list(steps) == [[1], [2]] and first() is None and len(seen) == 2
    assert list(_report_first([], driver)) == []


class ReadsValues(nn.Module):
    """A user's model that cannot run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"image_embed": self.weight * batch["image"].float().mean().item()}


@pytest.mark.parametrize("pays", [True, False])
def test_length_of_a_run_decides_whether_it_is_compiled(monkeypatch, pays):
    seen = []

    def compile_pays(*counts):
        seen.append(counts)
        return pays

    monkeypatch.setattr(engine_build, "compile_pays", compile_pays)
    monkeypatch.setattr(engine_build, "peak_flops", lambda *_: 1e15)
    monkeypatch.setattr(engine_build, "capability_of", lambda _: (9, 0))
    gpu = torch.device("cuda", 0)
    model, _ = recipe_models.MODELS["clip"]
    config = recipes.load("clip").replace(
        model=model.replace(vocab_size=recipe_models.VOCAB), train=Train(precision="bf16")
    )
    network = build(config.model, recipe_models.VOCAB)
    before = [weight.clone() for weight in network.parameters()]
    assert engine_build._earns_compile(config, network, gpu, 8, 100) == pays
    (flops, rows, steps, peak) = seen.pop()
    assert flops > 1e4 and (rows, steps, peak) == (8, 100, 1e15)
    assert all(map(torch.equal, before, network.parameters()))
    assert engine_build._earns_compile(config, ReadsValues(), gpu, 8, 100)
    sharded = config.replace(train=Train(precision="bf16", parallel="fsdp"))
    assert engine_build._earns_compile(sharded, network, gpu, 8, 100)
    float8 = config.replace(train=Train(precision="bf16", float8="tensorwise"))
    assert engine_build._earns_compile(float8, network, gpu, 8, 100)
    assert not seen
