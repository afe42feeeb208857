"""Processes begun ahead: actors live in them, whatever environment their job brings; a node that is silent costs
nothing but a line in the log."""

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import ray

from mmray.cluster.spare import begin_processes


@ray.remote(num_cpus=0, max_restarts=-1)
class Actor:
    def where(self):
        return os.getpid(), os.environ.get("GIVEN")


def workers():
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended while it was looked at
            if process.name().startswith("ray::"):
                found.add(process.pid)
    return found


def begun_and_taken(count):
    """(processes that were begun ahead, {process: GIVEN} of actors that were asked for then)."""
    before = workers()
    begin_processes(count)
    until = time.monotonic() + 30
    while len(begun := workers() - before) < count and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)  # one that shows its name may not have said yet that it is there
    actors, taken = [], {}
    while len(actors) < 16 and not begun <= taken.keys():  # those that Ray itself had begun go first, or not
        actors.append(Actor.remote())
        pid, given = ray.get(actors[-1].where.remote())
        taken[pid] = given
    return begun, taken


def test_an_actor_takes_a_process_that_was_begun_before_anyone_asked_for_it(local_ray):
    begun, taken = begun_and_taken(1)
    assert begun and begun <= taken.keys()


@pytest.mark.cluster
def test_so_does_one_of_a_job_that_brings_an_environment():
    code = (
        "import ray; from tests.test_spare import begun_and_taken; "
        "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False, "
        "runtime_env={'env_vars': {'GIVEN': 'here'}}); print(*begun_and_taken(1), sep=';')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    begun, taken = (eval(part) for part in ran.stdout.split(";"))
    assert begun and begun <= taken.keys(), ran.stderr[-2000:]
    assert set(taken.values()) == {"here"}


def test_a_node_that_does_not_answer_is_told_to_the_log_and_nobody_waits(local_ray, monkeypatch, caplog):
    node = next(each for each in ray.nodes() if each["Alive"])
    monkeypatch.setattr(ray, "nodes", lambda: [{**node, "NodeManagerPort": 9}])
    began = time.monotonic()
    begin_processes(2)
    assert time.monotonic() - began < 1
    until = time.monotonic() + 10
    while "no processes begun ahead" not in caplog.text and time.monotonic() < until:
        time.sleep(0.05)
    assert "no processes begun ahead on" in caplog.text


def test_only_nodes_with_the_labels_are_asked(local_ray, monkeypatch):
    node, asked = next(each for each in ray.nodes() if each["Alive"]), []
    nodes = [{**node, "NodeManagerPort": n, "Labels": {"mmray/role": "data" if n % 2 else "train"}} for n in range(4)]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {**nodes[1], "Alive": False, "NodeManagerPort": 9}])
    monkeypatch.setattr("mmray.cluster.spare._ask", lambda address, count: asked.append((address[-1], count)))
    begin_processes(5, {"mmray/role": "data"})
    assert asked == [("1", 3), ("3", 3)]
    begin_processes(5, {"mmray/role": "elsewhere"})
    assert len(asked) == 2
