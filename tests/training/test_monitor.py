"""Supervision of an attempt: hung ranks, the coordinator, deadlines, and polling while Ray Train
runs.
"""

import re
import threading
from dataclasses import replace

import pytest

from mmray.config import Cluster, Config
from mmray.engine.batch import BatchShape
from mmray.engine.worker_context import TRAINING
from mmray.errors import ForceExit, ResourceError
from mmray.training.monitor import (
    AttemptMonitor,
    HangDetector,
    HeartbeatRecord,
    RunProgress,
    stuck_ranks,
)
from mmray.training.workers.backend import run_in_thread
from mmray.training.workers.coordinator import Coordinator
from tests.training.runs import Silent, config
from tests.training.scripted import ScriptedWorkers


def beat(rank, waits=False, age_s=0.5, step=7, progress=7):
    where = f"mine.py:{rank} in on_step"
    return HeartbeatRecord(
        rank, f"id{rank}", f"node{rank}", 100 + rank, 0.0, step, progress, where, waits, age_s=age_s
    )


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


LIMITS_S = {"training": 10, "starting": 60, "compiling": 50, "saving": 30, "waiting_for_data": 1000}
# data nodes may be preempted and restarted meanwhile
WAITS_FOR_DATA = replace(beat(0), state="waiting_for_data")


def in_state(state):
    return [replace(beat(0), state=state), beat(1, waits=True)]


@pytest.mark.parametrize(
    ("beats", "times_s", "message"),
    [
        # others wait
        ([beat(0, waits=True), beat(1)], (0, 9, 11), r"rank 1 \(process 101, node node1\) is at"),
        (in_state("waiting_for_data"), (0, 20, 990, 1001), "rank 0 .* waits for data"),
        (in_state("saving"), (0, 20, 29, 31), "rank 0 .* waits for a checkpoint to be written"),
        (in_state("compiling"), (0, 20, 49, 51), "rank 0 .* is compiling"),
        (in_state("starting"), (0, 50, 61), "rank 0"),
    ],
)
def test_rank_without_progress_for_the_limit_of_its_state_is_named(beats, times_s, message):
    detector = HangDetector(LIMITS_S)
    *before, hang = [detector.check(beats, float(now_s)) for now_s in times_s]
    assert before == [None] * len(before)
    assert re.search(message, hang) and hang.count("rank ") == 1


def test_process_that_stopped_while_it_waited_for_data_is_detected():
    """A busy machine may delay heartbeats, so silence alone counts, not the whole wait."""
    detector = HangDetector(LIMITS_S)
    waits = [WAITS_FOR_DATA, beat(1, waits=True)]
    assert detector.check(waits, 0.0) is None and detector.check(waits, 500.0) is None
    assert detector.check([replace(WAITS_FOR_DATA, age_s=9), waits[1]], 509.0) is None
    assert "rank 0 (process 100, node node0) has not responded for 11 s" in detector.check(
        [replace(WAITS_FOR_DATA, age_s=11), waits[1]], 511.0
    )


def test_long_wait_for_rows_leaves_the_next_step_its_own_limit():
    """Neither the rank that waited nor the one that waited for it in a collective hangs when the
    rows arrive.
    """
    detector = HangDetector(LIMITS_S)
    waits = [WAITS_FOR_DATA, beat(1, waits=True)]
    assert detector.check(waits, 0.0) is None and detector.check(waits, 600.0) is None
    assert detector.check([beat(0), beat(1, waits=True)], 601.0) is None
    assert detector.check([beat(0), beat(1)], 602.0) is None
    assert "rank 0" in detector.check([beat(0), beat(1, waits=True)], 612.0)


@pytest.mark.parametrize("state", ["waiting_for_data", "saving", "compiling"])
def test_rank_that_waits_for_another_on_its_gpu_does_not_hang(state):
    """It is outside collectives, where the queue of its GPU is full; a process that stopped is
    detected.
    """
    detector, longest_s = HangDetector(LIMITS_S), LIMITS_S[state] - 1.0
    waits = replace(beat(0), state=state)
    for second in (0.0, longest_s):
        assert detector.check([waits, beat(1)], second) is None
    assert detector.check([beat(0), beat(1)], longest_s + 2) is None
    assert "rank 1" in detector.check([beat(0, progress=8), beat(1)], longest_s + 12)
    detector = HangDetector(LIMITS_S)
    assert detector.check([waits, beat(1)], 0.0) is None
    assert ("rank 1 (process 101, node node1) has not") in detector.check(
        [waits, beat(1, age_s=11)], 11.0
    )


def test_worker_without_a_first_heartbeat_ends_the_run():
    """Its import of torch hangs, before its heartbeat starts."""
    monitor = AttemptMonitor(
        Config(cluster=Cluster()),
        BatchShape(6, 2, 3),
        None,
        Silent(),
        12,
        0,
        RunProgress(),
    )
    monitor._detector.check([beat(0), beat(2)], 0.0)
    late_s = monitor._start_s + 1501.0
    # nodes may start for 600 s, a worker for 600 s, its group for 300 s
    monitor._check_start(late_s - 2.0)
    with pytest.raises(ResourceError, match=r"no heartbeat of rank 1 \(of 3\) within 1500 s"):
        monitor._check_start(late_s)
    # heartbeats of the others have not reached the driver in time
    monitor._detector.check([beat(1)], 0.0)
    monitor._check_start(late_s)


