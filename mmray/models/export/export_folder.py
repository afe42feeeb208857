"""Where an exported model is written: whole or not at all, in place of an earlier export and of nothing else.

On an object store, which has no renaming, config.json first says that the rest is on its way, and comes again last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmray.errors import UsageError
from mmray.storage.file_ops import move_tree, staged
from mmray.storage.remote_path import Folder, RemotePath

CONFIG, MADE_BY = "config.json", "mmray"  # the file that says what a folder holds, and the key by which it is ours


def check_free(out: Folder, files: Collection[str]) -> None:
    """Raise UsageError unless `out` is not there, is empty, or is an export of mmray with no file but `files`."""
    if out.exists() and not (out.is_dir() and _is_export_or_empty(out, files)):
        raise UsageError(f"{out} exists and is not an exported model: choose another folder")


@contextmanager
def replacing(out: Folder, names: Sequence[str]) -> Iterator[Path]:
    """A folder of this machine for the files `names`, config.json last; when the block ends well they are `out`.

    Killed on the way, what was there is still whole on a disk: at its place, or beside it under .NAME.replaced. On an
    object store `out` is no model then, and can be written again. Raises OSError.
    """
    if isinstance(out, RemotePath):
        with staged(out, names) as here:
            yield here
            (out / CONFIG).write_text(json.dumps({MADE_BY: "on its way"}))
            for there in out.iterdir():
                if there.name not in names:
                    there.unlink()
        return
    new, old = (out.with_name(f".{out.name}.{word}") for word in ("exporting", "replaced"))
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        if out.exists():
            move_tree(out, old)
        move_tree(new, out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not out.exists():
            move_tree(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)  # what is left of it, the next export removes


def _is_export_or_empty(folder: Folder, files: Collection[str]) -> bool:
    names = {path.name for path in folder.iterdir()}
    return not names or (names <= set(files) and CONFIG in names and _is_ours(folder / CONFIG))


def _is_ours(config: Folder) -> bool:
    """Whether mmray wrote it: transformers' own has the same name."""
    try:
        values = json.loads(config.read_text())
    except ValueError:
        return False
    return isinstance(values, dict) and MADE_BY in values
