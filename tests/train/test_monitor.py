"""Supervision of an attempt: hung ranks, the coordinator, deadlines, and polling while Ray Train runs."""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mmray.config import Config
from mmray.engine.bad_samples import load_bad_rows
from mmray.errors import ForceExit
from mmray.train import monitor
from mmray.train.coordinator import Coordinator
from mmray.train.monitor import (
    AttemptMonitor,
    HangDetector,
    HeartbeatRecord,
    RunProgress,
    checkpoint_deadline_s,
    stuck_ranks,
)
from mmray.train.worker_group import run_in_thread


def beat(rank, waits=False, age_s=0.5, step=7, progress=7):
    where = f"mine.py:{rank} in on_step"
    return HeartbeatRecord(rank, f"node{rank}", 100 + rank, 0.0, step, progress, where, waits, age_s=age_s)


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        ([beat(0, waits=True), beat(1)], [1]),  # outside the collective in which the other waits
        ([beat(0, waits=True), beat(1, waits=True, age_s=30)], [1]),  # does not respond (SIGSTOP)
        ([beat(0), beat(1, age_s=30)], [1]),
        ([beat(0, waits=True), beat(1, waits=True)], [0, 1]),  # the network
    ],
)
def test_stuck_rank_is_the_one_the_others_wait_for(beats, named):
    assert [one.rank for one in stuck_ranks(beats)] == named


START = {"limit_s": 10, "start_limit_s": 60}


@pytest.mark.parametrize(
    ("settings", "beats", "times_s", "message"),
    [
        # named: the rank for which the other waits in a collective
        (
            START | {"first_step": 3},
            [beat(0, waits=True), beat(1)],
            (0, 9, 11),
            r"rank 1 \(process 101, node node1\) is at",
        ),
        # data nodes may be preempted and restarted meanwhile
        (
            START,
            [replace(beat(0), waits_for_data=True), beat(1, waits=True)],
            (0, 20, 59, 61),
            "rank 0 .* waits for data",
        ),
        (START | {"first_step": 7}, [beat(0)], (0, 50, 61), "rank 0"),  # before the first step
    ],
)
def test_rank_without_progress_for_the_limit_is_named(settings, beats, times_s, message):
    detector = HangDetector(**settings)
    *before, hang = [detector.check(beats, float(now_s)) for now_s in times_s]
    assert before == [None] * len(before)
    assert re.search(message, hang) and hang.count("rank ") == 1


def test_progress_resets_the_limit():
    detector = HangDetector(limit_s=10, start_limit_s=60, first_step=3)
    assert detector.check([beat(0), beat(1)], 0.0) is None
    assert detector.check([beat(0, progress=8), beat(1, progress=8)], 11.0) is None
    assert detector.check([beat(0, progress=8), beat(1, progress=8)], 22.0) is not None


def test_waiting_for_a_rank_that_evaluates_is_no_hang():
    detector = HangDetector(limit_s=10, start_limit_s=10)
    for second in range(60):
        assert detector.check([beat(0, progress=second), beat(1, waits=True)], float(second)) is None
    idle = [beat(0, progress=59), beat(1, waits=True)]
    assert detector.check(idle, 65.0) is None
    assert "rank 0" in detector.check(idle, 71.0)


def test_stuck_rank_is_named_while_others_progress():
    detector = HangDetector(limit_s=10, start_limit_s=10)
    hangs = [detector.check([beat(0), beat(1, progress=second)], float(second)) for second in range(12)]
    assert hangs[10] is None and "rank 0" in hangs[11]


def test_checkpoint_deadline_allows_twice_its_time():
    assert checkpoint_deadline_s(1000.0, checkpoint_s=10.0, step_s=1.0) == 1000 - 20 - 2 - 3
    assert checkpoint_deadline_s(1000.0, checkpoint_s=0.0, step_s=1.0) == 0
    assert checkpoint_deadline_s(0.0, checkpoint_s=10.0, step_s=1.0) == 0


def test_bad_row_counts_once_over_ranks_and_attempts():
    actor = Coordinator({7})  # from an earlier attempt
    assert [actor.bad_row(row) for row in (7, 3, 3, 9)] == [0, 2, 0, 3]


def test_bad_rows_of_earlier_attempts_are_read_and_truncated_line_ignored(tmp_path):
    assert load_bad_rows(tmp_path) == set()
    (tmp_path / "quarantine.jsonl").write_text('{"row": 7, "key": "a"}\n{"row": 12}\n{"ro')
    assert load_bad_rows(tmp_path) == {7, 12}


def test_heartbeat_has_age_and_ended_rank_is_removed():
    actor = Coordinator(set())
    assert actor.heartbeat({"rank": 0, "step": 3}) == (False, False)
    actor.heartbeat({"rank": 1, "step": 3})
    actor.request_stacks()
    assert actor.heartbeat({"rank": 1, "ended": True}) == (False, True)
    actor.request_stop()
    assert actor.heartbeat({"rank": 0, "step": 3}) == (True, True)
    news, (beat,) = actor.take()
    assert news == [] and beat["rank"] == 0 and beat["age_s"] >= 0


def test_progress_is_kept_over_attempts_and_last_step_is_not(monkeypatch):
    """Otherwise errors at different steps would count as a repeated error."""
    news = [{"step": 120, "time/step_s": 0.5}]
    monkeypatch.setattr(monitor.ray, "get", lambda *_, **__: (news, []))
    coordinator = SimpleNamespace(take=SimpleNamespace(remote=lambda: None))
    reporter, progress = SimpleNamespace(step=lambda *_: None), RunProgress()
    arguments = Config(), 1, coordinator, reporter, 200
    first = AttemptMonitor(*arguments, first_step=0, progress=progress, autoscaler=None)
    assert (progress.last_step, progress.logged) == (0, False)
    first.read_updates()
    assert (progress.last_step, progress.logged) == (120, True)
    second = AttemptMonitor(*arguments, first_step=20, progress=progress, autoscaler=None)
    assert (progress.last_step, progress.logged, progress.step_s) == (20, True, 0.5)
    news[0]["step"] = 40
    second.read_updates()
    assert progress.last_step == 40


def test_error_of_thread_is_raised_after_a_last_poll():
    ended, seen = [], []

    def call():
        assert threading.current_thread() is not threading.main_thread()
        ended.append("ended")
        raise SystemExit("gone")

    with pytest.raises(SystemExit, match="gone"):
        run_in_thread(call, lambda: seen.append(list(ended)))
    assert seen[-1] == ["ended"]
    assert run_in_thread(lambda: 7, lambda: None) == 7


def test_error_of_poll_is_raised_at_once():
    over = threading.Event()

    def poll():
        raise ForceExit

    with pytest.raises(ForceExit):
        run_in_thread(over.wait, poll)
    over.set()
