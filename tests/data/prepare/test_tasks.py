"""Number of concurrent tasks on a machine for which Ray counts more CPUs than it has cores."""

import time

import pytest

from mmray.cluster import placement
from mmray.data.prepare.tasks import map_tasks


def task(item):
    began = time.monotonic()
    time.sleep(0.4)
    return {"item": item, "began": began, "ended": time.monotonic()}


@pytest.mark.parametrize(("cores", "count", "most"), [(1, 6, 1), (1, 12, 2), (2, 8, 2)])
def test_at_most_one_more_worker_than_cores(local_ray, monkeypatch, cores, count, most):
    monkeypatch.setattr(placement, "cores", lambda: cores)
    answers = list(map_tasks(task, list(range(count))))
    assert sorted(answer["item"] for answer in answers) == list(range(count))
    at_once = [sum(a["began"] <= other["began"] < a["ended"] for a in answers) for other in answers]
    assert max(at_once) == most
