"""The sweep folder: its name, its files, and whether a command creates, resumes or refuses it.

STORAGE/NAME/  recipe.yaml (what the trials vary)  sweep.json  trials.jsonl (a row a trial)  best.yaml
               trials/tNNN/ (whole run folders)
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
    "cluster.collective_timeout_s",
    "data.cache",
    "data.local_cache",
    "data.local_cache_gb",
)


@dataclass(frozen=True)
class SweepDir(RunDir):
    """Paths and files of one sweep; a folder of a file system (see _paths)."""

    path: Path

    def read_rows(self) -> list[dict[str, Any]]:
        """Return the rows of trials.jsonl; empty without the file."""
        file = self.path / "trials.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write all rows, in the order of the trials."""
        ordered = sorted(rows, key=lambda row: row["trial"])
        self.write("trials.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered))

    def kept(self, settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return rows of earlier commands that need no second run, by trial; `settings` are this command's trials."""
        rows = {row["trial"]: row for row in self.read_rows() if row["status"] in REUSABLE}
        return {name: row for name, row in rows.items() if settings.get(name) == row["settings"]}

    def clear_trial(self, name: str) -> None:
        """Remove the files of an interrupted trial: a trial is measured completely or not at all."""
        folder = self.path / "trials" / name
        if folder.exists():
            shutil.rmtree(folder)


def resolve_sweep_dir(base: Config, identity: dict[str, Any]) -> SweepDir:
    """The folder of this sweep. A named one is continued or refused; an unnamed one that has ended takes the next name.

    `identity` is what sweep.json must agree in: space, samples of a trial. Raises UsageError with the differences.
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
    """Create the folder, with the base recipe in it."""
    try:
        (sweep.path / "trials").mkdir(parents=True, exist_ok=True)
        sweep.write("recipe.yaml", to_yaml(base))
    except OSError as error:
        raise UsageError(
            f"cannot write the sweep's folder {sweep.path}: {error}; choose another --run.storage"
        ) from None


def _changes(found: SweepDir, before: dict[str, Any], base: Config, identity: dict[str, Any]) -> list[str]:
    """Return `setting: old -> new` for changes that a resumed sweep may not make."""
    lines = [f"{key}: {before.get(key)} -> {value}" for key, value in identity.items() if before.get(key) != value]
    file = found.path / "recipe.yaml"
    before_base = from_yaml(file.read_text(), str(file))  # settings added since then have their defaults
    old, new = (config.model_dump(mode="json", by_alias=True) for config in (before_base, base))
    return lines + forbidden_changes(old, new, MAY_CHANGE)


def _paths(base: Config) -> Iterator[Path]:
    """The sweep's path; an unnamed sweep's candidates are RECIPE-tune, RECIPE-tune-2, RECIPE-tune-3, ..."""
    if "://" in base.run.storage:
        raise UsageError(
            f"run.storage: {base.run.storage} is on an object store; a sweep needs a folder that all nodes share, "
            "such as a network mount"
        )
    storage = Path(base.run.storage).expanduser().resolve()
    return (storage / name for name in candidate_names(f"{base.recipe}-tune", base.run.name))
