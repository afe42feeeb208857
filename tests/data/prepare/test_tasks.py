"""Number of concurrent tasks where Ray counts more CPUs than there are cores; errors of a task."""

import logging
import threading
import time
from functools import partial
from unittest import mock

import pytest
import ray
import ray.data

from mmray.cluster import placement, waiting
from mmray.cluster.connect import ray_session
from mmray.config import Cluster
from mmray.data.prepare import tasks
from mmray.data.prepare.tasks import map_tasks
from mmray.errors import MmrayError, ResourceError
from tests.polling import wait_until


def task(folder, at_once, item):
    """Wait for the first `at_once` items to start, because starting a second worker can take
    long.
    """
    began = time.monotonic()
    (folder / str(item)).touch()
    while len(list(folder.iterdir())) < at_once and time.monotonic() < began + 60:
        time.sleep(0.01)
    time.sleep(0.2)
    return {"item": item, "began": began, "ended": time.monotonic()}


@pytest.mark.parametrize(("cores", "count", "most"), [(1, 6, 1), (1, 12, 2)])
def test_at_most_one_more_worker_than_cores(local_ray, monkeypatch, tmp_path, cores, count, most):
    monkeypatch.setattr(placement, "cores", lambda: cores)
    answers = list(map_tasks(partial(task, tmp_path, most), list(range(count))))
    assert sorted(answer["item"] for answer in answers) == list(range(count))
    at_once = [sum(a["began"] <= other["began"] < a["ended"] for a in answers) for other in answers]
    assert max(at_once) == most


def task_of(item):
    return item, ray.get_runtime_context().get_task_id()


def test_many_items_share_tasks(local_ray, monkeypatch):
    monkeypatch.setattr(tasks, "MAX_TASKS", 2)
    monkeypatch.setattr(tasks, "MAX_TASKS_PER_CPU", 0)
    logger = logging.getLogger("ray.data")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logged = logging.Handler()
    logged.emit = mock.Mock()
    monkeypatch.setattr(logger, "handlers", [logged])
    results = dict(map_tasks(task_of, range(7)))
    assert sorted(results) == list(range(7)) and len({*results.values()}) == 2
    assert logger.level == logging.INFO and logged.emit.call_args_list == []


def faulty(item):
    return {"item": item["missing"]}


def test_exception_of_our_code_is_raised_with_its_traceback(local_ray):
    line = faulty.__code__.co_firstlineno + 1
    with pytest.raises(MmrayError, match=r"prepare failed: KeyError: 'missing'\.") as error:
        list(map_tasks(faulty, [{}]))
    assert error.type is MmrayError and f'{__file__}", line {line}, in faulty' in str(error.value)


def test_task_that_cannot_start_is_not_a_dead_worker(local_ray, monkeypatch):
    """RayTaskError is a RayError."""

    def rows(_):
        raise ray.exceptions.RayTaskError("task", "traceback", ImportError("no module"))

    monkeypatch.setattr(ray.data.Dataset, "iter_rows", rows)
    with pytest.raises(ray.exceptions.RayTaskError):
        list(map_tasks(faulty, [{}]))


def echo(item):
    return item


def test_nodes_are_requested_before_the_first_task(local_ray, monkeypatch):
    requests = []
    monkeypatch.setattr(placement, "autoscaling_pools", lambda: [placement.Pool("p", {}, 9)])
    monkeypatch.setattr(
        placement, "request_nodes", lambda _, bundles, *rest: requests.append(bundles)
    )
    results = map_tasks(echo, [{}] * 9)
    next(results)
    assert requests == [[{"CPU": 1.0}] * 3]
    results.close()
    assert requests[1:] == [[]]


@pytest.fixture
def busy_ray(local_ray):
    """All CPUs are reserved."""
    group = ray.util.placement_group([{"CPU": 1.0}] * int(ray.cluster_resources()["CPU"]))
    ray.get(group.ready())
    # Ray reports what is free a moment later.
    wait_until(lambda: not any(node.resources.get("CPU") for node in placement.free_nodes()))
    yield group
    ray.util.remove_placement_group(group)


def test_tasks_that_wait_for_a_cpu_are_logged_and_give_up_or_start(busy_ray, monkeypatch):
    """Also those of train, evaluate and tune, which prepare raw sources first."""
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.2)
    lines = []
    gives_up = pytest.raises(ResourceError, match="1 CPU for data: not free within 1 s")
    with ray_session(Cluster(queue_timeout_s=1.0), log=lambda *line: lines.append(line)), gives_up:
        list(map_tasks(echo, [{}]))
    assert len(lines) == 1
    text, label = lines[0]
    assert label == "waiting" and "s for 1 CPU for data" in text and "free: 0 CPU of" in text
    with ray_session(Cluster(queue_timeout_s=60.0)):
        threading.Timer(0.5, ray.util.remove_placement_group, [busy_ray]).start()
        assert list(map_tasks(echo, [{}])) == [{}]
