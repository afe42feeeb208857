"""`mmray evaluate`: metrics of a run's checkpoint or of pretrained weights on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from tyro.conf import arg

from mmray import api
from mmray.cli.args import JsonFile, RunPath, command, flag_values, write_json
from mmray.config import Config, EvalSettings
from mmray.config.model import AnyModel
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import interpolation_table, scores_tables
from mmray.errors import UsageError, require_positive

SETTINGS_HELP = (
    "Metrics to compute; the default of each setting is the run's value, of `limit` only for the "
    "run's held-out rows."
)
SHARES_HELP = (
    "Factors of the trained weights, such as 0,0.25,0.5,0.75,1; the weights that the run started "
    "with have 1 minus the factor (WiSE-FT). None: the trained weights."
)
Settings = Annotated[EvalSettings, arg(help=SETTINGS_HELP)]
DEFAULTS = EvalSettings()


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
        from mmray.training.evaluate_export import pretrained_config

        config = pretrained_config(weights[-1])
        saved = config.evaluate.outside_run("")
        given = evaluate_weights.parse(argv, data="", model=config.model, evaluate=saved)
        return evaluate_weights.run(console, config, **given) or 0
    return evaluate_run.run(console, **parse_evaluate(argv)) or 0


def parse_evaluate(argv: Sequence[str]) -> dict[str, Any]:
    """Parse `mmray evaluate RUN ...`, with the evaluation settings of the run as defaults.

    Raises:
        UsageError: RUN is not a run, or an argument is invalid.
        SystemExit: --help is given, or a flag is unknown or has a value of a wrong type.
    """
    first = evaluate_run.parse(argv)
    from mmray.storage.paths import to_path
    from mmray.training.evaluate_export import load_run_config

    saved = load_run_config(to_path(first["run"])).evaluate.outside_run(first["data"])
    arguments = evaluate_run.parse(argv, evaluate=saved)
    require_positive(workers=arguments["workers"])
    return arguments


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


@command(api.evaluate)
def evaluate_run(
    console: ConsoleReporter,
    *,
    run: RunPath,
    data: str | None = None,
    interpolate: Annotated[str | None, arg(help=SHARES_HELP)] = None,
    evaluate: Settings = DEFAULTS,
    json: JsonFile = None,
    **arguments: Any,
) -> None:
    """Evaluate a run, or several interpolations of its weights; print the metrics."""
    shares = [1.0] if interpolate is None else parse_shares(interpolate)
    from mmray.storage.paths import to_path
    from mmray.training.evaluate_export import evaluate_model

    with console.show_progress("evaluating"):
        results = evaluate_model(
            to_path(run),
            data,
            reporter=console,
            settings=evaluate,
            shares=shares,
            **arguments,
        )
    if interpolate is None:
        _show(results[0], json, console)
        return
    by_share = dict(zip(shares, results, strict=True))
    console.print(interpolation_table(by_share))
    rows = [{"share": share, "metrics": metrics} for share, metrics in by_share.items()]
    write_json(json, {"interpolate": rows})


def _show(metrics: dict[str, float], json_file: str | None, console: ConsoleReporter) -> None:
    console.print(*scores_tables(metrics))
    write_json(json_file, {"metrics": metrics})


@command(api.evaluate_weights, "evaluate")
def evaluate_weights(
    console: ConsoleReporter,
    config: Config,
    *,
    weights: str,
    model: AnyModel,
    evaluate: Settings = DEFAULTS,
    json: JsonFile = None,
    **arguments: Any,
) -> None:
    """Evaluate pretrained weights with changed settings; print the metrics."""
    require_positive(workers=arguments["workers"])
    if not arguments["data"]:
        raise UsageError("--weights needs --data: a prepared set or a raw source to evaluate on")
    changed = config.replace(model=model)
    _show(
        api.evaluate_weights(changed, **arguments, reporter=console, **dict(evaluate)),
        json,
        console,
    )
