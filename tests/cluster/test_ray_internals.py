"""Each private Ray API that mmray uses returns the expected type on the installed Ray."""

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import ray

from mmray.cluster import placement, ray_internals
from mmray.cluster.placement import (
    AutoscalerRequest,
    alive_nodes,
    free_nodes,
    kill_process,
    schedulable_nodes,
)
from mmray.errors import ResourceError
from tests.polling import wait_until


class NeverPlaced:
    pass


def test_installed_ray_is_the_tested_version():
    assert ray_internals.version_warning() is None
    assert "Ray 2.61.0 is untested" in ray_internals.version_warning("2.61.0")


def test_changed_private_api_is_a_resource_error(monkeypatch, local_ray):
    monkeypatch.setattr("ray._private.state.available_resources_per_node", None)
    with pytest.raises(
        ResourceError, match=r"cannot read the free resources per node from Ray 2\.60"
    ):
        ray_internals.free_resources()


def test_free_resources_by_node(local_ray):
    (node_id,) = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    assert ray_internals.free_resources()[node_id]["CPU"] >= 0
    assert free_nodes()[0].labels == alive_nodes()[0].labels == schedulable_nodes().nodes[0].labels


def test_no_node_is_draining_and_no_pools_on_a_local_cluster(local_ray):
    assert ray_internals.draining_nodes() == {}
    assert ray_internals.autoscaler_groups() is None or ray_internals.autoscaler_groups() == []


class Sleeper:
    def pid(self):
        return os.getpid()


def test_stopped_actor_is_reported_with_its_node(local_ray):
    (node_id,) = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    actor = ray.remote(num_cpus=0)(Sleeper).remote()
    pid = ray.get(actor.pid.remote())
    assert ray_internals.actors_of_job("Sleeper") == [("ALIVE", node_id, pid)]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    (state,) = placement.actor_states("Sleeper", timeout_s=60.0)
    assert state == f"stopped on node {socket.gethostname()} at {ray.util.get_node_ip_address()}"
    assert placement.node_name("0123456789") == "01234567"  # a node that Ray does not know
    os.kill(pid, signal.SIGCONT)
    ray.kill(actor)
    assert placement.actor_states("Missing") == []


def test_head_resource_is_on_the_head(local_ray):
    assert ray_internals.HEAD_RESOURCE in alive_nodes()[0].resources


def test_request_for_nodes_is_accepted_and_cancelled(local_ray):
    for bundles in ([{"CPU": 1.0}], []):
        ray_internals.request_nodes(
            "test", bundles, {"mmray/role": "train"}, expire_s=5.0, timeout_s=30.0
        )


def test_request_is_refreshed_before_it_expires_and_cancelled(monkeypatch):
    sent, clock = [], [100.0]
    monkeypatch.setattr(
        placement, "request_nodes", lambda name, bundles, labels, *_: sent.append((bundles, labels))
    )
    monkeypatch.setattr(placement.time, "monotonic", lambda: clock[0])
    request = AutoscalerRequest("mine")
    request.cancel()
    for clock[0], count in ((100, 2), (105, 2), (106, 1), (122, 1), (123, 0), (124, 0)):
        request.request({"CPU": 1.0, "GPU": 1.0}, {"mmray/role": "train"}, count)
    assert [len(bundles) for bundles, _ in sent] == [2, 1, 1, 0]
    assert sent[0] == ([{"CPU": 1.0, "GPU": 1.0}] * 2, {"mmray/role": "train"})
    assert placement.EXPIRES_S > 2 * placement.REFRESH_S + placement.REQUEST_TIMEOUT_S


def test_only_the_process_that_started_then_is_killed():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started_s = psutil.Process(child.pid).create_time()
    assert not kill_process(child.pid, started_s - 60)  # an earlier process with this pid
    assert child.poll() is None
    assert kill_process(child.pid, started_s) and child.wait(10) == -9
    assert not kill_process(child.pid, started_s) and not kill_process(os.getpid(), 0.0)
