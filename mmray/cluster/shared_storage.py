"""Check before the first step that run.storage is shared by all training nodes: workers resume from
it.
"""

from __future__ import annotations

import os
from contextlib import suppress

import ray

from mmray.cluster.capacity import Node
from mmray.cluster.placement import run_on_node
from mmray.errors import ResourceError
from mmray.storage.paths import remove_tree, to_path, write_atomic

PROBE_TIMEOUT_S = 60.0
MOUNT = "Mount one file system at the same path on all of them and pass that path as --run.storage."
CREDENTIALS = (
    "The bucket must exist; endpoint and credentials come from the environment of each node "
    "(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or the machine's role)."
)


def check_shared(storage: str, nodes: list[Node]) -> None:
    """Check that each node reads and writes the same `run.storage` as the driver.

    The driver writes a small file, and each node reads it and writes another one. All are removed.

    Args:
        storage: The setting `run.storage`, a folder or URI.
        nodes: Nodes that write a file to it; without nodes only the driver writes. A node that is
            lost meanwhile is ignored.

    Raises:
        ResourceError: A process cannot write, its files are not visible on the others, or a node
            does not answer within 60 s.
        UsageError: The URI is invalid.
    """
    folder = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        probe = to_path(storage) / folder
        probe.mkdir(parents=True)
        write_atomic(probe / "driver", "written")
    except OSError as error:
        hint = (
            CREDENTIALS
            if "://" in storage
            else ("Make it writable, or choose another --run.storage.")
        )
        raise ResourceError(f"run.storage {storage} is not writable: {error}. {hint}") from error
    tasks = {}
    for node in nodes:
        tasks[node.node_id] = run_on_node(
            node.node_id, _read_and_write, storage, folder, node.node_id
        )
    faults = []
    try:
        if tasks:
            ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=PROBE_TIMEOUT_S)
        for node_id, task in sorted(tasks.items()):
            try:
                ray.get(task, timeout=0)
                if not (probe / node_id).is_file():
                    faults.append(
                        f"node {node_id}: files written on that node are not visible "
                        "from the driver"
                    )
            except ray.exceptions.GetTimeoutError:
                faults.append(f"node {node_id}: no response within {PROBE_TIMEOUT_S:g} s")
            except ray.exceptions.RayTaskError as error:
                faults.append(f"node {node_id}: {error.cause!r}")
            except ray.exceptions.RayError:
                continue  # the node was lost
    finally:
        with suppress(OSError):  # a remaining probe folder is harmless
            remove_tree(probe)
    if faults:
        raise ResourceError(
            f"run.storage {storage} is not the same folder on every training node:\n  "
            + "\n  ".join(faults)
            + "\n"
            f"{CREDENTIALS if '://' in storage else MOUNT}"
        )


def _read_and_write(storage: str, folder: str, node_id: str) -> None:
    """Read the file of the driver, and write one."""
    probe = to_path(storage) / folder
    (probe / "driver").read_bytes()
    write_atomic(probe / node_id, "written")
