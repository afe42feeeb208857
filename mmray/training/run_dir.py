"""A run's folder (README.md lists its files), and whether a command starts, resumes or
refuses it.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

import yaml

from mmray.config import Config, Model, Run, Vlm, flatten, to_yaml
from mmray.config.data import STORED_SHUFFLE
from mmray.data.vlm.processor import read_processor_files
from mmray.engine.batch import BatchShape
from mmray.errors import UsageError
from mmray.machine import cores
from mmray.storage import lease
from mmray.storage.paths import AnyPath, list_names, read_lines, remove_tree, to_path, write_atomic
from mmray.version import VERSION

# Settings and sections that may change on resume: they change neither the sample order nor, except
# as README.md lists, the steps.
RESUMABLE_CHANGES = (
    "recipe",
    "cluster",
    "run",
    "prepare",
    "evaluate",
    "batch.micro",
    "batch.accumulation",
    "data.workers",
    "data.block_mb",
    "data.cache",
    "data.local_cache",
    "data.local_cache_gb",
    "data.eval",
    "data.eval_split",
    "data.eval_where",
    "data.eval_captions",
    "train.steps",
    "train.samples",
    "train.epochs",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.callbacks",
    "train.profile",
    "train.parallel",
    "train.activation_checkpointing",
    "train.compile",
    "train.float8",
)
SMALLER_BATCH = "smaller_batch.json"  # batch shapes by number of workers
PROCESSOR = "processor"  # folder with copies of the files of model.weights, without the weights
FILES_BEFORE_CONFIG = (
    lease.FOLDER,
    "checkpoints",
    "tokenizer.json",
    "data.json",
    "environment.json",
    PROCESSOR,
)
MAX_LISTED_CHANGES = 3
PACKAGES = ("ray", "torch", "torchvision", "transformers", "pyarrow", "pillow", "numpy")


def has_other_files(path: AnyPath, names: Sequence[str]) -> bool:
    """Return whether a folder has other entries than expected."""
    return path.exists() and any(
        file.name not in names and file.name[0] != "." for file in path.iterdir()
    )


def forbidden_changes(
    before: dict[str, Any], after: dict[str, Any], may_change: Sequence[str] = RESUMABLE_CHANGES
) -> list[str]:
    """Return a line `setting: old -> new` for each difference between two configs outside the
    settings and sections that may change.
    """
    old = flatten(before)
    new = flatten(after)
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
        and not any(f"{name}.".startswith(f"{each}.") for each in may_change)
    ]


@dataclass(frozen=True)
class RunDir:
    """The files of one run; they are written atomically."""

    path: AnyPath

    @property
    def checkpoints(self) -> AnyPath:
        """Folder in which the run's checkpoints are, such as `checkpoints/step-100`."""
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """Write a text file."""
        write_atomic(self.path / name, text)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file."""
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file; empty if it does not exist."""
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else {}

    def save_smaller_batch(self, shape: BatchShape) -> None:
        """Store the shape with which attempts of as many workers start after memory ran out."""
        shapes = self.read_json(SMALLER_BATCH)
        self.write_json(SMALLER_BATCH, shapes | {str(shape.world_size): asdict(shape)})

    def smaller_batch(self, shape: BatchShape) -> BatchShape:
        """Return the stored shape for as many workers if its micro-batch is smaller."""
        stored = self.read_json(SMALLER_BATCH).get(str(shape.world_size), asdict(shape))
        return min(shape, BatchShape(**stored), key=lambda each: each.micro_batch_size)


@dataclass(frozen=True)
class RunSelection:
    """Whether a command starts or resumes a run, and in which folder.

    Args:
        action: `start` a new run, `resume` an existing one, or `done`: it has finished.
        skipped: A text for each existing folder that a run without a name does not resume, such as
            `runs/clip has finished`.
    """

    action: Literal["start", "resume", "done"]
    path: AnyPath
    skipped: tuple[str, ...] = ()


def select_run(
    config: Config, data: dict[str, Any], steps: int, keep_shuffle: bool = False
) -> RunSelection:
    """Choose the folder of a new run, or of the one that this command resumes.

    Args:
        data: Content of data.json, the `data_identity` of a ResolvedRun.

    Raises:
        UsageError: Resuming would change the run. The message lists the differences.
    """
    return select_folder(
        config.run,
        config.recipe,
        lambda path: _compare_run(path, config, data, steps, keep_shuffle),
    )


