"""A run's folder: its name, its files, and whether a command starts it, goes on with it, or must not touch it.

runs/NAME/  config.yaml  data.json  environment.json  tokenizer.json  metrics.jsonl  events.*
            quarantine.jsonl  checkpoints/step-N/  examples.json  result.json  report.html
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import yaml

from mmray.config import Config, to_yaml
from mmray.errors import UsageError
from mmray.machine import cores
from mmray.storage import lease
from mmray.storage.file_ops import write_whole
from mmray.storage.remote_path import Folder, folder_at
from mmray.train.continuation import forbidden_changes

MADE_FIRST = (lease.FOLDER, "checkpoints", "tokenizer.json", "data.json", "environment.json")  # before config.yaml
TOLD_CHANGES = 3  # of an earlier run that is passed over; the rest are counted
PACKAGES = ("mmray", "ray", "torch", "torchvision", "transformers", "pyarrow", "pillow", "numpy")


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    path: Folder

    @property
    def checkpoints(self) -> Folder:
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        write_whole(self.path / name, text)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else None


@dataclass(frozen=True)
class Found:
    """What lies at a run's path already."""

    finished_steps: int | None  # of a finished run
    changes: list[str]  # settings (or data) that differ in a way a continuation may not

    def why_not(self) -> str:
        """Why an unnamed run does not go on with it."""
        if not self.changes:
            return f"has finished its {self.finished_steps or 0:,} steps"
        more = f", and {len(self.changes) - TOLD_CHANGES:,} more" if len(self.changes) > TOLD_CHANGES else ""
        return "is another run: " + ", ".join(self.changes[:TOLD_CHANGES]) + more


@dataclass(frozen=True)
class Decision:
    """`start` a new folder, `resume` what is there, or `done`: nothing is left to train."""

    action: Literal["start", "resume", "done"]
    path: Folder
    passed: tuple[str, ...] = ()  # earlier runs that an unnamed one does not go on with, each with its reason


def find(path: Folder, config: Config, data: dict[str, Any]) -> Found | None:
    """What a run of `config` on `data` would find at `path`; None when there is no run."""
    if not (path / "config.yaml").exists():
        if path.exists() and any(file.name not in MADE_FIRST for file in path.iterdir()):
            raise UsageError(f"{path} exists and is not a run of mmray; choose another --run.name")
        return None
    run = RunDir(path)
    before = yaml.safe_load((path / "config.yaml").read_text())
    changes = forbidden_changes(before, config.model_dump(mode="json", by_alias=True))
    old = run.read_json("data.json") or {}
    changes += [f"data {key}: {old.get(key)!r} -> {data[key]!r}" for key in sorted(data) if old.get(key) != data[key]]
    result = run.read_json("result.json") or {}
    return Found(result.get("steps") if result.get("status") == "finished" else None, changes)


def decide(config: Config, data: dict[str, Any], steps: int) -> Decision:
    """Where this command trains. A named run is continued or refused; an unnamed one takes the next free name.

    Raises UsageError where going on would make another run of it, with the settings that differ.
    """
    mode, named = config.run.resume, config.run.name is not None
    passed: list[str] = []
    for path in paths(config):
        found = find(path, config, data)
        if found is None:
            if mode == "must":
                raise UsageError(f"--run.resume must: there is no run at {path}")
            return Decision("start", path, tuple(passed))
        if mode == "never":
            if named:
                raise UsageError(f"{path} exists; choose another --run.name, or go on with --run.resume auto")
            continue
        if found.changes and (named or mode == "must"):
            raise UsageError(
                f"{path} was run with other settings:\n  " + "\n  ".join(found.changes) + "\n"
                "Going on would make another run of it: choose another --run.name, or set these back."
            )
        finished = found.finished_steps is not None and found.finished_steps >= steps
        if found.changes or (finished and not named and mode == "auto"):
            passed.append(f"{path} {found.why_not()}")
            continue
        return Decision("done" if finished else "resume", path, tuple(passed))
    raise AssertionError("the names never end")


def paths(config: Config) -> Iterator[Folder]:
    """The run's path; an unnamed run's candidates are RECIPE, RECIPE-2, RECIPE-3, ..."""
    storage = folder_at(config.run.storage)
    return (storage / name for name in names(config.recipe, config.run.name))


def names(stem: str, named: str | None) -> Iterator[str]:
    """The name that was given, each time; without one STEM, STEM-2, STEM-3, ..."""
    if named is not None:
        return itertools.repeat(named)
    return itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))


def create(path: Folder, config: Config, data: dict[str, Any], tokenizer_json: str) -> RunDir:
    """The folder with what a run is made of; config.yaml comes last, so that a half-made folder is no run."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        run = RunDir(path)
        run.checkpoints.mkdir(exist_ok=True)
        run.write("tokenizer.json", tokenizer_json)
        run.write_json("data.json", data)
        run.write_json("environment.json", environment())
        run.write("config.yaml", to_yaml(config))
    except OSError as error:
        raise UsageError(f"cannot write the run's folder {path}: {error}; choose another --run.storage") from error
    return run


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": cores(),
        "packages": {name: version(name) for name in PACKAGES},
    }
