"""Supervision of an attempt: hung ranks, the coordinator, deadlines, and polling while Ray Train runs."""

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


def test_rank_without_progress_for_the_limit_is_named():
    detector = HangDetector(limit_s=10, start_limit_s=60, first_step=3)
    assert detector.check([beat(0, True), beat(1)], 0.0) is None
    assert detector.check([beat(0, True), beat(1)], 9.0) is None
    assert detector.check([beat(0, True, progress=8), beat(1, progress=8)], 11.0) is None
    hang = detector.check([beat(0, True, progress=8), beat(1, progress=8)], 22.0)
    assert hang.ranks == (1,) and "rank 1 (process 101, node node1) is at mine.py:1" in hang.message


def test_waiting_for_a_rank_that_evaluates_is_no_hang():
    detector = HangDetector(limit_s=10, start_limit_s=10)
    for second in range(60):
        moving = [beat(0, waits=False, progress=second), beat(1, waits=True), beat(2, waits=True)]
        assert detector.check(moving, float(second)) is None
    stands = [beat(0, waits=False, progress=59), beat(1, waits=True), beat(2, waits=True)]
    assert detector.check(stands, 65.0) is None
    assert detector.check(stands, 71.0).ranks == (0,)


def test_stuck_rank_is_named_while_others_progress():
    detector = HangDetector(limit_s=10, start_limit_s=10)
    beats = [[beat(0, waits=False), beat(1, waits=False, progress=second)] for second in range(12)]
    found = [detector.check(each, float(second)) for second, each in enumerate(beats)]
    assert found[10] is None and 0 in found[11].ranks


def test_waiting_for_data_is_a_hang_only_after_the_start_timeout():
    """Data nodes may be preempted and restarted meanwhile."""
    detector = HangDetector(limit_s=10, start_limit_s=60)
    records = [replace(beat(0), waits_for_data=True), beat(1, waits=True)]
    assert [detector.check(records, second) for second in (0.0, 20.0, 59.0)] == [None] * 3
    hang = detector.check(records, 61.0)
    assert hang.ranks == (0,) and "waits for data at mine.py:0" in hang.message


def test_start_timeout_applies_before_first_step():
    detector = HangDetector(limit_s=10, start_limit_s=60, first_step=7)
    assert detector.check([beat(0)], 0.0) is None
    assert detector.check([beat(0)], 50.0) is None
    assert detector.check([beat(0)], 61.0) is not None


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
    assert actor.heartbeat({"rank": 0, "step": 3}) is False
    actor.heartbeat({"rank": 1, "step": 3})
    actor.request_stacks()
    assert actor.heartbeat({"rank": 1, "ended": True}) is True
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
    first._read_news()
    assert (progress.last_step, progress.logged) == (120, True)
    second = AttemptMonitor(*arguments, first_step=20, progress=progress, autoscaler=None)
    assert (progress.last_step, progress.logged, progress.step_s) == (20, True, 0.5)
    news[0]["step"] = 40
    second._read_news()
    assert progress.last_step == 40


def test_last_poll_comes_after_the_end():
    done, seen = [], []

    def call():
        assert threading.current_thread() is not threading.main_thread()
        done.append("all")
        return 7

    assert run_in_thread(call, lambda: seen.append(list(done))) == 7
    assert seen[-1] == ["all"]


def test_error_of_thread_is_raised_after_last_poll():
    seen = []

    def call():
        raise SystemExit("gone")

    with pytest.raises(SystemExit, match="gone"):
        run_in_thread(call, lambda: seen.append(1))
    assert seen


def test_error_of_poll_is_raised_at_once():
    over = threading.Event()

    def poll():
        raise ForceExit

    with pytest.raises(ForceExit):
        run_in_thread(over.wait, poll)
    over.set()
