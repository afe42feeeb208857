"""Whether the folder of runs is one that every training node sees, tried before the first step.

A run whose checkpoints lie on a disk of one node alone trains well until that node is lost, or until a worker on
another node wants to begin from them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster.capacity import Node
from mmray.errors import ResourceError, UsageError

PROBE_TIMEOUT_S = 60.0
JOB_COPY = "working_dir_files"  # the folder under which Ray keeps the working directories that jobs brought


def check_is_kept(storage: str, here: Path) -> None:
    """Raise UsageError where `storage` would lie in a job's copy of the working directory, which Ray deletes."""
    if JOB_COPY in here.parts and not Path(storage).expanduser().is_absolute():
        raise UsageError(
            f"run.storage {storage} is relative, and a job stands in a copy of your folder that Ray deletes later: "
            "give an absolute folder that every node sees (--run.storage /shared/runs)"
        )


def probe(storage: Path, nodes: list[Node]) -> None:
    """Read on each of these nodes what was written here, and here what they wrote. Raises ResourceError."""
    folder = storage / f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        folder.mkdir(parents=True)
        (folder / "here").write_text(folder.name)
    except OSError as error:
        raise ResourceError(f"run.storage {storage} cannot be written: {error}") from error
    try:
        faults = {name: fault for name, fault in _try_on(nodes, folder).items() if fault}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if faults:
        told = "\n  ".join(f"node {name}: {fault}" for name, fault in sorted(faults.items()))
        raise ResourceError(
            f"run.storage {storage} is not the same folder on every training node:\n  {told}\n"
            "mount one file system on all of them, at one path, and give that as --run.storage"
        )


def _try_on(nodes: list[Node], folder: Path) -> dict[str, str | None]:
    """What is wrong at each node, by its id; a node that was lost meanwhile is not at fault."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_read_and_write)
    asked = {}
    for node in nodes:
        node_id = str((node.labels or {})["ray.io/node-id"])
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[node_id] = task.options(scheduling_strategy=there).remote(str(folder), node_id)
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=PROBE_TIMEOUT_S)
    return {node_id: _answer(answer, folder / node_id) for node_id, answer in asked.items()}


def _answer(answer: Any, written: Path) -> str | None:
    try:
        fault = ray.get(answer, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return f"did not answer within {PROBE_TIMEOUT_S:g} s"
    except ray.exceptions.RayError:
        return None
    return fault or (None if written.exists() else "what it writes there is not seen here")


def _read_and_write(folder: str, node_id: str) -> str | None:
    """The task on a node."""
    try:
        if (Path(folder) / "here").read_text() != Path(folder).name:
            return "another file stands where this one was written"
        (Path(folder) / node_id).write_text("there")
    except OSError as error:
        return str(error)
    return None
