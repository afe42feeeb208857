"""Checkpoints of a run: written whole, verified before they are trusted, thrown away by one owner.

The loop hands over weights and state after a step; a later attempt (or evaluation, or export) reads them back.

    checkpoints/step-N/  model.safetensors   weights, readable by anything
                         state.pt            optimizer, scaler, progress: tensors and plain values only
                         meta.json           step, rows consumed, config, metrics, world, versions
                         SHA256SUMS          written last; `sha256sum -c SHA256SUMS` checks it by hand

A folder without SHA256SUMS does not count, whatever else is in it: that holds on an object store, which has no rename,
as well. There a checkpoint is written on this machine first, and SHA256SUMS uploaded when the rest is there.

Of a model that is cut over the ranks no rank has the whole: each writes a file of its own (shards.py) in place of
model.safetensors, state.pt keeps an outline where a tensor lies in those, and rank 0 seals the folder when all are
there. What is read is the same: whole for whoever asks so, or cut as the reader's model is, by any number of ranks.
"""

from __future__ import annotations

import json
import math
import pickle
import platform
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mmray.engine.checkpoint import tree
from mmray.engine.checkpoint.checksums import SUMS, find_fault, write_checksums
from mmray.errors import StorageError, TrainingError
from mmray.models import weights
from mmray.storage.paths import AnyPath, local_copy, move_tree, remove_tree, staged_upload


# What may be stored at rest: tensors and plain values that are read without pickle. For checkpoint.py.
def require_plain(value: Any, where: str) -> None:
    """Raise TypeError where a value would need pickle to be stored, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            require_plain(key, f"a key of {where}")
            require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_plain(item, f"{where}[{index}]")
    # Exact types: numpy's numbers are subclasses of Python's, and need pickle.
    elif not isinstance(value, Tensor) and type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint holds tensors and plain values only")


def strict_json(value: Any) -> Any:
    """The value with NaN and infinity, which JSON lacks, as null."""
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The files of a checkpoint beside its weights, and what a person is told where one cannot be written or read.
#
# For checkpoint.py.
def cannot_write(path: AnyPath, error: Exception) -> str:
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


def read(file: AnyPath, reader: Callable[[Path], Any]) -> Any:
    """What `reader` makes of a file. Raises TrainingError where it cannot."""
    with as_user_error(file), local_copy(file) as here:
        return reader(here)


@contextmanager
def as_user_error(file: AnyPath) -> Iterator[None]:
    """What cannot be read, as an error that says what next."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"cannot read {file}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            "Start the same command again: it verifies the checkpoints and goes on from the newest good one"
        ) from error


