"""From what a user names to a prepared set: one is opened, a raw source is prepared into the cache first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmray.data import sample
from mmray.data.manifest import MANIFEST, QUARANTINE
from mmray.data.prepare import Progress, prepare
from mmray.data.remote import Folder, folder_at
from mmray.errors import DataError

if TYPE_CHECKING:
    from mmray.config import Prepare


def ensure_prepared(
    source: str, cache: str, settings: Prepare, say: Callable[[str, str], None], progress: Callable[[Progress], None]
) -> Folder:
    """Folder of the prepared set that `source` names; Ray must be there. Raises DataError.

    A raw source goes to CACHE/NAME-HASH, where the hash is of its place and the settings: the second run finds it, and
    rows that were added since are appended.
    """
    if source == "sample":
        source = str(sample.draw(Path(cache) / "sample-drawn"))
    place = folder_at(source)
    if (place / MANIFEST).exists():
        return place
    if not place.exists() and "," not in place.name:
        raise DataError(f"there is no data at {place}: give a prepared set, a source of rows, or `sample`")
    without = set() if settings.allow_urls else {"allow_urls"}  # sets of before that setting keep their names
    name = hashlib.sha256(f"{place}\n{settings.model_dump_json(exclude=without)}".encode()).hexdigest()[:8]
    out = folder_at(cache) / f"{place.stem}-{name}"
    manifest = prepare(str(place), str(out), settings, progress, say)
    aside = f"{manifest.num_quarantined:,} set aside (reasons in its {QUARANTINE})"
    say(f"{out}: {manifest.num_rows:,} rows of {place.name}, {aside}", "prepared")
    return out
