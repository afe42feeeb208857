"""The worker of Ray Train, in this process without Ray."""

import sys
import threading
from types import SimpleNamespace

import pytest
import ray.train

from mmray.config import Config
from mmray.data.stream.order import ResumePoint
from mmray.training.workers.coordinator import Coordinator
from mmray.training.workers.ray_trainer import train_loop_per_worker
from tests.polling import wait_until


class HangingImport:
    """An import of the engine that hangs, as from a file system that does not answer, and then
    fails.
    """

    def __init__(self):
        self.release = threading.Event()

    def find_spec(self, name, *_):
        if name == "mmray.engine.worker":
            self.release.wait(60)
            raise ImportError("released")


@pytest.fixture
def coordinator(monkeypatch):
    """The coordinator of rank 1; calls are made at once."""
    rank = SimpleNamespace(get_world_rank=lambda: 1, get_local_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: rank)
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node")
    )
    monkeypatch.setattr(ray, "get", lambda reply, timeout=None: reply)
    blocks = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("mmray.training.workers.ray_trainer.rank_blocks", lambda *_: blocks)
    made = Coordinator(set())
    made.heartbeat = SimpleNamespace(remote=made.heartbeat)
    made.push = SimpleNamespace(remote=made.push)
    return made


def test_worker_whose_import_hangs_sends_heartbeats(coordinator, monkeypatch, tmp_path):
    finder, errors = HangingImport(), []
    monkeypatch.delitem(sys.modules, "mmray.engine.worker", raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setattr("mmray.engine.heartbeat.INTERVAL_S", 0.02)
    context = SimpleNamespace(folder=tmp_path, config=Config(), reader=None)
    arguments = {
        "coordinator": coordinator,
        "context": context,
        "resume_point": ResumePoint(SimpleNamespace(world_size=2), 6),
        "decoders": None,
    }

    def run():
        try:
            train_loop_per_worker(arguments)
        except ImportError as error:
            errors.append(error)

    beats, send = [], coordinator.heartbeat.remote
    coordinator.heartbeat.remote = lambda beat: beats.append(beat) or send(beat)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def beats_of_import():
        return [beat for beat in beats if "find_spec" in beat.get("where", "")]

    wait_until(
        lambda: (
            len(last := beats_of_import()[-5:]) == 5
            and len({beat["progress"] for beat in last}) == 1
        )
    )
    finder.release.set()
    thread.join(60)
    hanging = beats_of_import()
    assert {
        (beat["rank"], beat["step"], beat["state"], beat["in_collective"]) for beat in hanging
    } == {(1, 6, "starting", False)}
    assert "train_loop_per_worker" in errors[0].__notes__[0] and coordinator.drain(0)[1] == []
