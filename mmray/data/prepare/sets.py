"""From what a user names to a prepared set: one is opened, a raw source is prepared into the cache first."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmray.data.prepare import sample
from mmray.data.prepare.pipeline import Progress, prepare
from mmray.data.store.manifest import MANIFEST, QUARANTINE
from mmray.errors import DataError, UsageError
from mmray.storage.remote_path import Folder, RemotePath, folder_at

if TYPE_CHECKING:
    from mmray.config import Prepare

BUDGETS = {"max_bad_fraction", "max_bad_run"}  # a prepare with another goes on with what is done
_NO_NAME = re.compile(r"[^\w.-]+")


def ensure_prepared(
    source: str, cache: str, settings: Prepare, say: Callable[[str, str], None], progress: Callable[[Progress], None]
) -> Folder:
    """Folder of the prepared set that `source` names; Ray must be there. Raises DataError.

    A raw source goes to CACHE/NAME-HASH, where the hash is of its place and of all settings but the error budgets: the
    second run finds it, rows that were added since are appended, and one with another budget goes on with what is done.
    """
    if source == "sample":
        if isinstance(folder_at(cache), RemotePath):
            raise UsageError(
                f"the sample set is drawn onto a disk, and data.cache is {cache}: set data.cache to a folder, or "
                "data.train to data of your own"
            )
        source = str(sample.draw(Path(cache) / "sample-drawn"))
    place = folder_at(source)
    if (place / MANIFEST).exists():
        return place
    if not place.exists() and "," not in place.name:
        raise DataError(f"there is no data at {place}: give a prepared set, a source of rows, or `sample`")
    name = hashlib.sha256(f"{place}\n{settings.model_dump_json(exclude=BUDGETS)}".encode()).hexdigest()[:8]
    out = folder_at(cache) / f"{_NO_NAME.sub('_', place.stem)}-{name}"
    manifest = prepare(str(place), str(out), settings, progress, say)
    aside = f"{manifest.num_quarantined:,} set aside (reasons in its {QUARANTINE})"
    say(f"{out}: {manifest.num_rows:,} rows of {place.name}, {aside}", "prepared")
    return out
