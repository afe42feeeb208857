"""Check before the first step that all nodes of a run have its files: one `run.storage`, from which
workers resume, and the local data sets and weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from mmray.cluster.capacity import Node
from mmray.cluster.placement import node_name, run_on_node
from mmray.errors import ResourceError
from mmray.storage.paths import remove_tree, to_path, write_atomic

# A node starts a process for each check: those of ten runs that started together took 83 s.
PROBE_TIMEOUT_S = 180.0
MOUNT = "Mount one file system at the same path on all of them and pass that path as --run.storage."
CREDENTIALS = (
    "The bucket must exist; endpoint and credentials come from the environment of each node "
    "(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or the machine's role)."
)
INPUTS = (
    "Workers and decode actors read them on each node where they may run. Mount one file system at "
    "the same path on all hosts, copy the files to these hosts, or use sets on an object store. "
    "--cluster.train-label and --cluster.data-label choose the nodes of the run."
)


@dataclass(frozen=True)
class LocalInput:
    """A local file or folder that the workers of a run read.

    Args:
        setting: Name of the setting that refers to it, such as `data.train`.
        on_data_nodes: Whether decode actors also read it; otherwise only training workers do.
    """

    setting: str
    path: Path
    on_data_nodes: bool


def check_inputs(
    inputs: Sequence[LocalInput], training_nodes: Sequence[Node], data_nodes: Sequence[Node]
) -> None:
    """Check that each node has the local files and folders that processes of a run read there.

    Args:
        data_nodes: Nodes for decode actors. A node that is lost meanwhile is ignored.

    Raises:
        ResourceError: A node lacks one of them, or does not answer within 180 s.
    """
    training_ids = {node.node_id for node in training_nodes}
    tasks = {}
    for node_id in sorted(training_ids | {node.node_id for node in data_nodes}):
        paths = [each.path for each in inputs if each.on_data_nodes or node_id in training_ids]
        if paths:
            tasks[node_id] = run_on_node(node_id, find_missing, paths)
    missing, faults = _results(tasks)
    lines = []
    for each in inputs:
        hosts = [node_name(node_id) for node_id, paths in missing.items() if each.path in paths]
        if hosts:
            lines.append(
                f"{each.setting}: {each.path} is missing, unreadable or empty on "
                + ", ".join(dict.fromkeys(hosts))
            )
    lines += _lines(faults)
    if lines:
        raise ResourceError(
            "the run reads local files that not all of its hosts have:\n  "
            + "\n  ".join(lines)
            + f"\n{INPUTS}"
        )


def find_missing(paths: Sequence[Path]) -> list[Path]:
    """Return which paths this machine cannot read, or are empty folders, such as a mount point
    without its file system.
    """
    return [
        path
        for path in paths
        if not os.access(path, os.R_OK) or (path.is_dir() and next(path.iterdir(), None) is None)
    ]


def check_shared(storage: str, nodes: list[Node]) -> None:
    """Check that each node reads and writes the same `run.storage` as the driver.

    The driver writes a small file, and each node reads it and writes another one. All are removed.

    Args:
        storage: The setting `run.storage`, a folder or URI.
        nodes: Nodes that write a file to it; without nodes only the driver writes. A node that is
            lost meanwhile is ignored.

    Raises:
        ResourceError: A process cannot write, its files are not visible on the others, or a node
            does not answer within 180 s.
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
    try:
        written, faults = _results(tasks)
        for node_id in written:
            if not (probe / node_id).is_file():
                faults[node_id] = "files written on that node are not visible from the driver"
    finally:
        with suppress(OSError):  # a remaining probe folder is harmless
            remove_tree(probe)
    if faults:
        raise ResourceError(
            f"run.storage {storage} is not the same folder on every training node:\n  "
            + "\n  ".join(_lines(faults))
            + f"\n{CREDENTIALS if '://' in storage else MOUNT}"
        )


def _results(tasks: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the tasks of nodes returned, and why others failed, by node ID; a node that was
    lost is in neither.
    """
    results: dict[str, Any] = {}
    faults: dict[str, str] = {}
    if tasks:
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=PROBE_TIMEOUT_S)
    for node_id, task in tasks.items():
        try:
            results[node_id] = ray.get(task, timeout=0)
        except ray.exceptions.GetTimeoutError:
            faults[node_id] = f"no response within {PROBE_TIMEOUT_S:g} s"
        except ray.exceptions.RayTaskError as error:
            faults[node_id] = repr(error.cause)
        except ray.exceptions.RayError:
            continue  # the node was lost
    return results, faults


def _lines(faults: Mapping[str, str]) -> list[str]:
    return sorted(f"node {node_name(node_id)}: {fault}" for node_id, fault in faults.items())


def _read_and_write(storage: str, folder: str, node_id: str) -> None:
    """Read the file of the driver, and write one."""
    probe = to_path(storage) / folder
    (probe / "driver").read_bytes()
    write_atomic(probe / node_id, "written")
