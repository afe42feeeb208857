"""Number of concurrent tasks where Ray counts more CPUs than there are cores; errors of a task."""

import os
import threading
import time
from functools import partial

import pytest
import ray

from mmray.cluster import placement, waiting
from mmray.cluster.connect import ray_session
from mmray.config import Cluster
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


@pytest.mark.parametrize("cores", [1, 2])
def test_as_many_tasks_at_once_as_cores(local_ray, monkeypatch, tmp_path, cores):
    monkeypatch.setattr(placement, "cores", lambda: cores)
    answers = list(map_tasks(partial(task, tmp_path, cores), list(range(8))))
    assert sorted(answer["item"] for answer in answers) == list(range(8))
    at_once = [sum(a["began"] <= other["began"] < a["ended"] for a in answers) for other in answers]
    assert max(at_once) == cores


def faulty(item):
    return {"item": item["missing"]}


def test_exception_of_our_code_is_raised_with_its_traceback(local_ray):
    line = faulty.__code__.co_firstlineno + 1
    with pytest.raises(MmrayError, match=r"prepare failed: KeyError: 'missing'\.") as error:
        list(map_tasks(faulty, [{}]))
    assert error.type is MmrayError and f'{__file__}", line {line}, in faulty' in str(error.value)


class Unreadable:
    """Raises in the process that unpickles it."""

    def __reduce__(self):
        return fail, ()


def fail():
    raise ImportError("no module")


def test_task_that_cannot_start_is_not_a_dead_worker(local_ray):
    """RayTaskError is a RayError."""
    with pytest.raises(ray.exceptions.RayTaskError, match="no module"):
        list(map_tasks(echo, [Unreadable()]))


def slow(folder, item):
    """Wait until the task is interrupted."""
    if item:
        try:
            (folder / "started").touch()
            time.sleep(60)
        finally:
            (folder / "ended").touch()


def test_closing_interrupts_the_tasks_that_run(local_ray, tmp_path):
    results = map_tasks(partial(slow, tmp_path), [False, True])
    next(results)
    wait_until((tmp_path / "started").exists)
    results.close()
    wait_until((tmp_path / "ended").exists)


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


@pytest.fixture
def ray_with_gpus(tmp_path):
    """Two GPUs that do not exist."""
    ray.shutdown()
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def process_id(folder, item):
    """Wait until another process has an item, too."""
    (folder / str(os.getpid())).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    return item, os.getpid()


@pytest.mark.cluster
def test_each_gpu_has_one_process_for_all_items(ray_with_gpus, tmp_path):
    """Others would load the model again."""
    results = list(map_tasks(partial(process_id, tmp_path), range(8), runs_model=True))
    assert sorted(item for item, _ in results) == list(range(8))
    assert len({process for _, process in results}) == 2
