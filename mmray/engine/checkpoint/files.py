"""The folder of a run's checkpoints: which of them are complete and intact, the newest, the best,
and which to delete.

    checkpoints/step-N/
        shard-1-of-1.safetensors   tensors (state_io.py); one file per rank under FSDP
        state.json                 other values of the state
        meta.json                  step, rows consumed, config, metrics, world, versions
        SHA256SUMS                 written last; `sha256sum -c SHA256SUMS` verifies by hand

A folder without SHA256SUMS is incomplete and ignored. This also holds on an object store, which has
no rename: files are written locally first, and SHA256SUMS is uploaded after all others.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mmray.errors import StorageError, TrainingError, first_line
from mmray.storage.paths import (
    CHUNK_BYTES,
    AnyPath,
    local_copy,
    move_tree,
    read_lines,
    remove_tree,
)
from mmray.storage.requests import iter_parallel, with_retries

STATE = "state.json"
META = "meta.json"
# File of the run: metrics of checkpoints that were evaluated beside training, a line for each.
EVALUATIONS = "evaluations.jsonl"
SUMS = "SHA256SUMS"
# Parts of the names of metrics that should fall.
LOWER_IS_BETTER = ("loss", "median_rank")


def latest_valid_checkpoint(
    folder: AnyPath,
    log: Callable[[str], None] | None = None,
    rename: bool = True,
    trusted_from: float = math.inf,
) -> AnyPath | None:
    """Return the newest checkpoint whose checksums match; None without one.

    Args:
        folder: Folder of the checkpoints, with subfolders such as `step-100`.
        log: Called with a message for each newer checkpoint that is invalid; None: they are skipped
            silently.
        rename: Rename a damaged one to `step-N.damaged`. Pass False if another process may be
            training in the folder.
        trusted_from: Checksums of checkpoints from this step on are not computed; they only must be
            complete.

    Returns:
        Folder of the checkpoint.

    Raises:
        StorageError: The storage cannot be read.
    """
    for path in reversed(_step_folders(folder)):
        fault = verify(path, checksums=step_of(path) < trusted_from)
        if fault is None:
            return path
        if rename and (path / SUMS).exists():
            # An older damaged one of the same step is replaced.
            target = path.with_name(f"{path.name}.damaged")
            try:
                move_tree(path, target)
            except OSError as error:
                raise StorageError(
                    f"cannot rename the damaged checkpoint {path}: {error.strerror or error}"
                ) from error
            fault += f"; it is renamed to {target.name}"
        if log is not None:
            log(f"ignored checkpoint {path}: {fault}")
    return None


def latest_complete_step(folder: AnyPath) -> int:
    """Return the step of the newest complete checkpoint, unverified; 0 without one."""
    return max(complete_steps(folder), default=0)


def complete_steps(folder: AnyPath) -> list[int]:
    """Return the steps of the complete checkpoints; [] if the folder cannot be read."""
    with suppress(StorageError):
        return [step_of(path) for path in _step_folders(folder, complete=True)]
    return []


def read_evaluations(run: AnyPath) -> dict[int, dict[str, Any]]:
    """Return the metrics of checkpoints that were evaluated beside training, by step: values by
    name such as `evaluate/loss`; {} without the file. A checkpoint whose line is damaged is
    evaluated again.

    Raises:
        StorageError: The storage cannot be read.
    """
    file = run / EVALUATIONS
    with as_user_error(file):
        return {line.pop("step"): line for line in read_lines(file) if "step" in line}


def read_metrics(path: AnyPath) -> dict[str, Any]:
    """Return the metrics of a checkpoint, also those of its evaluation beside training."""
    return _metrics_of(path, read_evaluations(path.parent.parent))


def _metrics_of(path: AnyPath, beside: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return `read_metrics` with what `read_evaluations` returned."""
    metrics: dict[str, Any] = load_meta(path).get("metrics", {})
    return metrics | beside.get(step_of(path), {})


