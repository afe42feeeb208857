"""Supervision of an attempt: hung ranks, the coordinator, deadlines, and polling while Ray Train runs."""

import re
import threading
from dataclasses import replace

import pytest

from mmray.train.coordinator import Coordinator
from mmray.train.monitor import HangDetector, HeartbeatRecord, latest_request_at_s, stuck_ranks
from mmray.train.ray_backend import run_in_thread


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
WAITS_FOR_DATA = replace(beat(0), waits_for_data=True)  # data nodes may be preempted and restarted meanwhile


@pytest.mark.parametrize(
    ("start_step", "beats", "times_s", "message"),
    [
        (3, [beat(0, waits=True), beat(1)], (0, 9, 11), r"rank 1 \(process 101, node node1\) is at"),  # others wait
        (0, [WAITS_FOR_DATA, beat(1, waits=True)], (0, 20, 59, 61), "rank 0 .* waits for data"),
        (7, [beat(0)], (0, 50, 61), "rank 0"),  # before the first step
        (3, [replace(WAITS_FOR_DATA, age_s=30)], (0, 9, 11), "rank 0 .* has not responded"),  # stopped while it waited
    ],
)
def test_rank_without_progress_for_the_limit_is_named(start_step, beats, times_s, message):
    detector = HangDetector(**START, start_step=start_step)
    *before, hang = [detector.check(beats, float(now_s)) for now_s in times_s]
    assert before == [None] * len(before)
    assert re.search(message, hang) and hang.count("rank ") == 1


def test_progress_resets_the_limit():
    detector = HangDetector(limit_s=10, start_limit_s=60, start_step=3)
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
    assert latest_request_at_s(1000.0, checkpoint_duration_s=10.0, step_duration_s=1.0) == 1000 - 20 - 2 - 3
    assert latest_request_at_s(1000.0, checkpoint_duration_s=0.0, step_duration_s=1.0) == 0
    assert latest_request_at_s(0.0, checkpoint_duration_s=10.0, step_duration_s=1.0) == 0


def test_bad_row_counts_once_over_ranks_and_attempts():
    actor = Coordinator({7})  # from an earlier attempt
    assert [actor.record_bad_row(row) for row in (7, 3, 3, 9)] == [0, 2, 0, 3]


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