def _compare_run(
    path: AnyPath, config: Config, data: dict[str, Any], steps: int, keep_shuffle: bool
) -> tuple[list[str], bool] | None:
    """Return the settings that prevent resuming the run in a folder, and whether it has finished;
    None if the folder has no run, or one of other settings that ended before it stored a step.
    Raises UsageError if it has other files.
    """
    if not (path / "config.yaml").exists():
        if has_other_files(path, FILES_BEFORE_CONFIG):
            raise UsageError(f"{path} exists and is not an mmray run; choose another --run.name")
        return None
    run = RunDir(path)
    before = _with_defaults(_read_config(path))
    schedules = (flatten(before).get("optimizer.schedule"), config.optimizer.schedule)
    may_change: tuple[str, ...] = ()
    if schedules == ("constant", "cooldown"):  # they are equal until the rate decays
        may_change += ("optimizer.schedule",)
    if keep_shuffle and re.fullmatch(STORED_SHUFFLE, stored_shuffle(path)):
        may_change += ("data.shuffle_blocks",)
    old = {"order": 1} | run.read_json("data.json")  # of versions that did not name the order
    # The same rows at another address: the set or the project has moved.
    if all(old.get(key) == new for key, new in data.items() if key != "train"):
        may_change += ("data.train",)
        old |= {"train": data["train"]}
    changes = forbidden_changes(before, config.to_json(), RESUMABLE_CHANGES + may_change)
    changes += [
        f"data {key}: {old.get(key)!r} -> {new!r}"
        for key, new in data.items()
        if old.get(key) != new
    ]
    if before["model"].get("weights", "none") == config.model.initial_weights:
        changes += _changed_processor_files(path, config.model)
    if changes and not has_steps(path) and not lease.is_live(path):
        return None
    result = run.read_json("result.json")
    return changes, result.get("status") == "finished" and result["steps"] >= steps


def _read_config(path: AnyPath) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((path / "config.yaml").read_text())
    return values


