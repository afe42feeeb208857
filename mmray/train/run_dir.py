"""A run's folder (README.md lists its files), and whether a command starts, resumes or refuses it."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import yaml

from mmray.config import Config, flatten, to_yaml
from mmray.errors import UsageError
from mmray.machine import cores
from mmray.storage import lease
from mmray.storage.paths import AnyPath, to_path, write_atomic

# Settings that may change when a run is resumed: they alter neither its rows nor the arithmetic of a step.
_RESUMABLE = {
    "batch": "micro accumulation",
    "data": "workers block_mb cache local_cache local_cache_gb max_bad_rows eval eval_split",
    "train": "steps samples epochs log_every checkpoint_every keep_checkpoints callbacks profile parallel "
    "activation_checkpointing",
}
RESUMABLE_CHANGES = (
    *("recipe", "cluster", "run", "prepare", "evaluate"),
    *(f"{section}.{name}" for section, names in _RESUMABLE.items() for name in names.split()),
)
# Written before config.yaml.
FILES_BEFORE_CONFIG = (lease.FOLDER, "checkpoints", "tokenizer.json", "data.json", "environment.json")
MAX_LISTED_CHANGES = 3
PACKAGES = ("mmray", "ray", "torch", "torchvision", "transformers", "pyarrow", "pillow", "numpy")


def forbidden_changes(
    before: dict[str, Any], after: dict[str, Any], may_change: Sequence[str] = RESUMABLE_CHANGES
) -> list[str]:
    """Lines `setting: old -> new` of differences outside the settings and sections in `may_change`."""
    old, new = flatten(before), flatten(after)
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not any(f"{name}.".startswith(f"{each}.") for each in may_change)
    ]


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    path: AnyPath

    @property
    def checkpoints(self) -> AnyPath:
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        write_atomic(self.path / name, text)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else None


@dataclass(frozen=True)
class RunSelection:
    """`start` a new run, `resume` an existing one, or `done`: it has finished."""

    action: Literal["start", "resume", "done"]
    path: AnyPath
    skipped: tuple[str, ...] = ()  # existing runs that an unnamed run does not resume, each with the reason


def compare_existing_run(path: AnyPath, config: Config, data: dict[str, Any]) -> tuple[list[str], int | None] | None:
    """The run at `path`: changes that may not be made on resume, and its steps if it finished; None without a run."""
    if not (path / "config.yaml").exists():
        if path.exists() and any(file.name not in FILES_BEFORE_CONFIG for file in path.iterdir()):
            raise UsageError(f"{path} exists and is not an mmray run; choose another --run.name")
        return None
    run = RunDir(path)
    before = yaml.safe_load((path / "config.yaml").read_text())
    changes = forbidden_changes(before, config.model_dump(mode="json", by_alias=True))
    old = run.read_json("data.json") or {}
    changes += [f"data {key}: {old.get(key)!r} -> {data[key]!r}" for key in sorted(data) if old.get(key) != data[key]]
    result = run.read_json("result.json") or {}
    return changes, result.get("steps", 0) if result.get("status") == "finished" else None


def select_run(config: Config, data: dict[str, Any], steps: int) -> RunSelection:
    """The folder for this command; raises UsageError with the differences if resuming would change the run."""
    resume, named = config.run.resume, config.run.name is not None
    storage, skipped = to_path(config.run.storage), list[str]()
    for path in (storage / name for name in candidate_names(config.recipe, config.run.name)):
        existing = compare_existing_run(path, config, data)
        if existing is None:
            if resume == "must":
                raise UsageError(f"--run.resume must: no run at {path}")
            return RunSelection("start", path, tuple(skipped))
        if resume == "never":
            if named:
                raise UsageError(f"{path} exists; choose another --run.name, or resume it with --run.resume auto")
            continue
        changes, finished_steps = existing
        finished = finished_steps is not None and finished_steps >= steps
        if not changes and (named or resume != "auto" or not finished):
            return RunSelection("done" if finished else "resume", path, tuple(skipped))
        if changes and (named or resume == "must"):
            raise UsageError(
                f"{path} has other settings:\n  " + "\n  ".join(changes) + "\n"
                "Resuming would change the run: choose another --run.name, or restore these settings."
            )
        num_more = len(changes) - MAX_LISTED_CHANGES
        more = f", and {num_more:,} more" if num_more > 0 else ""
        other = f"has other settings: {', '.join(changes[:MAX_LISTED_CHANGES])}{more}"
        skipped.append(f"{path} {other if changes else f'finished its {finished_steps:,} steps'}")
    raise AssertionError("candidate names are endless")


def candidate_names(stem: str, named: str | None) -> Iterator[str]:
    """`named` repeated; if None, STEM, STEM-2, STEM-3, ..."""
    if named is not None:
        return itertools.repeat(named)
    return itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))


def create_run_dir(path: AnyPath, config: Config, data: dict[str, Any], tokenizer_json: str) -> RunDir:
    """Create the run's folder. config.yaml is written last, so an incomplete folder is not a run."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        run = RunDir(path)
        run.checkpoints.mkdir(exist_ok=True)
        run.write("tokenizer.json", tokenizer_json)
        run.write_json("data.json", data)
        run.write_json("environment.json", collect_environment())
        run.write("config.yaml", to_yaml(config))
    except OSError as error:
        raise UsageError(f"cannot create the run's folder {path}: {error}. Choose another --run.storage") from error
    return run


def collect_environment() -> dict[str, Any]:
    """Versions and machine, for environment.json."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": cores(),
        "packages": {name: version(name) for name in PACKAGES},
    }


HIDDEN = "***"
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # user:password before a host
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SECRET_SETTING = re.compile(r"(^|_)(key|token|secret|password|credential)s?$", re.IGNORECASE)
_MIN_SECRET_CHARS = 6  # shorter values occur in ordinary text


def redact(value: Any) -> Any:
    """The value with every string redacted, and values of settings named like secrets replaced."""
    if isinstance(value, dict):
        return {
            name: HIDDEN if item and isinstance(item, str) and _SECRET_SETTING.search(name) else redact(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """The text without logins in URLs and without values of environment variables named like secrets."""
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _MIN_SECRET_CHARS:
            text = text.replace(value, HIDDEN)
    return text
