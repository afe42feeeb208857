"""`mmray evaluate`: metrics of a run's checkpoint or of pretrained weights on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmray import api
from mmray.cli.args import RunPath, flag_values, parse_args, require_positive, write_json
from mmray.config import Config, EvalSettings
from mmray.config.model import AnyModel
from mmray.config.model_kinds import TwoTower
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import interpolation_table, scores_tables
from mmray.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class _Options:
    split: str | None = None
    """Split of the set; None: data.eval_split of the run, or `test` of another set."""
    where: str | None = None
    """Evaluate on the rows for which this holds of columns of the set: `similarity > 0.3`; None:
    data.eval_where of the run, or all rows of another set."""
    captions: str | None = None
    """Column of the captions to use, if the set has several; None: data.eval_captions of the run,
    or the first."""
    json: str | None = None
    """Write the metrics to this JSON file."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise this machine."""
    workers: int | None = None
    """Number of workers; None: as in training, or as this machine has GPUs; 1 for weights."""
    accelerator: Literal["auto", "gpu", "cpu"] | None = None
    """Device of the workers; None: as in training; auto: GPUs if the cluster has any."""
    evaluate: EvalSettings = field(default_factory=EvalSettings)
    """Metrics to compute; the default of each setting is the run's value, of `limit` only for the
    run's held-out rows."""


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
    interpolate: str | None = None
    """Factors of the trained weights, such as 0,0.25,0.5,0.75,1; the weights that the run started
    with have 1 minus the factor (WiSE-FT). None: the trained weights."""


@dataclass(frozen=True, kw_only=True)
class EvaluateWeightsCommand(_Options):
    """Evaluate pretrained weights without training; the defaults of `--model` come from the
    weights.
    """

    weights: str
    """Folder saved by transformers, a hub name, or an open_clip checkpoint."""
    data: str
    """Prepared set or raw source."""
    storage: str = "runs"
    """Folder for small files of Ray Train, shared by all nodes."""
    model: AnyModel = field(default_factory=TwoTower)


def evaluate(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Evaluate a checkpoint of a run, or pretrained weights, on held-out rows; print the metrics.

    Args:
        argv: arguments after the command, such as `["runs/clip", "--split", "test"]`.
        console: receives messages, progress and tables.

    Returns:
        Exit status 0.

    Raises:
        MmrayError: an argument is invalid or the evaluation failed; has the exit status.
    """
    if weights := flag_values("--weights", argv):
        _evaluate_weights(weights[-1], argv, console)
    else:
        _evaluate_run(argv, console)
    return 0


def parse_evaluate(argv: Sequence[str]) -> EvaluateCommand:
    """Parse `mmray evaluate RUN ...`, with the evaluation settings of the run as defaults.

    Args:
        argv: arguments after the command.

    Returns:
        The arguments by attribute, such as `run`, `data`, `step` and the evaluation settings.

    Raises:
        UsageError: RUN is not a run, or an argument is invalid.
        SystemExit: --help is given, or a flag is unknown or has a value of a wrong type.
    """
    first = parse_args(EvaluateCommand, argv, "mmray evaluate")
    run = first.run
    from mmray.storage.paths import to_path
    from mmray.training.evaluate_export import load_run_config

    saved = load_run_config(to_path(run)).evaluate.outside_run(first.data)
    default = EvaluateCommand(run=run, evaluate=saved)
    command = parse_args(EvaluateCommand, argv, "mmray evaluate", default)
    require_positive(command, "workers")
    return command


def parse_shares(text: str) -> list[float]:
    """Parse the value of `--interpolate`, the factors of the trained weights.

    Args:
        text: Numbers separated by commas, such as `0,0.5,1`.

    Returns:
        The numbers in the given order, which may be outside of 0 to 1.

    Raises:
        UsageError: A part is no number, or is given twice.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or len(set(shares)) < len(shares):
        raise UsageError(
            f"--interpolate {text}: write factors from 0 (the start) to 1 (the end), each once, "
            "such as 0,0.25,0.5,0.75,1"
        )
    return shares


def _evaluate_run(argv: Sequence[str], console: ConsoleReporter) -> None:
    """Evaluate a run, or several interpolations of its weights; print the metrics."""
    command = parse_evaluate(argv)
    shares = [1.0] if command.interpolate is None else parse_shares(command.interpolate)
    from mmray.storage.paths import to_path
    from mmray.training.evaluate_export import evaluate_model

    with console.show_progress("evaluating"):
        results = evaluate_model(
            to_path(command.run),
            command.data,
            command.split,
            command.step,
            command.address,
            console,
            command.evaluate,
            command.where,
            command.captions,
            shares,
            workers=command.workers,
            accelerator=command.accelerator,
        )
    if command.interpolate is None:
        _show(results[0], command.json, console)
        return
    by_share = dict(zip(shares, results, strict=True))
    console.print(interpolation_table(by_share))
    rows = [{"share": share, "metrics": metrics} for share, metrics in by_share.items()]
    write_json(command.json, {"interpolate": rows})


def _show(metrics: dict[str, float], json_file: str | None, console: ConsoleReporter) -> None:
    console.print(*scores_tables(metrics))
    write_json(json_file, {"metrics": metrics})


def _evaluate_weights(weights: str, argv: Sequence[str], console: ConsoleReporter) -> None:
    """Evaluate pretrained weights; print the metrics."""
    command, config = parse_evaluate_weights(weights, argv)
    metrics = api.evaluate_weights(
        config,
        command.data,
        split=command.split,
        where=command.where,
        captions=command.captions,
        address=command.address,
        workers=command.workers or 1,
        accelerator=command.accelerator,
        storage=command.storage,
        reporter=console,
        **dict(command.evaluate),
    )
    _show(metrics, command.json, console)


def parse_evaluate_weights(
    weights: str, argv: Sequence[str]
) -> tuple[EvaluateWeightsCommand, Config]:
    """Parse `mmray evaluate --weights FILE ...`, with the settings of the weights as defaults.

    Args:
        weights: value of `--weights`: a folder saved by transformers, a hub name, or an open_clip
            checkpoint.
        argv: all arguments after the command, with `--weights`.

    Returns:
        The command, and the config of the weights with the `model` section of the command.

    Raises:
        UsageError: the weights cannot be loaded, or an argument is invalid or missing.
        SystemExit: --help is given, or a flag is unknown or has a value of a wrong type.
    """
    from mmray.training.evaluate_export import pretrained_config

    config = pretrained_config(weights)
    default = EvaluateWeightsCommand(
        weights=weights, data="", model=config.model, evaluate=config.evaluate.outside_run("")
    )
    command = parse_args(EvaluateWeightsCommand, argv, "mmray evaluate", default)
    require_positive(command, "workers")
    if not command.data:
        raise UsageError("--weights needs --data: a prepared set or a raw source to evaluate on")
    return command, config.replace(model=command.model)
