"""Sweep folder: name, files, and the decision to create, resume or reject it.

STORAGE/NAME/  recipe.yaml (base of all trials)  sweep.json  trials.jsonl (one row per trial)  best.yaml
               trials/tNNN/ (run folders)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmray.config import Config, from_yaml, to_yaml
from mmray.errors import UsageError
from mmray.storage import lease
from mmray.train.run_dir import RunDir, candidate_names, forbidden_changes
from mmray.tune.results import REUSABLE

KIND = "sweep"
# Settings of the recipe that a resumed sweep may change.
MAY_CHANGE = (
    "run",
    "cluster.address",
    "cluster.start_timeout_s",
    "data.cache",
    "data.local_cache",
    "data.local_cache_gb",
)


@dataclass(frozen=True)
class SweepDir(RunDir):
    """Paths and files of one sweep, on a file system (see _paths)."""

    path: Path

    def read_rows(self) -> list[dict[str, Any]]:
        """Return the rows of trials.jsonl; empty without the file."""
        file = self.path / "trials.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write all rows in trial order."""
        ordered = sorted(rows, key=lambda row: row["trial"])
        self.write("trials.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered))

    def kept(self, settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return reusable rows of earlier commands by trial; `settings` are the settings of the current trials."""
        rows = {row["trial"]: row for row in self.read_rows() if row["status"] in REUSABLE}
        return {name: row for name, row in rows.items() if settings.get(name) == row["settings"]}

    def clear_trial(self, name: str) -> None:
        """Remove the files of an interrupted trial, because trials do not resume."""
        folder = self.path / "trials" / name
        if folder.exists():
            shutil.rmtree(folder)


def resolve_sweep_dir(base: Config, identity: dict[str, Any]) -> SweepDir:
    """Return the folder of this sweep: resume or reject a named one; skip finished or different unnamed ones.

    `identity` has the values that sweep.json must match: search space, samples per trial. Raises UsageError with the
    differences.
    """
    for path in _paths(base):
        found = SweepDir(path)
        before = found.read_json("sweep.json")
        if before is None:
            if base.run.resume == "must":
                raise UsageError(f"--run.resume must: no sweep at {path}")
            if path.exists() and any(file.name not in (lease.FOLDER, "recipe.yaml") for file in path.iterdir()):
                raise UsageError(f"{path} exists and is not a sweep; choose another --run.name")
            return found
        changes = _changes(found, before, base, identity)
        if base.run.name is not None:
            if base.run.resume == "never":
                raise UsageError(f"{path} exists; choose another --run.name, or resume with --run.resume auto")
            if changes:
                raise UsageError(
                    f"{path} is another sweep:\n  " + "\n  ".join(changes) + "\n"
                    "Its trials cannot be compared with these: choose another --run.name, or set these back."
                )
            return found
        if not changes and before["status"] != "finished" and base.run.resume != "never":
            return found
    raise AssertionError("the names never end")


def create(sweep: SweepDir, base: Config) -> None:
    """Create the folder and write the base recipe."""
    try:
        (sweep.path / "trials").mkdir(parents=True, exist_ok=True)
        sweep.write("recipe.yaml", to_yaml(base))
    except OSError as error:
        raise UsageError(
            f"cannot write the sweep's folder {sweep.path}: {error}; choose another --run.storage"
        ) from None


def _changes(found: SweepDir, before: dict[str, Any], base: Config, identity: dict[str, Any]) -> list[str]:
    """Return `setting: old -> new` for changes that prevent resuming."""
    lines = [f"{key}: {before.get(key)} -> {value}" for key, value in identity.items() if before.get(key) != value]
    file = found.path / "recipe.yaml"
    before_base = from_yaml(file.read_text(), str(file))  # settings added in later versions get defaults
    old, new = (config.model_dump(mode="json", by_alias=True) for config in (before_base, base))
    return lines + forbidden_changes(old, new, MAY_CHANGE)


def _paths(base: Config) -> Iterator[Path]:
    """Return candidate paths: the named one, or RECIPE-tune, RECIPE-tune-2, RECIPE-tune-3, ..."""
    if "://" in base.run.storage:
        raise UsageError(
            f"run.storage: {base.run.storage} is on an object store; a sweep needs a folder that all nodes share, "
            "such as a network mount"
        )
    storage = Path(base.run.storage).expanduser().resolve()
    return (storage / name for name in candidate_names(f"{base.recipe}-tune", base.run.name))
