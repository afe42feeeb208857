"""`mmray evaluate`: metrics of a run's checkpoint or of pretrained weights on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmray.cli.args import RunPath, flag_values, parse_args, require_positive, write_json
from mmray.cli.console import Reporter, Terminal, scores_tables
from mmray.config import Config, EvalSettings
from mmray.config.model import AnyModel, TwoTower
from mmray.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class _Options:
    split: str | None = None
    """Split of the set, if it has splits;

    None: the run's data.eval_split, or `test` for another set.
    """
    json: str | None = None
    """Write the metrics to this JSON file."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise this machine."""
    workers: int | None = None
    """Number of workers; None: as many as in training, or as this machine has GPUs; 1 for weights.
    """
    accelerator: Literal["auto", "gpu", "cpu"] | None = None
    """Device of the workers; None: as in training; auto: GPUs if the cluster has any."""
    evaluate: EvalSettings = field(default_factory=EvalSettings)
    """Metrics to compute; the default of each setting is the run's value."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(_Options):
    """Evaluate a run's newest checkpoint: recall@1/5/10 and median rank, or perplexity.

    `--weights FILE --data SET` instead of RUN evaluates pretrained weights.
    """

    run: RunPath
    """Folder (or URI, s3://...) of the run."""
    data: str | None = None
    """Prepared set or raw source; None: the run's held-out rows."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best`; None: the newest valid one."""


@dataclass(frozen=True, kw_only=True)
class EvaluateWeightsCommand(_Options):
    """Evaluate pretrained weights without training; the defaults of `--model` are those of the
    weights.
    """

    weights: str
    """Folder saved by transformers, a hub name, or an open_clip checkpoint."""
    data: str
    """Prepared set or raw source."""
    storage: str = "runs"
    """Folder for small files of Ray Train, shared by all nodes."""
    model: AnyModel = field(default_factory=TwoTower)


def parse_evaluate(argv: Sequence[str]) -> EvaluateCommand:
    """Parse the command line, with the run's own settings as defaults. Raises UsageError."""
    run = parse_args(EvaluateCommand, argv, "mmray evaluate").run
    command = parse_args(
        EvaluateCommand,
        argv,
        "mmray evaluate",
        EvaluateCommand(run=run, evaluate=load_settings(run)),
    )
    require_positive(command, "workers")
    return command


def load_settings(run: str) -> EvalSettings:
    """Return the evaluation settings of a run. Raises UsageError."""
    from mmray.storage.paths import to_path
    from mmray.training.evaluate_export import load_run_config

    return load_run_config(to_path(run)).evaluate.without_interval


def evaluate(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray evaluate RUN | --weights FILE [--data SET] [--split NAME] [--evaluate.classes A B ...]
    [--json FILE]
    """
    if weights := flag_values("--weights", argv):
        from mmray.training.evaluate_export import evaluate_pretrained

        given, config = parse_evaluate_weights(weights[-1], argv)
        metrics = _show(
            lambda reporter: evaluate_pretrained(config, given.data, given.split, reporter),
            terminal,
        )
        write_json(given.json, {"metrics": metrics})
    else:
        command = parse_evaluate(argv)
        write_json(command.json, {"metrics": run_evaluation(command, terminal)})
    return 0


def run_evaluation(command: EvaluateCommand, terminal: Terminal) -> dict[str, float]:
    """Evaluate a run; show and return the metrics. Raises MmrayError."""
    from mmray.storage.paths import to_path
    from mmray.training.evaluate_export import evaluate_run

    cluster: dict[str, Any] = {"workers": command.workers, "accelerator": command.accelerator}

    def call(reporter: Reporter) -> dict[str, float]:
        given = to_path(command.run), command.data, command.split, command.step, command.address
        return evaluate_run(*given, reporter, command.evaluate, **cluster)

    return _show(call, terminal)


def _show(call: Callable[[Reporter], dict[str, float]], terminal: Terminal) -> dict[str, float]:
    with terminal.progress("evaluating"):
        metrics = call(Reporter(terminal))
    terminal.console.print(*scores_tables(metrics))
    return metrics


def parse_evaluate_weights(
    weights: str, argv: Sequence[str]
) -> tuple[EvaluateWeightsCommand, Config]:
    """Return the command line and its config, with the settings of the weights as defaults.

    Raises UsageError.
    """
    from mmray.training.evaluate_export import pretrained_config

    config = pretrained_config(weights)
    own = EvaluateWeightsCommand(
        weights=weights, data="", model=config.model, evaluate=config.evaluate.without_interval
    )
    command = parse_args(EvaluateWeightsCommand, argv, "mmray evaluate", own)
    require_positive(command, "workers")
    if not command.data:
        raise UsageError("--weights needs --data: a prepared set or a raw source to evaluate on")
    config = config.replace(
        model=command.model,
        evaluate=config.evaluate.replace(**dict(command.evaluate)),
        run=config.run.replace(storage=command.storage),
    )
    accelerator = command.accelerator or config.cluster.accelerator
    return command, config.with_cluster(
        address=command.address, workers=command.workers or 1, accelerator=accelerator
    )
