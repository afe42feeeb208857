"""The heartbeat of a training worker reports the state of the training thread."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.engine import heartbeat, loop, step
from mmray.engine.heartbeat import Frame, Heartbeat, stack_of_thread
from mmray.engine.metrics.meters import reduce_over_ranks
from mmray.errors import TrainingError
from tests.engine import toy


def test_names_of_loop_functions_match():
    """The heartbeat recognises phases of the loop by these names."""
    assert all(hasattr(loop, name) for name in {heartbeat.LOOP, *heartbeat.LONG_PHASES})
    files = (heartbeat.CHECKPOINT_WAIT, heartbeat.DATA_WAIT, heartbeat.DEVICE_READ)
    assert all(Path(file).is_file() for file in files)


def test_location_is_innermost_frame_of_mmray_or_user_code():
    library, own = Frame(threading.__file__, 1, "wait"), Frame(loop.__file__, 2, "run")
    user = Frame("/me/cb.py", 3, "f")
    assert heartbeat._location([library, user, own]).startswith("/me/cb.py:3 in f")
    assert heartbeat._location([library, own, user]).endswith("loop.py:2 in run")
    assert heartbeat._location([]) == "unknown"


def test_stack_has_calls_that_have_not_returned():
    release, started = threading.Event(), threading.Event()

    def inner():
        started.set()
        release.wait(30)

    def outer():
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    started.wait(30)
    calls = stack_of_thread(thread.ident)
    assert [call.function for call in calls if call.file == __file__] == ["inner", "outer"]
    release.set()
    thread.join()


def test_heartbeat_reports_step_and_writes_stacks_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.05)
    sent, requested = [], threading.Event()
    send = lambda message: (sent.append(message), requested.is_set())[1]  # noqa: E731
    reporter = Heartbeat(send, {"rank": 1, "node": "n", "pid": 1}, tmp_path / "stacks" / "rank-1.txt", 60)
    with reporter.running(4):
        time.sleep(0.2)
        reporter.on_step(5, None)
        requested.set()
        time.sleep(0.2)
    assert sent[0]["step"] == 4 and sent[-2]["step"] == 5 and sent[-1]["ended"]
    assert not sent[0]["in_collective"]
    assert "test_heartbeat.py" in (tmp_path / "stacks" / "rank-1.txt").read_text()


@pytest.mark.parametrize(("reads", "value"), [("step", torch.ones(2)), ("line", torch.ones(1, 1))])
def test_reading_reduced_result_counts_as_in_collective(tmp_path, monkeypatch, reads, value):
    """In the code of the engine: the norms of a step and the metrics of a logged step."""
    device, queue, messages = SimpleQueue(), SimpleQueue(), []
    state = toy.train_state(toy.Toy())
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)

    def run_rank():
        with Heartbeat(messages.append, {}, tmp_path / "rank-0.txt", 60).running(1):
            if reads == "step":
                step.apply_update(state, torch.zeros(1))
            else:
                reduce_over_ranks(state.group, [torch.ones(1)], {})
            queue.put("returned")

    monkeypatch.setattr(torch.Tensor, "cpu", device.get)  # blocks in native code, as torch does
    thread = threading.Thread(target=run_rank, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 10
    while not (messages and messages[-1]["in_collective"]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    last = messages[-1]
    device.put(value)
    assert queue.get(timeout=10) == "returned"
    thread.join(10)
    assert last["in_collective"] and "collectives.py" in last["where"]


def test_wait_for_rows_is_reported_on_a_cpu(tmp_path, monkeypatch):
    """The innermost frame is of the stream, because a CPU has no prefetch thread."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    plan = SamplePlan(num_rows=8, global_rows=8, world=1, micro=8, seed=1, steps=1)
    release, messages = threading.Event(), []

    def slow_blocks():
        release.wait(30)
        yield from ()

    def train():
        with Heartbeat(messages.append, {}, tmp_path / "rank-0.txt", 60).running(0), suppress(TrainingError):
            loop.run(toy.train_spec(toy.Toy(), plan), iter_micro_batches(slow_blocks(), plan))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not any(message.get("waits_for_data") for message in messages) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    waited = messages[-1]["waits_for_data"]
    release.set()
    thread.join(60)
    assert waited and not thread.is_alive()
