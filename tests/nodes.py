"""Ray clusters of several nodes or with a separate head on this machine, for tests marked
`cluster`.
"""

import itertools
import os
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress

import psutil

from tests.ray_workers import fork_workers


@contextmanager
def several_nodes(*nodes, head=None):
    """A cluster with a head without CPUs and a node per mapping; a running Ray is shut down
    first.
    """
    import ray
    from ray.cluster_utils import Cluster

    from mmray.cluster.ray_internals import essential_processes

    if ray.is_initialized():
        ray.shutdown()
    fork_workers()
    options = {"num_cpus": 0, "include_dashboard": False, **(head or {})}
    with essential_processes():
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            for node in nodes:
                cluster.add_node(**node)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


# A hundred for each process, because ports are free until a head or a node listens there.
_candidates = itertools.count(20000 + os.getpid() % 50 * 100)


def free_ports(count):
    """Free ports above those (10002-19999) that Ray gives to its workers; none is returned
    twice.
    """
    found = []
    while len(found) < count:
        candidate = next(_candidates)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", candidate)):
                found.append(candidate)
    return found


@contextmanager
def ray_head(folder, port, options, env, is_ready):
    """A separate head, started with `ray start` until `is_ready()`, and killed with its
    children.

    It has its own folder of Ray's files (with a short path, for its sockets), because a job joins
    the cluster that was started last with the same folder, and not that of its head.
    """
    temporary = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    words = ["ray", "start", "--head", "--block", f"--port={port}", "--num-gpus=0", *options]
    words.append(f"--temp-dir={temporary.name}")
    with (folder / "head.log").open("w") as log:
        # Started in a separate folder, because workers import from the folder of the head.
        head = subprocess.Popen(
            [*words, "--object-store-memory=200000000"],
            cwd=folder,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 180
        while not is_ready():
            if time.monotonic() > until or head.poll() is not None:
                raise RuntimeError(
                    f"the head did not start: {(folder / 'head.log').read_text()[-800:]}"
                )
            time.sleep(0.3)
        yield
    finally:
        if head.poll() is None:  # not SIGTERM, because draining takes up to 30 s
            for process in [*psutil.Process(head.pid).children(recursive=True), head]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        head.wait()
        temporary.cleanup()