def _with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with the defaults of those that its version did not have."""
    try:
        return Config.model_validate(saved).to_json()
    except UsageError:  # a setting was removed since: the comparison names it
        return saved


def has_steps(path: AnyPath) -> bool:
    """Return whether the run in a folder has a checkpoint or a logged step."""
    return bool(list_names(RunDir(path).checkpoints)) or any(read_lines(path / "metrics.jsonl"))


def remove_start(path: AnyPath) -> None:
    """Remove what an earlier command without a step left that depends on its settings."""
    for name in (SMALLER_BATCH, "result.json", "config.yaml"):
        (path / name).unlink(missing_ok=True)


def _changed_processor_files(path: AnyPath, model: Model) -> list[str]:
    """Return a text for each file of `model.weights` that is not as when the run in a folder
    started: its config, and of the tokenizer, chat template and processors.
    """
    folder = path / PROCESSOR
    if not isinstance(model, Vlm) or not folder.exists():
        return []
    saved = {file.name: file.read_bytes() for file in folder.iterdir()}
    now = read_processor_files(model.weights)
    if not now:  # loading the model explains it
        return []
    return [
        f"model.weights: {name} in {model.weights} has changed; "
        + (f"copy {folder / name} there" if name in saved else "remove it")
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]


def describe_unstored_processor(path: AnyPath, model: Model) -> str | None:
    """Return a warning for a run of an earlier version, which stored no copy of these files."""
    if not isinstance(model, Vlm) or (path / PROCESSOR).exists():
        return None
    return (
        f"{path} has no copy of the tokenizer, chat template and processors that it started with: "
        f"those of {model.weights} are used, and not compared"
    )


def describe_earlier_version(path: AnyPath, config: Config) -> list[str]:
    """Return warnings for a run of an earlier version, which lacks settings or files."""
    saved = _read_config(path)
    added = flatten(_with_defaults(saved)).keys() - flatten(saved).keys()
    text = f"{path} is of an earlier version without {', '.join(sorted(added))}: defaults are used"
    unstored = describe_unstored_processor(path, config.model)
    return ([text] if added else []) + ([unstored] if unstored else [])


def check_processor(path: AnyPath, model: Model) -> None:
    """Raise UsageError if tokenizer, chat template or processors of a run have changed."""
    if changes := _changed_processor_files(path, model):
        raise UsageError("\n".join([f"{path} was trained with other files:", *changes]))


def stored_shuffle(path: AnyPath) -> str:
    """Return `data.shuffle_blocks` of an existing run, such as `8x1400x16` or `1x1` (full)."""
    return str(flatten(_read_config(path))["data.shuffle_blocks"])


def select_folder(
    run: Run,
    stem: str,
    inspect: Callable[[AnyPath], tuple[list[str], bool] | None],
    kind: str = "run",
) -> RunSelection:
    """Choose the folder of a run or sweep in `run.storage`.

    Args:
        stem: Without `run.name`, the first suitable folder of STEM, STEM-2, STEM-3, ... is used.
        inspect: Called with a folder. Returns the settings that prevent resuming the run or sweep
            in it (texts such as `train.seed: 0 -> 1`), and whether it has finished; None if there
            is none in the folder.
        kind: `run` or `sweep`, for messages.

    Raises:
        UsageError: The folder of `run.name` cannot be used as `run.resume` demands.
    """
    storage = to_path(run.storage)
    skipped: list[str] = []
    for number in itertools.count(1):
        path = storage / (run.name or (stem if number == 1 else f"{stem}-{number}"))
        existing = inspect(path)
        if existing is None:
            if run.resume == "must":
                raise UsageError(
                    f"--run.resume must: no {kind} at {path}; start one with --run.resume auto"
                )
            return RunSelection("start", path, tuple(skipped))
        if run.resume == "never":
            if run.name is not None:
                raise UsageError(
                    f"{path} exists; choose another --run.name, or resume it with --run.resume auto"
                )
            continue
        changes, finished = existing
        if not changes and (run.name is not None or run.resume == "must" or not finished):
            return RunSelection("done" if finished else "resume", path, tuple(skipped))
        if changes and (run.name is not None or run.resume == "must"):
            raise UsageError(
                f"{path} has other settings:\n  " + "\n  ".join(changes) + "\n"
                f"Resuming would change the {kind}: choose another --run.name, or restore these "
                "settings."
            )
        more = ", ..." if len(changes) > MAX_LISTED_CHANGES else ""
        other = f"has other settings: {', '.join(changes[:MAX_LISTED_CHANGES])}{more}"
        skipped.append(f"{path} {other if changes else 'has finished'}")
    raise AssertionError("unreachable")


def write_run_files(
    path: AnyPath, config: Config, data: dict[str, Any], tokenizer_json: str
) -> RunDir:
    """Create the run's folder, or update it on resume.

    config.yaml is written last, because a folder without it is not a run.

    Args:
        data: Content of data.json, the `data_identity` of a ResolvedRun.

    Raises:
        UsageError: The folder is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        run = RunDir(path)
        run.checkpoints.mkdir(exist_ok=True)
        processor = path / PROCESSOR
        if not (path / "config.yaml").exists():
            remove_tree(processor)  # of a start that failed
        if isinstance(config.model, Vlm) and not processor.exists():
            processor.mkdir()
            for name, content in read_processor_files(config.model.weights).items():
                write_atomic(processor / name, content)
        run.write("tokenizer.json", tokenizer_json)
        run.write_json("data.json", data)
        run.write_json("environment.json", collect_environment())
        # The supervisor adds to the counts of an earlier command.
        earlier = run.read_json("result.json")
        if earlier:
            run.write_json("result.json", earlier | {"status": "unfinished"})
        run.write("config.yaml", to_yaml(config))
    except OSError as error:
        raise UsageError(
            f"cannot write the run's folder {path}: {error}. Choose another --run.storage"
        ) from error
    return run


def collect_environment() -> dict[str, Any]:
    """Return the content of environment.json: versions, platform and cores."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": cores(),
        "packages": {"mmray": VERSION} | {name: version(name) for name in PACKAGES},
    }


HIDDEN = "***"
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # user:password before a host
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SECRET_SETTING = re.compile(r"(^|_)(key|token|secret|password|credential)s?$", re.IGNORECASE)
_MIN_SECRET_CHARS = 6  # shorter values occur in ordinary text


def redact(value: object) -> Any:
    """Replace secrets in settings by ***.

    Args:
        value: A value of JSON, such as the settings of a run. In strings, logins in URLs and the
            values of secret environment variables are replaced; texts of settings named like
            secrets, such as `api_key`, are replaced completely.

    Returns:
        A copy; tuples become lists.
    """
    if isinstance(value, dict):
        return {
            name: HIDDEN
            if item and isinstance(item, str) and _SECRET_SETTING.search(name)
            else redact(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Replace logins in URLs and values of secret environment variables in a text by ***.

    Variables are secret if their name has a word such as KEY, TOKEN or PASSWORD, and their value
    has at least 6 characters.
    """
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _MIN_SECRET_CHARS:
            text = text.replace(value, HIDDEN)
    return text
