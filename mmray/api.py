"""mmray from Python, for notebooks and scripts: each function does what the command of its name
does.

Errors are MmrayError; Ctrl-C (interrupting the kernel) stops a run at a checkpoint, as on the
command line. The heavy imports (Ray, torch) are in the functions of mmray.cli.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args, get_type_hints

from mmray.cli.args import require_positive
from mmray.cli.console import Terminal
from mmray.cli.evaluate import EvaluateCommand, load_settings, run_evaluation
from mmray.cli.export import ExportCommand, run_export
from mmray.cli.prepare import PrepareCommand, run_prepare
from mmray.cli.train import run_training
from mmray.cli.tune import TuneCommand, check_no_trials, run_sweep
from mmray.cli.tune_shape import run_probe
from mmray.config import Config, EvalSettings, Prepare, override, recipes
from mmray.config.base import Section
from mmray.config.search_space import build_space
from mmray.errors import UsageError, suggest
from mmray.report.run import RunRecord
from mmray.report.sweep import SweepRecord
from mmray.storage.paths import AnyPath, to_path

if TYPE_CHECKING:
    from mmray.data.store.manifest import Manifest

Settings = Mapping[str, Any] | Section  # {field: value}, or an object of mmray.config


class Sections(TypedDict, total=False):
    """Sections of the config, as in a recipe file;

    `data` may be the training set alone (data.train).
    """

    model: Settings
    objective: Settings
    prepare: Settings
    data: Settings | str | Path
    augment: Settings
    batch: Settings
    optimizer: Settings
    train: Settings
    evaluate: Settings
    cluster: Settings
    run: Settings


class Run:
    """A run in its folder; all values are read from its files, so they are current while it
    trains.
    """

    def __init__(self, folder: str | AnyPath):
        self.path = to_path(folder)
        if not (self.path / "config.yaml").exists():
            raise UsageError(f"{self.path} is not a run: it has no config.yaml")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def result(self) -> dict[str, Any]:
        """Content of result.json: status, steps, scores of the last evaluation, best checkpoint,
        ...
        """
        return RunRecord.read(self.path).result

    @property
    def metrics(self) -> dict[str, Any]:
        """The last logged metrics, with those of the last evaluation without their prefix
        `evaluate/`.
        """
        record = RunRecord.read(self.path)
        last = record.lines[-1] if record.lines else {}
        metrics = {name: value for name, value in last.items() if not name.startswith("evaluate/")}
        return metrics | record.newest("evaluate/")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, for example for pandas.DataFrame."""
        return RunRecord.read(self.path).lines

    def report(self, out: str | AnyPath | None = None) -> AnyPath:
        """Write the HTML page of the run (default: report.html in its folder) and return its
        path.
        """
        from mmray.report.write import write_report  # importing Plotly takes a second

        return write_report(self.path, None if out is None else to_path(out))


def train(recipe: str | Path | Config = "sample", **sections: Unpack[Sections]) -> Run:
    """Train a recipe (a name, a YAML file or a Config) with these settings changed, or resume its
    run.
    """
    return Run(run_training(_override(_load(recipe), sections), Terminal()).path)


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    retry_quarantined: bool = False,
    address: str | None = None,
    wait_for_nodes: bool = False,
    **settings: Any,
) -> Manifest:
    """Validate, deduplicate and pack `source` into the set `out`, with the settings of
    `mmray.config.Prepare`.
    """
    checked = Prepare.model_validate(_plain(settings))
    command = PrepareCommand(
        str(source), str(out), checked, retry_quarantined, address, wait_for_nodes
    )
    return run_prepare(command, Terminal())


def evaluate(
    run: Run | str | AnyPath,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    step: int | Literal["best"] | None = None,
    address: str | None = None,
    workers: int | None = None,
    accelerator: Literal["auto", "gpu", "cpu"] | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Return the metrics of a run's checkpoint on held-out rows;

    `settings` change its section `evaluate`.
    """
    folder = _folder(run)
    command = EvaluateCommand(
        run=folder,
        data=None if data is None else str(data),
        split=split,
        step=step,
        address=address,
        workers=workers,
        accelerator=accelerator,
        evaluate=EvalSettings.model_validate(dict(load_settings(folder)) | settings),
    )
    return run_evaluation(command, Terminal())


def export(
    run: Run | str | AnyPath, out: str | AnyPath, *, step: int | Literal["best"] | None = None
) -> AnyPath:
    """Write a run's model to a folder for `mmray.load` or transformers, and return the folder."""
    return run_export(ExportCommand(_folder(run), str(out), step), Terminal())


def tune(
    recipe: str | Path | Config = "sample",
    *,
    space: Mapping[str, str | Sequence[Any]] | None = None,
    goal: Literal["throughput", "loss", "recall", "time-to-quality", "memory"] = "throughput",
    samples: int | None = None,
    search: Literal["random", "optuna"] = "random",
    scheduler: Literal["halving", "asha", "pbt"] = "halving",
    budget: str | None = None,
    concurrency: int | None = None,
    **sections: Unpack[Sections],
) -> SweepRecord:
    """Find the fastest batch shape, or with another goal compare settings in short runs.

    `space={"batch.global": [512, 1024], "optimizer.lr": "loguniform(1e-5,1e-3)"}` lists the
    settings to compare. `best.yaml` in the folder of the returned sweep is a recipe for `train`.
    """
    from mmray.tuning import trials  # imports numpy

    kinds = get_type_hints(TuneCommand)
    for name, value in {"goal": goal, "search": search, "scheduler": scheduler}.items():
        if value not in (known := get_args(kinds[name])):
            raise UsageError(f"{name}: unknown {name} `{value}`; {suggest(str(value), known)}")
    base = _load(recipe)
    settings = _override(trials.clear_length_and_derived_batch(base, list(space or ())), sections)
    command = TuneCommand(
        settings,
        samples=samples,
        goal=goal,
        search=search,
        scheduler=scheduler,
        budget=budget,
        concurrency=concurrency,
    )
    require_positive(command, "samples", "concurrency")
    recipe_rows, base = base.batch.global_, trials.restore_length(settings, base)
    if trials.is_shape_probe(goal, space or ()):
        check_no_trials(command)
        axes = None if not space else build_space(space, seed=base.train.seed)
        return SweepRecord.read(run_probe(base, axes, Terminal()))
    given = trials.default_axes(base, goal) if space is None else space
    axes = build_space(given, command.num_samples, base.train.seed)
    folder, _ = run_sweep(command, base, axes, recipe_rows, Terminal())
    return SweepRecord.read(folder)


def _load(recipe: str | Path | Config) -> Config:
    return recipe if isinstance(recipe, Config) else recipes.load(str(recipe))


def _override(recipe: Config, sections: Mapping[str, Any]) -> Config:
    given = {name: _plain(value) for name, value in sections.items()}
    if isinstance(given.get("data"), str):
        given["data"] = {"train": given["data"]}
    return override(recipe, given)


def _plain(value: Any) -> Any:
    """Return settings as in a recipe file; `global_` is `global`, which is a keyword of Python."""
    if isinstance(value, Section):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return {
            "global" if name == "global_" else name: _plain(item) for name, item in value.items()
        }
    return str(value) if isinstance(value, Path) else value


def _folder(run: Run | str | AnyPath) -> str:
    return str(run.path if isinstance(run, Run) else run)
