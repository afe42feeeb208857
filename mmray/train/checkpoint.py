"""Checkpoints of a run: written whole, verified before they are trusted, thrown away by one owner.

The loop hands over weights and state after a step; a later attempt (or evaluation, or export) reads them back.

    checkpoints/step-N/  model.safetensors   weights, readable by anything
                         state.pt            optimizer, scaler, progress: tensors and plain values only
                         meta.json           step, rows consumed, config, metrics, world, versions
                         SHA256SUMS          written last; `sha256sum -c SHA256SUMS` checks it by hand

A folder without SHA256SUMS does not count, whatever else is in it: that holds on an object store, which has no rename,
as well. There a checkpoint is written on this machine first, and SHA256SUMS uploaded when the rest is there.
"""

from __future__ import annotations

import json
import pickle
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mmray.data.folders import fetched, move_tree, remove_tree, staged
from mmray.data.remote import Folder
from mmray.errors import StorageError, TrainingError
from mmray.models import weights
from mmray.train.plain import require_plain, strict_json
from mmray.train.sums import SUMS, fault, seal

MODEL, STATE, META = "model.safetensors", "state.pt", "meta.json"
PARTS = (MODEL, STATE, META)
LOWER_IS_BETTER = ("loss", "median_rank")  # parts of the names of metrics that should fall

Report = Callable[[str], None]


def save(
    folder: Folder, step: int, model_state: dict[str, Tensor], state: dict[str, Any], meta: dict[str, Any]
) -> Folder:
    """Write folder/step-N and return it; it counts only once it is complete and on disk.

    What lies there already under that name is replaced. `state` holds tensors, numbers, text, lists, tuples and dicts
    (TypeError names anything else). Raises StorageError when the storage does not take it; nothing of it then counts.
    """
    require_plain(state, "state")
    path = folder / f"step-{step}"
    try:
        _discard(path)
        with staged(path, (*PARTS, SUMS)) as here:
            weights.save_weights(model_state, here / MODEL)
            _write_state(state, here / STATE)
            (here / META).write_text(_record(step, meta))
            seal(here, PARTS)
    except (OSError, SafetensorError) as error:
        _discard(path, strict=False)
        raise StorageError(_cannot_write(path, error)) from error
    return path


def newest_good(folder: Folder, report: Report | None = None, set_aside: bool = True) -> Folder | None:
    """The newest checkpoint whose every byte is as it was written; None when there is none.

    Each newer one that does not count is named, with its fault, to `report`; a damaged one is renamed to
    step-N.damaged unless `set_aside` is off (a reader beside a running training must not move its files). Raises
    StorageError when the storage cannot be read: that says nothing about the checkpoint.
    """
    tell = report or (lambda _: None)
    for path in reversed(_steps(folder)):
        found = verify(path)
        if found is None:
            return path
        moved = ""
        if set_aside and (path / SUMS).exists():
            moved = f"; it is now {_set_aside(path).name}"
        tell(f"checkpoint {path} does not count: {found}{moved}")
    return None


def load(path: Folder) -> dict[str, Any]:
    """What `save` was given, on the CPU: the weights under `model`, beside the keys of `state`."""
    return {"model": load_weights(path), **_read(path / STATE, _load_state)}


def load_weights(path: Folder) -> dict[str, Tensor]:
    """The weights alone, on the CPU. Raises TrainingError when they cannot be read."""
    tensors: dict[str, Tensor] = _read(path / MODEL, weights.load_weights)
    return tensors


def load_meta(path: Folder) -> dict[str, Any]:
    """The readable record: step, rows consumed, config, metrics. Raises TrainingError when it cannot be read."""
    meta: dict[str, Any] = _read(path / META, lambda file: json.loads(file.read_bytes()))
    return meta


def newest_complete(folder: Folder) -> Folder | None:
    """The newest checkpoint that was written to its end, unverified; None when there is none."""
    return next(reversed(_complete(folder)), None)


def names(folder: Folder) -> list[str]:
    """The checkpoints that are there, complete or not, and those set aside, in words for people."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))
    except OSError:
        return []


def step_of(path: Folder) -> int:
    """The step that a checkpoint's folder is named by."""
    return int(path.name.removeprefix("step-"))


