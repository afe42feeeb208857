"""Checkpoints of a run: written whole, verified before they are trusted, thrown away by one owner.

The loop hands over weights and state after a step; a later attempt (or evaluation, or export) reads them back.

    checkpoints/step-N/  model.safetensors   weights, readable by anything
                         state.pt            optimizer, scaler, progress: tensors and plain values only
                         meta.json           step, rows consumed, config, metrics, world, versions
                         SHA256SUMS          written last; `sha256sum -c SHA256SUMS` checks it by hand

A folder without SHA256SUMS does not count, whatever else is in it: that holds on storage without a rename as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmray.errors import TrainingError

MODEL, STATE, META, SUMS = "model.safetensors", "state.pt", "meta.json", "SHA256SUMS"
PARTS = (MODEL, STATE, META)
LOWER_IS_BETTER = ("loss", "median_rank")  # parts of the names of metrics that should fall

Report = Callable[[str], None]
_WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)  # a full disk is OSError only where Python itself writes


def save(folder: Path, step: int, model_state: dict[str, Tensor], state: dict[str, Any], meta: dict[str, Any]) -> Path:
    """Write folder/step-N and return it; it counts only once it is complete and on disk.

    What lies there already under that name is replaced. `state` holds tensors, numbers, text, lists, tuples and dicts
    (TypeError names anything else). Raises TrainingError when the storage does not take it; nothing of it then counts.
    """
    _require_plain(state, "state")
    path = folder / f"step-{step}"
    try:
        _discard(path)
        path.mkdir(parents=True)
        save_file(_unshared(model_state), path / MODEL)
        torch.save(state, path / STATE)
        record = {"step": step, **meta, "versions": {"python": platform.python_version(), "torch": torch.__version__}}
        (path / META).write_text(json.dumps(_strict_json(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        _seal(path)
    except _WRITE_ERRORS as error:
        _discard(path, strict=False)
        raise TrainingError(_cannot_write(path, error)) from error
    return path


def newest_good(folder: Path, report: Report | None = None, set_aside: bool = True) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; None when there is none.

    Each newer one that does not count is named, with its fault, to `report`; a damaged one is renamed to
    step-N.damaged unless `set_aside` is off (a reader beside a running training must not move its files). Raises
    TrainingError when the storage cannot be read: that says nothing about the checkpoint.
    """
    tell = report or (lambda _: None)
    for path in reversed(_steps(folder)):
        fault = _fault(path)
        if fault is None:
            return path
        moved = ""
        if set_aside and (path / SUMS).exists():
            moved = f"; it is now {_set_aside(path).name}"
        tell(f"checkpoint {path} does not count: {fault}{moved}")
    return None


def load(path: Path) -> dict[str, Any]:
    """What `save` was given, on the CPU: the weights under `model`, beside the keys of `state`."""
    return {"model": load_weights(path), **_read(path / STATE, _load_state)}


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights alone, on the CPU. Raises TrainingError when they cannot be read."""
    weights: dict[str, Tensor] = _read(path / MODEL, load_file)
    return weights


def load_meta(path: Path) -> dict[str, Any]:
    """The readable record: step, rows consumed, config, metrics. Raises TrainingError when it cannot be read."""
    meta: dict[str, Any] = _read(path / META, lambda file: json.loads(file.read_bytes()))
    return meta


def best(folder: Path, metric: str) -> Path | None:
    """The checkpoint whose recorded `metric` is best, the newest of equals; None where none has it."""
    scored = [(score, path) for path in _complete(folder) if (score := _score(path, metric)) is not None]
    return max(scored, key=lambda pair: (pair[0], _step_of(pair[1])))[1] if scored else None


def prune(folder: Path, keep: int, metric: str | None = None) -> list[Path]:
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


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _steps(folder: Path) -> list[Path]:
    """All step-N folders, complete or not, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=_step_of)


def _complete(folder: Path) -> list[Path]:
    return [path for path in _steps(folder) if (path / SUMS).exists()]


