"""One worker without Ray: it probes its micro-batch, and is deterministic if requested."""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from mmray.config import CustomModel
from mmray.engine import loop, memory_probe, precision
from mmray.engine.checkpoint import state_io
from mmray.engine.heartbeat import Heartbeat
from mmray.engine.precision import seed_everything
from mmray.errors import UsageError
from tests.engine.custom_model import DoubleTowers
from tests.engine.single_worker import ran, rows_of
from tests.train import runs

pytestmark = pytest.mark.usefixtures("one_thread")  # a worker sets its own number of threads


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return rows_of(tmp_path_factory.mktemp("worker") / "set")


@pytest.mark.parametrize("group_by_length", [False, True])
def test_worker_records_probed_micro_batch_and_trains_with_it(prepared, tmp_path, monkeypatch, group_by_length):
    given, lines, notes = ran(prepared, tmp_path / "given", 4, group_by_length=group_by_length)
    assert not any("rows fit" in note for note in notes)
    one_row = lines[0]["memory/activations_gib"] / 4 * 2**30
    room = SimpleNamespace(available=5.5 * one_row / memory_probe.HOST_SHARE, used=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    found, found_lines, notes = ran(prepared, tmp_path / "auto", "auto", group_by_length=group_by_length)
    assert "micro-batches of 4 rows fit" in notes
    assert {line["batch/micro"] for line in lines + found_lines} == {4}
    assert (found["progress"]["micro"], found["progress"]["planned_micro"]) == (4, 4)
    assert abs(lines[0]["train/loss"] - lines[-1]["train/loss"]) > 0.01
    same = ("rows_sha", "train/loss", "batch/padding")
    assert [[line[name] for name in same] for line in lines] == [[line[name] for name in same] for line in found_lines]
    assert ("batch/padding_unbucketed" in lines[0]) == group_by_length
    assert runs.same_weights(given["model"], found["model"])


class Bare(nn.Module):
    """A user's model that trains but does not support evaluation."""

    def __init__(self, spec, vocab_size):
        super().__init__()
        self.towers = DoubleTowers(spec, vocab_size)

    def forward(self, batch):
        return self.towers(batch)


def test_user_model_without_evaluation_is_refused_before_first_step(prepared, tmp_path):
    own = CustomModel(kind=f"{__name__}:Bare", inputs=runs.config("made", tmp_path, "inputs").model.inputs)
    with pytest.raises(UsageError, match=r":Bare` has no embed_image and no embed_text, which evaluation calls"):
        ran(prepared, tmp_path / "scored", 4, model=own)
    assert not (tmp_path / "scored" / "metrics.jsonl").exists()
    _, lines, _ = ran(prepared, tmp_path / "unscored", 4, model=own, scored=False)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_worker_probes_trains_and_evaluates_in_the_agreed_precision(prepared, tmp_path, monkeypatch):
    chosen = []
    choose = precision.select_precision
    monkeypatch.setattr(precision, "common_precision", lambda setting, group: {"auto": "bf16"}[setting])
    for module in (precision, loop):
        monkeypatch.setattr(
            module, "select_precision", lambda name, device: chosen.append(name) or choose(name, device)
        )
    state, _, _ = ran(prepared, tmp_path / "agreed", 4, precision="auto")
    assert len(chosen) == 3 and set(chosen) == {"bf16"}
    assert state["progress"]["step"] == 4


def test_resumed_worker_frees_checkpoint_and_gives_same_weights(prepared, tmp_path, monkeypatch):
    whole, _, _ = ran(prepared, tmp_path / "whole", 4, checkpoint_every=2)
    read, alive, load = [], [], state_io.load

    def loading(*given):
        state = load(*given)
        read.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    def on_step(pulse, step, metrics):
        alive.append(sum(one() is not None for one in read))

    with monkeypatch.context() as inside:
        inside.setattr(state_io, "load", loading)
        inside.setattr(Heartbeat, "on_step", on_step)
        found = tmp_path / "whole" / "checkpoints" / "step-2"
        again, _, _ = ran(prepared, tmp_path / "again", 4, checkpoint_every=2, found=found)
    assert read and alive == [0, 0]
    assert runs.same_weights(whole["model"], again["model"])


@pytest.fixture
def settled():
    """Restore the global state that `seed_everything` sets."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    before, workspace = torch.are_deterministic_algorithms_enabled(), os.environ.pop(name, None)
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)
    os.environ.pop(name, None)
    if workspace is not None:
        os.environ[name] = workspace


@pytest.mark.usefixtures("settled")
def test_deterministic_runs_are_bitwise_equal(prepared, tmp_path):
    """With dropout; earlier random numbers of the process do not matter."""
    first, lines, _ = ran(prepared, tmp_path / "first", 4, 0.3, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.rand(1000)
    second, second_lines, _ = ran(prepared, tmp_path / "second", 4, 0.3, deterministic=True)
    assert [line["train/loss"] for line in lines] == [line["train/loss"] for line in second_lines]
    assert runs.same_weights(first["model"], second["model"])


@pytest.mark.usefixtures("settled")
def test_deterministic_refuses_nondeterministic_algorithms():
    numbers, places = torch.zeros(4), torch.tensor([0, 0])
    seed_everything(1, deterministic=False)
    numbers.put_(places, torch.ones(2))
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    seed_everything(1, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        numbers.put_(places, torch.ones(2))