def best(folder: Folder, metric: str) -> Folder | None:
    """The checkpoint whose recorded `metric` is best, the newest of equals; None where none has it."""
    scored = [(score, path) for path in _complete(folder) if (score := _score(path, metric)) is not None]
    return max(scored, key=lambda pair: (pair[0], step_of(pair[1])))[1] if scored else None


def prune(folder: Folder, keep: int, metric: str | None = None) -> list[Folder]:
    """Delete all but the newest `keep` and the best by `metric`, and what was never finished; returns the deleted.

    Only complete checkpoints are counted. Raises TrainingError when the storage refuses.
    """
    complete = _complete(folder)
    kept = set(complete[-keep:])
    if metric is not None and (top := best(folder, metric)) is not None:
        kept.add(top)
    gone = [path for path in _steps(folder) if path not in kept]
    try:
        for path in gone:
            _discard(path)
    except OSError as error:
        raise TrainingError(f"cannot delete the old checkpoint {path}: {error.strerror or error}") from error
    return gone


def _steps(folder: Folder) -> list[Folder]:
    """All step-N folders, complete or not, oldest first."""
    try:
        there: list[Folder] = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:  # not the same as empty: a run must not begin anew because its folder cannot be read
        raise StorageError(f"cannot list the checkpoints in {folder}: {error.strerror or error}") from error
    named = [path for path in there if path.name.startswith("step-") and path.name[5:].isdecimal()]
    return sorted(named, key=step_of)


def _complete(folder: Folder) -> list[Folder]:
    steps = _steps(folder)
    try:
        return [path for path in steps if (path / SUMS).exists()]
    except OSError as error:
        raise StorageError(f"cannot look at the checkpoints in {folder}: {error.strerror or error}") from error


def _score(path: Folder, metric: str) -> float | None:
    """The recorded metric, turned so that larger is better; None where there is none, or it is not a number."""
    try:
        value = load_meta(path).get("metrics", {}).get(metric)
    except TrainingError:
        return None  # a damaged record is never the best
    if not isinstance(value, int | float):
        return None
    return -value if any(part in metric.split("/") for part in LOWER_IS_BETTER) else value


def verify(path: Folder) -> str | None:
    """What is wrong with a checkpoint, or None. A storage that cannot be read says nothing about it: StorageError."""
    try:
        return fault(path, PARTS)
    except OSError as error:
        raise StorageError(
            f"the storage cannot read the checkpoint {path}: {error.strerror or error}. Check the storage, then start "
            "the same command again; to go on from an older checkpoint, move this one out of the folder"
        ) from error


def _set_aside(path: Folder) -> Folder:
    """Rename a damaged checkpoint out of the way, for whoever wants to look at it."""
    target = path.with_name(f"{path.name}.damaged")
    try:
        move_tree(path, target)  # an older one of the same step is replaced: the newer tells more
    except OSError as error:
        raise StorageError(f"cannot move the damaged checkpoint {path} aside: {error.strerror or error}") from error
    return target


def _discard(path: Folder, strict: bool = True) -> None:
    """Delete a checkpoint, its sums first: a deletion cut short leaves nothing that counts."""
    try:
        (path / SUMS).unlink(missing_ok=True)
        remove_tree(path)
    except OSError:
        if strict:
            raise


def _cannot_write(path: Folder, error: Exception) -> str:
    """The message for a checkpoint that could not be written: cause, room on the storage, next move."""
    text = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
    try:
        room = f" ({shutil.disk_usage(path.parent).free / 2**30:.2f} GiB free)" if isinstance(path, Path) else ""
    except OSError:
        room = ""
    return (
        f"cannot write the checkpoint {path}: {text}{room}. Older checkpoints are untouched: make room (or mend the "
        "permissions) and start the same command again, or choose another --run.storage"
    )


def _read(file: Folder, reader: Callable[[Path], Any]) -> Any:
    try:
        with fetched(file) as here:
            return reader(here)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"cannot read {file}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            "Start the same command again: it verifies the checkpoints and goes on from the newest good one"
        ) from error


def _record(step: int, meta: dict[str, Any]) -> str:
    """The readable record, meta.json."""
    record = {"step": step, **meta, "versions": {"python": platform.python_version(), "torch": torch.__version__}}
    return json.dumps(strict_json(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _write_state(state: dict[str, Any], file: Path) -> None:
    try:
        with file.open("wb") as stream:
            torch.save(state, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's writer reports a full disk as an internal error of its own
            raise error.__context__ from None
        raise


def _load_state(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state
