"""Number of concurrent tasks on a machine for which Ray counts more CPUs than it has cores."""

import time

import pytest

from mmray.cluster import placement
from mmray.cluster.capacity import Node
from mmray.data.prepare.tasks import map_tasks


def task(item):
    began = time.monotonic()
    time.sleep(0.4)
    return {"item": item, "began": began, "ended": time.monotonic()}


def at_once(answers):
    """Largest number of tasks that ran at once."""
    return max(sum(a["began"] <= other["began"] < a["ended"] for a in answers) for other in answers)


@pytest.mark.parametrize(("cores", "count", "most"), [(1, 6, 1), (1, 12, 2), (2, 8, 2)])
def test_at_most_one_more_worker_than_cores(local_ray, monkeypatch, cores, count, most):
    monkeypatch.setattr(placement, "cores", lambda: cores)
    answers = list(map_tasks(task, list(range(count))))
    assert sorted(answer["item"] for answer in answers) == list(range(count))
    assert at_once(answers) == most


@pytest.mark.parametrize(
    ("here", "cores"),
    [([16.0], None), ([32.0], 16), ([], None), ([0.0], None), ([32.0, 32.0], None)],
    ids=["as many", "more", "nobody", "a head without", "several nodes"],
)
def test_physical_cores_limit_only_a_single_oversubscribed_node(monkeypatch, here, cores):
    monkeypatch.setattr(placement, "cores", lambda: 16)
    monkeypatch.setattr(placement, "alive_nodes", lambda: [Node({"CPU": cpus}) for cpus in here])
    assert placement.physical_cores_if_local() == cores
