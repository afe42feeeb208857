"""The heartbeat of a training worker reports the state of the training thread."""

import threading
import time
from contextlib import suppress
from pathlib import Path

from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.engine import heartbeat, loop
from mmray.engine.heartbeat import Heartbeat
from mmray.errors import TrainingError
from tests.engine import toy


def test_names_of_loop_functions_match():
    """The heartbeat recognizes phases of the loop by these names."""
    assert all(hasattr(loop, name) for name in {heartbeat.LOOP_FUNCTION, *heartbeat.FUNCTIONS_WITHOUT_STEPS})
    files = (heartbeat.CHECKPOINT_WAIT_FILE, heartbeat.DATA_WAIT_FILE, heartbeat.COLLECTIVES_FILE)
    assert all(Path(file).is_file() for file in files)


def test_wait_for_rows_is_reported_on_a_cpu(tmp_path, monkeypatch):
    """The innermost frame is of the stream, because a CPU has no prefetch thread."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    plan = SamplePlan(num_rows=8, global_rows=8, world_size=1, micro=8, seed=1, steps=1)
    release, messages = threading.Event(), []

    def slow_blocks():
        release.wait(30)
        yield from ()

    def train():
        with Heartbeat(messages.append, {}, tmp_path / "rank-0.txt", 60).running(0), suppress(TrainingError):
            loop.train_loop(toy.train_spec(toy.Toy(), plan), iter_micro_batches(slow_blocks(), plan))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not any(message.get("waits_for_data") for message in messages) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    waited = messages[-1]["waits_for_data"]
    release.set()
    thread.join(60)
    assert waited and not thread.is_alive()
