"""The files of a checkpoint beside its weights, and what a person is told where one cannot be written or read.

For checkpoint.py.
"""

from __future__ import annotations

import json
import pickle
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mmray.engine.checkpoint.plain import strict_json
from mmray.errors import TrainingError
from mmray.storage.file_ops import fetched
from mmray.storage.remote_path import Folder


def cannot_write(path: Folder, error: Exception) -> str:
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


def read(file: Folder, reader: Callable[[Path], Any]) -> Any:
    """What `reader` makes of a file. Raises TrainingError where it cannot."""
    with told(file), fetched(file) as here:
        return reader(here)


@contextmanager
def told(file: Folder) -> Iterator[None]:
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
