"""What a command logs while it waits for resources, when it gives up, and when a run gives way."""

import pytest

from mmray.cluster import waiting
from mmray.cluster.capacity import Demand, Node
from mmray.cluster.waiting import Contention, ResourceWait
from mmray.errors import ResourceError

TWO_WORKERS = Demand(2, {"CPU": 2.0})


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of two CPUs, of which one is free, and another job; returns a clock and the pending
    placement groups.
    """
    clock, groups = [0.0], {}
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock[0])
    nodes = [Node({"CPU": 2.0}), Node({"CPU": 2.0}), Node({"memory": 1.0})]
    monkeypatch.setattr(waiting, "alive_nodes", lambda: nodes)
    monkeypatch.setattr(waiting, "free_nodes", lambda: [Node({"CPU": 1.0}), Node({})])
    monkeypatch.setattr(waiting, "running_jobs", lambda: ["02 of 10.0.0.7 (process 4711)"])
    monkeypatch.setattr(waiting, "pending_reservations", lambda: groups)
    return clock, groups


def test_lines_come_after_ten_seconds_and_each_minute(cluster):
    clock, _ = cluster
    lines = []
    wait = ResourceWait(TWO_WORKERS, 600.0, lambda *line: lines.append(line))
    logged = []
    for second in range(140):
        clock[0] = float(second)
        wait.poll()
        logged.append(len(lines))
    assert [logged.index(count) for count in (1, 2, 3)] == [10, 70, 130]
    assert lines[1] == (
        "70 s for 2 training workers of 2 CPU each; free: 1 CPU of 4 CPU on 2 nodes; other jobs: "
        "02 of 10.0.0.7 (process 4711); gives up after 600 s (cluster.queue_timeout_s)",
        "waiting",
    )


def test_wait_ends_at_its_limit(cluster):
    clock, _ = cluster
    wait = ResourceWait(Demand(3, {"CPU": 1.0}, purpose="data"), 30.0, lambda *_: None)
    clock[0] = 29.0
    wait.poll()
    clock[0] = 30.0
    with pytest.raises(ResourceError, match="3 CPUs for data: not free within 30 s"):
        wait.poll()
    clock[0] = 0.0
    wait = ResourceWait(TWO_WORKERS, 30.0, lambda *_: None, "cluster.start_timeout_s")
    clock[0] = 30.0
    with pytest.raises(ResourceError, match=r"not free within 30 s \(cluster\.start_timeout_s\)"):
        wait.poll()


def test_run_gives_way_after_five_seconds_and_not_longer_than_two_minutes(cluster):
    clock, groups = cluster
    contention, answers = Contention(), []
    groups["aa02"] = [{"CPU": 8.0}]
    for second in range(150):
        clock[0] = float(second)
        answers.append(contention.must_yield())
    assert (answers.index(True), sum(answers)) == (5, 115)
    groups.clear()
    assert not contention.must_yield()
    groups["bb02"] = [{"CPU": 1.0}]
    contention.must_yield()
    clock[0] += 6
    assert contention.must_yield()  # another one