def list_checkpoint_names(folder: AnyPath) -> list[str]:
    """Return the folder names of all checkpoints by step, also incomplete and damaged ones.

    Returns:
        Names such as `step-9`, `step-10` and `step-20.damaged`; empty if the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir() if path.name.startswith("step-")]
    except OSError:
        return []
    # By length first, so that step-9 is before step-10.
    return sorted(names, key=lambda name: (len(name.partition(".")[0]), name))


def step_of(path: AnyPath) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def best_checkpoint(folder: AnyPath, metric: str) -> AnyPath | None:
    """Return the complete checkpoint with the best recorded value of a metric, the newest of
    equals.

    Args:
        metric: Name in the `metrics` of meta.json, such as `evaluate/recall_at_1/mean`. Lower
            values are better if a part of the name is `loss` or `median_rank`.

    Returns:
        Folder of the checkpoint; None if no checkpoint has the metric.

    Raises:
        StorageError: The storage cannot be read.
    """
    sign = -1 if any(part in metric.split("/") for part in LOWER_IS_BETTER) else 1
    beside = read_evaluations(folder.parent)
    scored: list[tuple[float, int, AnyPath]] = []
    for path in _step_folders(folder, complete=True):
        try:
            value = _metrics_of(path, beside).get(metric)
        except StorageError:  # it may be the best, and `prune` deletes the others
            raise
        except TrainingError:  # a damaged meta.json is never the best
            continue
        if isinstance(value, int | float):
            scored.append((sign * value, step_of(path), path))
    return max(scored, key=lambda item: item[:2])[2] if scored else None


def prune(folder: AnyPath, keep: int, metric: str | None = None) -> None:
    """Delete all checkpoints except the newest complete ones and the best.

    Args:
        keep: Number of the newest complete checkpoints to keep, at least 1.
        metric: Name of a metric in meta.json, such as `evaluate/recall_at_1/mean`; the complete
            checkpoint with its best value is kept, too: the lowest if a part of the name is `loss`
            or `median_rank`, otherwise the highest. None: only the newest are kept.

    Raises:
        TrainingError: A checkpoint cannot be deleted.
        StorageError: The storage cannot be read.
    """
    protected = set(_step_folders(folder, complete=True)[-keep:])
    best = best_checkpoint(folder, metric) if metric is not None else None
    if best is not None:
        protected.add(best)
    old = [path for path in _step_folders(folder) if path not in protected]
    try:
        for path in old:
            discard(path)
    except OSError as error:
        raise TrainingError(
            f"cannot delete the old checkpoint {path}: {error.strerror or error}"
        ) from error


def discard(path: AnyPath) -> None:
    """Delete a checkpoint, the checksums first, so that an interruption leaves it incomplete."""
    (path / SUMS).unlink(missing_ok=True)
    remove_tree(path)


def _step_folders(folder: AnyPath, complete: bool = False) -> list[AnyPath]:
    """All step-N folders, or only complete ones, oldest first."""
    try:
        paths = [
            path
            for path in folder.iterdir()
            if path.name.startswith("step-") and path.name[5:].isdecimal()
        ]
        return sorted(
            (path for path in paths if not complete or (path / SUMS).exists()), key=step_of
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        # Not the same as empty: a run must not restart because its folder cannot be read.
        raise StorageError(
            f"cannot list the checkpoints in {folder}: {error.strerror or error}"
        ) from error


def verify(path: AnyPath, checksums: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, such as a missing file; None if it is intact.

    Files are read in parallel.

    Args:
        checksums: Compare the SHA-256 of each file; False: only check that all files exist.

    Raises:
        StorageError: The storage cannot be read.
    """

    def fault_of(item: tuple[str, str]) -> str | None:
        name, digest = item
        if not (path / name).exists():
            return f"{name} is missing"
        if checksums and sha256(path / name) != digest:
            return f"{name} does not match its checksum ({(path / name).stat().st_size:,} bytes)"
        return None

    try:
        if not (path / SUMS).exists():
            return f"it is incomplete (no {SUMS})"
        expected = read_checksums(path)
        shards = tensor_file_names(len(expected) - 2)
        if set(expected) != {STATE, META, *shards} or not shards:
            return f"its {SUMS} is damaged"
        return next(filter(None, iter_parallel(fault_of, list(expected.items()))), None)
    except OSError as error:
        raise StorageError(
            f"cannot read the checkpoint {path}: {error.strerror or error}. Check the storage and "
            "rerun the same command; to resume from an older checkpoint, move this one out of the "
            "folder"
        ) from error


def tensor_file_names(num_shards: int) -> tuple[str, ...]:
    """Return the names of the tensor files by rank, such as `shard-1-of-2.safetensors`."""
    return tuple(f"shard-{rank + 1}-of-{num_shards}.safetensors" for rank in range(num_shards))


def num_tensor_files(path: AnyPath) -> int:
    """Return the number of tensor files of a checkpoint, one for each rank that wrote tensors."""
    with as_user_error(path / SUMS):
        return sum(name.endswith(".safetensors") for name in read_checksums(path))


def write_checksums(path: Path, names: tuple[str, ...], others: dict[str, str]) -> None:
    """Write SHA256SUMS after all other files of a checkpoint; it marks the checkpoint as complete.

    Args:
        path: Local folder of the checkpoint.
        names: Names of files in it, which are hashed and synced to disk first.
        others: Hexadecimal SHA-256 by name of further files, which are already synced.
    """
    digests = others | {name: sha256(path / name) for name in names}
    lines = [f"{digest}  {name}\n" for name, digest in digests.items()]
    for name in names:
        fsync(path / name)
    fsync(path)
    temporary = path / f".{SUMS}"
    temporary.write_text("".join(lines))
    fsync(temporary)
    temporary.rename(path / SUMS)
    fsync(path)
    fsync(path.parent)


def read_checksums(path: AnyPath) -> dict[str, str]:
    """Return the hexadecimal SHA-256 by file name in SHA256SUMS, without malformed lines."""
    lines = (path / SUMS).read_text(errors="replace").splitlines()
    pairs = [line.partition("  ") for line in lines]
    return {name: digest for digest, _, name in pairs if len(digest) == 64}


def sha256(file: AnyPath) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    An object of a store is streamed, because it may not fit on the local disk.
    """

    def digest() -> str:
        total = hashlib.sha256()
        with file.open("rb") as stream:
            while data := stream.read(CHUNK_BYTES):
                total.update(data)
        return total.hexdigest()

    return with_retries(digest)


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network mounts can sync files only.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def load_meta(path: AnyPath) -> dict[str, Any]:
    """Return meta.json of a checkpoint: `step`, `rows_consumed`, `metrics`, `config`,
    `architecture`, `world` (number of workers), `base` (of frozen weights, or None) and `versions`.

    Raises:
        TrainingError: The file does not exist or is damaged.
        StorageError: The storage cannot be read.
    """
    return read_json(path / META)


def read_json(file: AnyPath) -> dict[str, Any]:
    """Return the JSON object in a file."""
    with as_user_error(file), local_copy(file) as local:
        return json.loads(local.read_bytes())


@contextmanager
def as_user_error(file: AnyPath) -> Iterator[None]:
    """Context manager that turns an error of reading a file into an error with advice."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        is_storage = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        raise (StorageError if is_storage else TrainingError)(
            f"cannot read {file}: {first_line(error)}. Rerun the same command: it verifies the "
            "checkpoints and resumes from the newest valid one"
        ) from error
