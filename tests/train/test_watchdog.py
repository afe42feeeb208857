"""Which rank holds the others up, from heartbeats alone; and what a heartbeat says of a thread."""

import threading
import time
from queue import SimpleQueue

import pytest
import torch

from mmray.engine import step
from mmray.engine.checkpoint.async_saver import AsyncSaver
from mmray.engine.heartbeat import Heartbeat, stack_of_thread
from mmray.engine.metrics.meters import reduce_over_ranks
from mmray.train.hang_detector import HangDetector, HeartbeatRecord, stuck_ranks
from mmray.train.monitor import checkpoint_deadline_s
from tests.train import toy


def beat(rank, waits=False, age_s=0.5, step=7, mark=7):
    return HeartbeatRecord(rank, f"node{rank}", 100 + rank, step, mark, f"mine.py:{rank} in on_step", waits, age_s)


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        ([beat(0, waits=True), beat(1)], [1]),  # one stands outside the collective in which the other waits
        ([beat(0, waits=True), beat(1, waits=True, age_s=30)], [1]),  # one does not answer (SIGSTOP)
        ([beat(0), beat(1, age_s=30)], [1]),
        ([beat(0, waits=True), beat(1, waits=True)], [0, 1]),  # the network: nobody is to blame
    ],
)
def test_the_culprit_is_the_one_the_others_wait_for(beats, named):
    assert [one.rank for one in stuck_ranks(beats)] == named


def test_a_rank_without_a_step_for_the_limit_is_named_and_one_that_moves_is_not():
    dog = HangDetector(limit_s=10, start_limit_s=60, first_step=3)
    assert dog.look([beat(0, True), beat(1)], 0.0) is None
    assert dog.look([beat(0, True), beat(1)], 9.0) is None
    assert dog.look([beat(0, True, mark=8), beat(1, mark=8)], 11.0) is None
    hang = dog.look([beat(0, True, mark=8), beat(1, mark=8)], 22.0)
    assert hang.stuck_ranks == (1,) and "rank 1 (process 101, node node1) stands at mine.py:1" in hang.told


def test_ranks_that_wait_for_one_that_writes_or_evaluates_are_no_hang():
    dog = HangDetector(limit_s=10, start_limit_s=10)
    for second in range(60):
        moving = [beat(0, waits=False, mark=second), beat(1, waits=True), beat(2, waits=True)]
        assert dog.look(moving, float(second)) is None
    stands = [beat(0, waits=False, mark=59), beat(1, waits=True), beat(2, waits=True)]
    assert dog.look(stands, 65.0) is None
    assert dog.look(stands, 71.0).stuck_ranks == (0,)


def test_a_rank_that_stands_outside_a_collective_is_named_though_others_move():
    dog = HangDetector(limit_s=10, start_limit_s=10)
    beats = [[beat(0, waits=False), beat(1, waits=False, mark=second)] for second in range(12)]
    found = [dog.look(each, float(second)) for second, each in enumerate(beats)]
    assert found[10] is None and 0 in found[11].stuck_ranks


def test_before_the_first_step_the_start_up_time_counts():
    dog = HangDetector(limit_s=10, start_limit_s=60, first_step=7)
    assert dog.look([beat(0)], 0.0) is None
    assert dog.look([beat(0)], 50.0) is None
    assert dog.look([beat(0)], 61.0) is not None


def test_the_calls_of_a_thread_are_those_that_have_not_returned(monkeypatch):
    go_on, begun = threading.Event(), threading.Event()

    def inner():
        begun.set()
        go_on.wait(30)

    def outer():
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    begun.wait(30)
    calls = stack_of_thread(thread.ident)
    assert [call.name for call in calls if call.file == __file__] == ["inner", "outer"]
    monkeypatch.setattr("mmray.engine.heartbeat._scratch", full_disk)
    assert stack_of_thread(thread.ident) == []  # and the heart beats on
    go_on.set()
    thread.join()


def full_disk():
    raise OSError(28, "No space left on device")


def test_a_pulse_says_where_its_thread_stands_and_writes_stacks_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("mmray.engine.heartbeat.EVERY_S", 0.05)
    sent, wanted = [], threading.Event()

    def send(one):
        sent.append(one)
        return wanted.is_set()

    pulse = Heartbeat(send, {"rank": 1, "node": "n", "pid": 1}, tmp_path / "stacks" / "rank-1.txt", 60)
    with pulse.beating(4):
        time.sleep(0.2)
        pulse.on_step(5, None)
        wanted.set()
        time.sleep(0.2)
    assert sent[0]["step"] == 4 and sent[-2]["step"] == 5 and sent[-1]["ended"]
    assert not sent[0]["waits"]
    assert "test_watchdog.py" in (tmp_path / "stacks" / "rank-1.txt").read_text()


@pytest.mark.parametrize(("reads", "found"), [("step", torch.ones(2)), ("line", torch.ones(1, 1))])
def test_a_rank_that_reads_what_a_device_has_yet_to_reduce_is_told_as_waiting(tmp_path, monkeypatch, reads, found):
    """In the real lines: the norms of a step, and the figures of a logged one."""
    device, pulses = SimpleQueue(), SimpleQueue()
    state = toy.train_state(toy.Toy())

    def rank():
        pulses.put(Heartbeat(lambda _: False, {}, tmp_path / "rank-0.txt", 60))
        if reads == "step":
            step.apply_update(state, torch.zeros(1))
        else:
            reduce_over_ranks(state.group, [torch.ones(1)], {})

    monkeypatch.setattr(torch.Tensor, "cpu", device.get)  # stands in C, as torch does
    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    pulse, deadline_s = pulses.get(timeout=10), time.monotonic() + 10
    while not (seen := pulse._look())["waits"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    device.put(found)
    thread.join(10)
    assert seen["waits"] and "collectives.py" in seen["where"] and not thread.is_alive()


def test_a_checkpoint_may_take_its_time_but_not_for_ever(tmp_path, monkeypatch):
    """The storage does not answer, as a network mount that died: waiting for it is no progress after a while."""
    monkeypatch.setattr("mmray.engine.heartbeat.EVERY_S", 0.02)
    sent, answers = [], threading.Event()
    pulse = Heartbeat(sent.append, {"rank": 0, "node": "n", "pid": 1}, tmp_path / "rank-0.txt", write_limit_s=0.3)
    writer = AsyncSaver()
    writer.submit({}, lambda _: answers.wait(10))
    threading.Timer(0.9, answers.set).start()
    with pulse.beating(4):
        writer.submit({}, lambda _: None)
    writer.close()
    marks = [one["mark"] for one in sent[:-1] if "async_saver.py" in one["where"]]
    moved = len(set(marks))
    assert 3 < moved < len(marks) - 3 and len(set(marks[moved:])) == 1


def test_a_node_is_left_twice_the_write_before_its_deadline_and_at_once_where_nothing_is_known():
    assert checkpoint_deadline_s(1000.0, checkpoint_s=10.0, step_s=1.0) == 1000 - 20 - 2 - 3
    assert checkpoint_deadline_s(1000.0, checkpoint_s=0.0, step_s=1.0) == 0
    assert checkpoint_deadline_s(0.0, checkpoint_s=10.0, step_s=1.0) == 0
