"""Check before the first step that run.storage is shared by all training nodes.

Checkpoints on a node's local disk are lost with that node, and workers on other nodes cannot resume from them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster import ray_internals
from mmray.cluster.capacity import NODE_ID, Node
from mmray.errors import ResourceError, UsageError
from mmray.storage.storage import Storage

PROBE_TIMEOUT_S = 60.0
MOUNT = "Mount one file system at the same path on all of them and pass that path as --run.storage."
CREDENTIALS = (
    "The bucket must exist; endpoint and credentials come from the environment of each node (AWS_ENDPOINT_URL, "
    "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or the machine's role)."
)


def check_persistent(storage: str, cwd: Path) -> None:
    """Raise UsageError if `storage` is in a job's copy of the working directory, because Ray deletes it."""
    if ray_internals.JOB_DIR in cwd.parts and "://" not in storage and not Path(storage).expanduser().is_absolute():
        raise UsageError(
            f"run.storage {storage} is relative, and Ray deletes a job's copy of the working directory later. Pass an "
            "absolute folder that every node sees (--run.storage /shared/runs)."
        )


def check_shared(storage: str, nodes: list[Node]) -> None:
    """Write and read `storage` from the driver and each node. Raises ResourceError.

    Without nodes, only the driver checks it.
    """
    folder = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        root = Storage(storage)
        _write(root, f"{folder}/driver", folder)
    except OSError as error:
        hint = CREDENTIALS if "://" in storage else "Make it writable, or choose another --run.storage."
        raise ResourceError(f"run.storage {storage} is not writable: {error}. {hint}") from error
    try:
        faults = {name: fault for name, fault in _probe_nodes(nodes, storage, folder).items() if fault}
    finally:
        with suppress(OSError):  # a remaining probe folder is harmless
            root.delete_tree(folder)
    if faults:
        lines = "\n  ".join(f"node {name}: {fault}" for name, fault in sorted(faults.items()))
        raise ResourceError(
            f"run.storage {storage} is not the same folder on every training node:\n  {lines}\n"
            + (CREDENTIALS if "://" in storage else MOUNT)
        )


def _probe_nodes(nodes: list[Node], storage: str, folder: str) -> dict[str, str | None]:
    """Return {node ID: problem}; None without a problem or if the node was lost."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_read_and_write)
    probes = {}
    for node in nodes:
        node_id = str((node.labels or {})[NODE_ID])
        affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
        probes[node_id] = task.options(scheduling_strategy=affinity).remote(storage, folder, node_id)
    if probes:
        ray.wait(list(probes.values()), num_returns=len(probes), timeout=PROBE_TIMEOUT_S)
    return {node_id: _probe_result(probe, storage, f"{folder}/{node_id}") for node_id, probe in probes.items()}


def _probe_result(probe: Any, storage: str, written: str) -> str | None:
    try:
        fault = ray.get(probe, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return f"no answer within {PROBE_TIMEOUT_S:g} s"
    except ray.exceptions.RayTaskError as error:
        return f"probe failed: {str(error.cause).strip() or type(error.cause).__name__}"
    except ray.exceptions.RayError:
        return None
    is_visible = Storage(storage).size(written) is not None
    return fault or (None if is_visible else "files written on that node are not visible from the driver")


def _read_and_write(storage: str, folder: str, node_id: str) -> str | None:
    """Return the problem found on a node (Ray task)."""
    try:
        root = Storage(storage)
        if root.read(f"{folder}/driver").decode(errors="replace") != folder:
            return "the file written by the driver has other content"
        _write(root, f"{folder}/{node_id}", "written")
    except OSError as error:
        return str(error)
    return None


def _write(root: Storage, name: str, text: str) -> None:
    if root.local_path is not None:
        root.mkdir(name.rpartition("/")[0])
    root.write(name, text.encode())
