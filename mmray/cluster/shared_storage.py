"""Whether the folder of runs is one that every training node sees, tried before the first step.

A run whose checkpoints lie on a disk of one node alone trains well until that node is lost, or until a worker on
another node wants to begin from them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmray.cluster.capacity import NODE_ID, Node
from mmray.errors import ResourceError, UsageError

PROBE_TIMEOUT_S = 60.0
MOUNT = "mount one file system on all of them, at one path, and give that as --run.storage"
CREDENTIALS = (
    "The bucket has to exist; endpoint and credentials come from the environment of each node (AWS_ENDPOINT_URL, "
    "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or the role of the machine)"
)
JOB_COPY = "working_dir_files"  # the folder under which Ray keeps the working directories that jobs brought


def check_persistent(storage: str, here: Path) -> None:
    """Raise UsageError where `storage` would lie in a job's copy of the working directory, which Ray deletes."""
    if JOB_COPY in here.parts and "://" not in storage and not Path(storage).expanduser().is_absolute():
        raise UsageError(
            f"run.storage {storage} is relative, and a job stands in a copy of your folder that Ray deletes later: "
            "give an absolute folder that every node sees (--run.storage /shared/runs)"
        )


def check_shared(storage: str, nodes: list[Node]) -> None:
    """Read on each of these nodes what was written here, and here what they wrote. Raises ResourceError.

    `storage` is a folder or an address that pyarrow knows; an address without nodes yet is tried from here.
    """
    folder = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        system, root = opened(storage)
        write(system, f"{root}/{folder}/here", folder)
    except (OSError, pa.ArrowInvalid) as error:
        raise ResourceError(f"run.storage {storage} cannot be written: {error}{_hint(storage)}") from error
    try:
        faults = {name: fault for name, fault in _try_on(nodes, storage, folder).items() if fault}
    finally:
        with suppress(OSError):  # an empty folder of the probe's is no reason against a run
            system.delete_dir(f"{root}/{folder}")
    if faults:
        told = "\n  ".join(f"node {name}: {fault}" for name, fault in sorted(faults.items()))
        raise ResourceError(
            f"run.storage {storage} is not the same folder on every training node:\n  {told}\n"
            + (_hint(storage).lstrip(". ") or MOUNT)
        )


def opened(storage: str) -> tuple[fs.FileSystem, str]:
    """File system and path of a folder, or of an address. Raises OSError or ArrowInvalid."""
    if "://" not in storage:
        return fs.LocalFileSystem(), str(Path(storage).expanduser().absolute())
    system, root = fs.FileSystem.from_uri(storage)
    return system, root.rstrip("/")


def write(system: fs.FileSystem, path: str, text: str) -> None:
    if isinstance(system, fs.LocalFileSystem):
        system.create_dir(path.rpartition("/")[0], recursive=True)
    with system.open_output_stream(path) as stream:
        stream.write(text.encode())


def _hint(storage: str) -> str:
    return f". {CREDENTIALS}" if "://" in storage else ""


def _try_on(nodes: list[Node], storage: str, folder: str) -> dict[str, str | None]:
    """What is wrong at each node, by its id; a node that was lost meanwhile is not at fault."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_read_and_write)
    asked = {}
    for node in nodes:
        node_id = str((node.labels or {})[NODE_ID])
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[node_id] = task.options(scheduling_strategy=there).remote(storage, folder, node_id)
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=PROBE_TIMEOUT_S)
    return {node_id: _answer(answer, storage, f"{folder}/{node_id}") for node_id, answer in asked.items()}


def _answer(answer: Any, storage: str, written: str) -> str | None:
    try:
        fault = ray.get(answer, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return f"did not answer within {PROBE_TIMEOUT_S:g} s"
    except ray.exceptions.RayTaskError as error:
        return f"could not try: {str(error.cause).strip() or type(error.cause).__name__}"
    except ray.exceptions.RayError:
        return None
    system, root = opened(storage)
    there = system.get_file_info(f"{root}/{written}").type == fs.FileType.File
    return fault or (None if there else "what it writes there is not seen here")


def _read_and_write(storage: str, folder: str, node_id: str) -> str | None:
    """The task on a node."""
    try:
        system, root = opened(storage)
        with system.open_input_file(f"{root}/{folder}/here") as file:
            if file.readall().decode(errors="replace") != folder:
                return "another file stands where this one was written"
        write(system, f"{root}/{folder}/{node_id}", "there")
    except (OSError, pa.ArrowInvalid) as error:
        return str(error)
    return None
