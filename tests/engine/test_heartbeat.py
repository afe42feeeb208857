"""The heartbeat of a training worker reports the state of the training thread."""

import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from mmray.engine import loop, step
from mmray.engine.heartbeat import (
    CHECKPOINT_WAIT,
    DATA_WAIT,
    DEVICE_READ,
    LONG_PHASES,
    LOOP,
    Frame,
    Heartbeat,
    _location,
    stack_of_thread,
)
from mmray.engine.metrics.meters import reduce_over_ranks
from tests.engine import toy


def test_names_of_loop_functions_match():
    """The heartbeat recognises phases of the loop by these names."""
    assert all(hasattr(loop, name) for name in {LOOP, *LONG_PHASES})
    assert all(Path(file).is_file() for file in (CHECKPOINT_WAIT, DATA_WAIT, DEVICE_READ))


def test_location_is_innermost_frame_of_mmray_or_user_code():
    library, own, user = (
        Frame(threading.__file__, 1, "wait"),
        Frame(loop.__file__, 2, "run"),
        Frame("/me/cb.py", 3, "f"),
    )
    assert _location([library, user, own]).startswith("/me/cb.py:3 in f")
    assert _location([library, own, user]).endswith("loop.py:2 in run")
    assert _location([]) == "unknown"


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
    monkeypatch.setattr("mmray.engine.heartbeat.INTERVAL_S", 0.05)
    sent, wanted = [], threading.Event()

    def send(one):
        sent.append(one)
        return wanted.is_set()

    heartbeat = Heartbeat(send, {"rank": 1, "node": "n", "pid": 1}, tmp_path / "stacks" / "rank-1.txt", 60)
    with heartbeat.running(4):
        time.sleep(0.2)
        heartbeat.on_step(5, None)
        wanted.set()
        time.sleep(0.2)
    assert sent[0]["step"] == 4 and sent[-2]["step"] == 5 and sent[-1]["ended"]
    assert not sent[0]["in_collective"]
    assert "test_heartbeat.py" in (tmp_path / "stacks" / "rank-1.txt").read_text()


@pytest.mark.parametrize(("reads", "found"), [("step", torch.ones(2)), ("line", torch.ones(1, 1))])
def test_reading_reduced_result_counts_as_in_collective(tmp_path, monkeypatch, reads, found):
    """In the code of the engine: the norms of a step and the metrics of a logged step."""
    device, queue = SimpleQueue(), SimpleQueue()
    state = toy.train_state(toy.Toy())

    def rank():
        queue.put(Heartbeat(lambda _: False, {}, tmp_path / "rank-0.txt", 60))
        if reads == "step":
            step.apply_update(state, torch.zeros(1))
        else:
            reduce_over_ranks(state.group, [torch.ones(1)], {})

    monkeypatch.setattr(torch.Tensor, "cpu", device.get)  # blocks in native code, as torch does
    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    heartbeat, deadline_s = queue.get(timeout=10), time.monotonic() + 10
    while not (seen := heartbeat._observe())["in_collective"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    device.put(found)
    thread.join(10)
    assert seen["in_collective"] and "collectives.py" in seen["where"] and not thread.is_alive()