def test_all_ranks_may_wait_for_data():
    detector = HangDetector(LIMITS_S)
    waits = [WAITS_FOR_DATA, replace(WAITS_FOR_DATA, rank=1)]
    assert [detector.check(waits, second) for second in (0.0, 300.0, 999.0)] == [None] * 3
    assert detector.waits_for_data() == ([0, 1], 999.0)
    assert detector.check([beat(0), beat(1)], 999.5) is None and detector.waits_for_data() == (
        [],
        0.0,
    )


def test_collectives_outlast_the_longest_state():
    for cluster in (
        Cluster(),
        Cluster(hang_timeout_s=1e4),
        Cluster(start_timeout_s=1e5),
        Cluster(hang_timeout_s=1),
    ):
        assert (
            cluster.collective_timeout_s
            > max(cluster.state_limits_s.values()) + cluster.hang_timeout_s
        )
    assert Cluster().state_limits_s["waiting_for_data"] >= 3600


def test_wait_for_data_is_logged_at_growing_intervals(tmp_path):
    """The line names the ranks and the state of the data processes; another one follows when rows
    arrive.
    """
    reporter, workers = Silent(), ScriptedWorkers()
    workers.data_state = "decode actors: 2 stopped"
    config = Config(cluster=Cluster())
    monitor = AttemptMonitor(config, BatchShape(4, 2, 2), workers, reporter, 12, 0, RunProgress())
    for second in range(1000):
        beats = (
            [beat(0, progress=8), beat(1)]
            if second == 600
            else [WAITS_FOR_DATA, beat(1, waits=True)]
        )
        monitor.heartbeats = beats
        monitor._detector.check(beats, float(second))
        monitor._log_data_wait()
    texts = [text for label, text in reporter.notes if label == "data"]
    line = "rank 0 waited {} s for rows, a failure after 3600 s; decode actors: 2 stopped"
    waits = [
        *map(line.format, (60, 120, 240, 480)),
        "rows arrive again",
        *map(line.format, (60, 120, 240)),
    ]
    assert texts == waits


def test_waiting_for_a_rank_that_evaluates_is_no_hang():
    detector = HangDetector(LIMITS_S)
    for second in range(60):
        assert (
            detector.check([beat(0, progress=second), beat(1, waits=True)], float(second)) is None
        )
    idle = [beat(0, progress=59), beat(1, waits=True)]
    assert detector.check(idle, 65.0) is None
    assert "rank 0" in detector.check(idle, 71.0)


def test_stuck_rank_is_named_while_others_progress():
    detector = HangDetector(LIMITS_S)
    hangs = [
        detector.check([beat(0), beat(1, progress=second)], float(second)) for second in range(12)
    ]
    assert hangs[10] is None and "rank 0" in hangs[11]


def test_bad_row_counts_once_over_ranks_and_attempts():
    actor = Coordinator({7})  # from an earlier attempt
    assert [actor.record_bad_row(row) for row in (7, 3, 3, 9)] == [0, 2, 0, 3]


def test_message_is_kept_until_it_is_received():
    actor = Coordinator(set())
    for step in (1, 2):
        actor.push({"step": step})
    # the first reply was lost
    assert [actor.drain(0)[0] for _ in range(2)] == [[{"step": 1}, {"step": 2}]] * 2
    actor.push({"step": 3})
    assert actor.drain(2)[0] == [{"step": 3}] and actor.drain(3)[0] == []


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


class FakeWorkers:
    """Workers of any backend: the driver's part of the messages in `sent`."""

    def __init__(self, pid, *sent):
        self.coordinator, self.draining_nodes = Coordinator(set()), dict
        for message in sent:
            self.coordinator.push(message)
        self.coordinator.heartbeat(vars(replace(beat(0), pid=pid)) | {"where": "loop.py:1 in run"})

    def share_resources(self):
        pass

    def drain(self, num_received):
        messages, records = self.coordinator.drain(num_received)
        return messages, [{**record, "age_s": 0.0} for record in records]


def monitored(workers, reporter):
    settings = config("none", "none", "run")
    return AttemptMonitor(
        settings,
        BatchShape(4, 2, 2),
        workers,
        reporter,
        total_steps=3,
        start_step=0,
        progress=RunProgress(),
    )


def test_ctrl_c_exits_at_once_before_the_first_step_and_at_the_second():
    workers, reporter = FakeWorkers(1, {"stage": "dry run"}), Silent()
    workers.request = lambda name: None
    monitor = monitored(workers, reporter)
    monitor.read_updates()
    with pytest.raises(ForceExit):
        monitor.on_signal(2, None)
    workers.coordinator.push({"stage": TRAINING})
    monitor.read_updates()
    monitor.on_signal(2, None)
    assert monitor.stop_reason == "user" and "press Ctrl-C again" in reporter.notes[-1][1]
    with pytest.raises(ForceExit):
        monitor.on_signal(15, None)


def test_caller_stops_the_attempt_as_ctrl_c_does():
    requests, workers = [], FakeWorkers(1)
    workers.request = requests.append
    monitor = monitored(workers, Silent())
    monitor.should_stop, monitor.stop_reason = lambda: True, "resize"
    for _ in range(2):
        monitor._next_check_s = 0.0
        monitor.poll()
    assert (monitor.stop_reason, requests) == ("user", ["stop"])