def _score(path: Path, metric: str) -> float | None:
    """The recorded metric, turned so that larger is better; None where there is none, or it is not a number."""
    try:
        value = load_meta(path).get("metrics", {}).get(metric)
    except TrainingError:
        return None  # a damaged record is never the best
    if not isinstance(value, int | float):
        return None
    return -value if any(part in metric.split("/") for part in LOWER_IS_BETTER) else value


def _seal(path: Path) -> None:
    """Put the parts on disk, then their sums, then the name of the sums: in this order, so that sums mean a whole."""
    lines = [f"{_sha256(path / name)}  {name}\n" for name in PARTS]
    for name in PARTS:
        _sync(path / name)
    _sync(path)
    temporary = path / f".{SUMS}"
    temporary.write_text("".join(lines))
    _sync(temporary)
    temporary.rename(path / SUMS)
    _sync(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when it is whole."""
    try:
        if not (path / SUMS).exists():
            return f"it was not written to its end (no {SUMS})"
        expected = dict(_sums(path))
        if set(expected) != set(PARTS):
            return f"its {SUMS} is damaged"
        for name in PARTS:
            if not (path / name).exists():
                return f"{name} is missing"
            if _sha256(path / name) != expected[name]:
                return f"{name} is not as it was written ({(path / name).stat().st_size:,} bytes now)"
    except OSError as error:
        raise TrainingError(
            f"the storage cannot read the checkpoint {path}: {error.strerror or error}. Check the storage, then start "
            "the same command again; to go on from an older checkpoint, move this one out of the folder"
        ) from error
    return None


def _sums(path: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of the lines of SHA256SUMS; a line of another form is left out."""
    for line in (path / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) == 64:
            yield name, digest


def _set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint out of the way, for whoever wants to look at it."""
    target = path.with_name(f"{path.name}.damaged")
    try:
        shutil.rmtree(target, ignore_errors=True)  # an older one of the same step: the newer tells more
        path.rename(target)
    except OSError as error:
        raise TrainingError(f"cannot move the damaged checkpoint {path} aside: {error.strerror or error}") from error
    return target


def _discard(path: Path, strict: bool = True) -> None:
    """Delete a checkpoint, its sums first: a deletion cut short leaves nothing that counts."""
    try:
        (path / SUMS).unlink(missing_ok=True)
        if path.exists():
            shutil.rmtree(path)
    except OSError:
        if strict:
            raise


def _cannot_write(path: Path, error: Exception) -> str:
    """The message for a checkpoint that could not be written: cause, room on the storage, next move."""
    cause = error if isinstance(error, OSError) else error.__context__ or error
    text = (getattr(cause, "strerror", None) or str(cause)).splitlines()[0]
    try:
        room = f" ({shutil.disk_usage(path.parent).free / 2**30:.2f} GiB free)"
    except OSError:
        room = ""
    return (
        f"cannot write the checkpoint {path}: {text}{room}. Older checkpoints are untouched: make room (or mend the "
        "permissions) and start the same command again, or choose another --run.storage"
    )


def _read(file: Path, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(file)
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"cannot read {file}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            "Start the same command again: it verifies the checkpoints and goes on from the newest good one"
        ) from error


def _load_state(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, no two in one storage: safetensors refuses tied weights, so each gets its own copy."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        whole = tensor.detach().contiguous()
        out[name] = whole.clone() if place in seen and place != 0 else whole
        seen.add(place)
    return out


def _require_plain(value: Any, where: str) -> None:
    """Raise TypeError where a value would need pickle to be stored, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            _require_plain(key, f"a key of {where}")
            _require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
    # Exact types: numpy's numbers are subclasses of Python's, and need pickle.
    elif not isinstance(value, Tensor) and type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint holds tensors and plain values only")


def _strict_json(value: Any) -> Any:
    """NaN and infinity as null, which JSON has."""
    if isinstance(value, dict):
        return {key: _strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