def record(step: int, meta: dict[str, Any]) -> str:
    """The readable record, meta.json."""
    known = {"step": step, **meta, "versions": {"python": platform.python_version(), "torch": torch.__version__}}
    return json.dumps(strict_json(known), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_state(state: dict[str, Any], file: Path) -> None:
    """Write tensors and plain values. Raises OSError."""
    try:
        with file.open("wb") as stream:
            torch.save(state, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's writer reports a full disk as an internal error of its own
            raise error.__context__ from None
        raise


def load_state(file: Path) -> dict[str, Any]:
    """Read them, on the CPU; no code runs."""
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


MODEL, STATE, META = "model.safetensors", "state.pt", "meta.json"
PARTS = (MODEL, STATE, META)
LOWER_IS_BETTER = ("loss", "median_rank")  # parts of the names of metrics that should fall

Report = Callable[[str], None]
Cut = Callable[[tree.At, Tensor], Tensor]  # an empty tensor for the one outlined, cut as the reader wants it


def save(
    folder: AnyPath, step: int, model_state: dict[str, Tensor], state: dict[str, Any], meta: dict[str, Any]
) -> AnyPath:
    """Write folder/step-N and return it; it counts only once it is complete and on disk.

    What lies there already under that name is replaced. `state` holds tensors, numbers, text, lists, tuples and dicts
    (TypeError names anything else). Raises StorageError when the storage does not take it; nothing of it then counts.
    """
    require_plain(state, "state")
    path = folder / f"step-{step}"
    try:
        _discard(path)
        with staged_upload(path, (*PARTS, SUMS)) as here:
            weights.save_weights(model_state, here / MODEL)
            write_state(state, here / STATE)
            (here / META).write_text(record(step, meta))
            write_checksums(here, PARTS)
    except (OSError, SafetensorError) as error:
        _discard(path, strict=False)
        raise StorageError(cannot_write(path, error)) from error
    return path


def save_shards(
    folder: AnyPath,
    step: int,
    state: dict[str, Any],
    meta: dict[str, Any],
    ranks: Any,
    check: Callable[[], None] | None = None,
) -> AnyPath:
    """As `save`, of a `state` with the weights under `model`: all ranks call it together, each with its own cut.

    `ranks` is a process group on hosts. Rank 0's `meta` and plain values are kept, and it alone gives a `check`, called
    before any rank writes and before the folder is sealed; what goes wrong on one rank is raised on all.
    """
    from mmray.engine.checkpoint import (
        sharded as shards,  # late, here and below: seconds of import that few need, and no driver does
    )

    plain = tree.mapped(state, tree.outline)
    require_plain(plain, "state")
    path = folder / f"step-{step}"

    def opened() -> None:
        assert check is not None
        check()
        _discard(path)
        path.mkdir(parents=True)

    def closed(parts: dict[str, tree.Part]) -> None:
        assert check is not None
        check()
        with staged_upload(path, (STATE, META, SUMS)) as here:
            write_state(plain, here / STATE)
            (here / META).write_text(record(step, {"shards": len(parts), **meta}))
            write_checksums(here, (STATE, META), {name: part.digest for name, part in parts.items()})

    try:
        shards.write(path, state, ranks, opened, closed)
    except (OSError, SafetensorError) as error:
        if check is not None:
            _discard(path, strict=False)
        raise StorageError(cannot_write(path, error)) from error
    return path


def latest_valid(folder: AnyPath, report: Report | None = None, quarantine: bool = True) -> AnyPath | None:
    """The newest checkpoint whose every byte is as it was written; None when there is none.

    Each newer one that does not count is named, with its fault, to `report`; a damaged one is renamed to
    step-N.damaged unless `quarantine` is off (a reader beside a running training must not move its files). Raises
    StorageError when the storage cannot be read: that says nothing about the checkpoint.
    """
    tell = report or (lambda _: None)
    for path in reversed(_steps(folder)):
        found = verify(path)
        if found is None:
            return path
        moved = ""
        if quarantine and (path / SUMS).exists():
            moved = f"; it is now {_quarantine(path).name}"
        tell(f"checkpoint {path} does not count: {found}{moved}")
    return None


def load(path: AnyPath, cut: Cut | None = None) -> dict[str, Any]:
    """What was saved: the weights under `model`, beside the keys of `state`; whole and on the CPU.

    Of a sharded one, tensors come as `cut` has them, and no more of each is read.
    """
    state: dict[str, Any] = read(path / STATE, load_state)
    if world := shards_of(path):
        return _filled(path, state, world, cut or _uncut)
    return {"model": load_weights(path), **state}


def load_weights(path: AnyPath) -> dict[str, Tensor]:
    """The weights alone, on the CPU. Raises TrainingError when they cannot be read."""
    if world := shards_of(path):
        found: dict[str, Any] = _filled(path, {"model": read(path / STATE, load_state)["model"]}, world, _uncut)
        return dict(found["model"])
    tensors: dict[str, Tensor] = read(path / MODEL, weights.load_weights)
    return tensors


def shards_of(path: AnyPath) -> int:
    """The number of ranks whose files a checkpoint is in; 0 where it is whole."""
    return int(load_meta(path).get("shards", 0))


def load_meta(path: AnyPath) -> dict[str, Any]:
    """The readable record: step, rows consumed, config, metrics. Raises TrainingError when it cannot be read."""
    meta: dict[str, Any] = read(path / META, lambda file: json.loads(file.read_bytes()))
    return meta


def latest_complete(folder: AnyPath) -> AnyPath | None:
    """The newest checkpoint that was written to its end, unverified; None when there is none."""
    return next(reversed(_complete(folder)), None)


def list_names(folder: AnyPath) -> list[str]:
    """The checkpoints that are there, complete or not, and those set aside, in words for people."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))
    except OSError:
        return []


def step_of(path: AnyPath) -> int:
    """The step that a checkpoint's folder is named by."""
    return int(path.name.removeprefix("step-"))


def best(folder: AnyPath, metric: str) -> AnyPath | None:
    """The checkpoint whose recorded `metric` is best, the newest of equals; None where none has it."""
    scored = [(score, path) for path in _complete(folder) if (score := _score(path, metric)) is not None]
    return max(scored, key=lambda pair: (pair[0], step_of(pair[1])))[1] if scored else None


def best_score(folder: AnyPath, metric: str) -> dict[str, Any] | None:
    """Step of the best checkpoint, the metric (`evaluate/` left out) and its score, for result.json; None: no score."""
    found = best(folder, metric)
    if found is None:
        return None
    score = load_meta(found)["metrics"][metric]
    return {"step": step_of(found), "metric": metric.removeprefix("evaluate/"), "score": score}


def prune(folder: AnyPath, keep: int, metric: str | None = None) -> list[AnyPath]:
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


def _steps(folder: AnyPath) -> list[AnyPath]:
    """All step-N folders, complete or not, oldest first."""
    try:
        there: list[AnyPath] = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:  # not the same as empty: a run must not begin anew because its folder cannot be read
        raise StorageError(f"cannot list the checkpoints in {folder}: {error.strerror or error}") from error
    named = [path for path in there if path.name.startswith("step-") and path.name[5:].isdecimal()]
    return sorted(named, key=step_of)


def _complete(folder: AnyPath) -> list[AnyPath]:
    steps = _steps(folder)
    try:
        return [path for path in steps if (path / SUMS).exists()]
    except OSError as error:
        raise StorageError(f"cannot look at the checkpoints in {folder}: {error.strerror or error}") from error


def _score(path: AnyPath, metric: str) -> float | None:
    """The recorded metric, turned so that larger is better; None where there is none, or it is not a number."""
    try:
        value = load_meta(path).get("metrics", {}).get(metric)
    except TrainingError:
        return None  # a damaged record is never the best
    if not isinstance(value, int | float):
        return None
    return -value if any(part in metric.split("/") for part in LOWER_IS_BETTER) else value


def verify(path: AnyPath) -> str | None:
    """What is wrong with a checkpoint, or None. A storage that cannot be read says nothing about it: StorageError."""
    try:
        return find_fault(path, _is_whole)
    except OSError as error:
        raise StorageError(
            f"the storage cannot read the checkpoint {path}: {error.strerror or error}. Check the storage, then start "
            "the same command again; to go on from an older checkpoint, move this one out of the folder"
        ) from error


def _is_whole(names: Collection[str]) -> bool:
    return set(names) in ({*PARTS}, {STATE, META, *tree.names(len(names) - 2)})


def _filled(path: AnyPath, state: dict[str, Any], world: int, cut: Cut) -> dict[str, Any]:
    """The state with the tensors that it outlines, cut by `cut`."""
    from mmray.engine.checkpoint import sharded as shards

    wanted: dict[tree.At, Tensor] = {}
    tree.mapped(state, lambda at, outline: wanted.setdefault(at, cut(at, outline)))
    with as_user_error(path):
        shards.read(path, wanted, world)
    filled: dict[str, Any] = tree.mapped(state, lambda at, _: wanted[at])
    return filled


def _uncut(at: tree.At, outline: Tensor) -> Tensor:
    return torch.empty_like(outline, device="cpu")


def _quarantine(path: AnyPath) -> AnyPath:
    """Rename a damaged checkpoint out of the way, for whoever wants to look at it."""
    target = path.with_name(f"{path.name}.damaged")
    try:
        move_tree(path, target)  # an older one of the same step is replaced: the newer tells more
    except OSError as error:
        raise StorageError(f"cannot move the damaged checkpoint {path} aside: {error.strerror or error}") from error
    return target


def _discard(path: AnyPath, strict: bool = True) -> None:
    """Delete a checkpoint, its sums first: a deletion cut short leaves nothing that counts."""
    try:
        (path / SUMS).unlink(missing_ok=True)
        remove_tree(path)
    except OSError:
        if strict:
            raise
