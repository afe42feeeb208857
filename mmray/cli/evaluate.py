"""`mmray evaluate`: metrics of a run's checkpoint or of pretrained weights on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from tyro.conf import arg

from mmray import api
from mmray.cli.args import JsonFile, command, flag_values, write_json
from mmray.config import Config, EvalSettings
from mmray.config.model import AnyModel
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import scores_tables
from mmray.errors import UsageError, require_positive

SETTINGS_HELP = (
    "Metrics to compute; the default of each setting is the run's value, of `limit` only for the "
    "run's held-out rows."
)
Settings = Annotated[EvalSettings, arg(help=SETTINGS_HELP)]
DEFAULTS = EvalSettings()


def evaluate(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Evaluate a checkpoint of a run, or pretrained weights; print the metrics."""
    if weights := flag_values("--weights", argv):
        from mmray.training.evaluate_export import pretrained_config

        config = pretrained_config(weights[-1])
        saved = config.evaluate.outside_run("")
        given = evaluate_weights.parse(argv, model=config.model, evaluate=saved)
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


@command(api.evaluate)
def evaluate_run(
    console: ConsoleReporter,
    *,
    evaluate: Settings = DEFAULTS,
    json: JsonFile = None,
    **arguments: Any,
) -> None:
    """Evaluate a run; print the metrics."""
    _show(api.evaluate(**arguments, reporter=console, **dict(evaluate)), json, console)


def _show(metrics: dict[str, float], json_file: str | None, console: ConsoleReporter) -> None:
    console.print(*scores_tables(metrics))
    write_json(json_file, {"metrics": metrics})


@command(api.evaluate, "evaluate")
def evaluate_weights(
    console: ConsoleReporter,
    run: Config,
    *,
    weights: str,
    model: AnyModel,
    evaluate: Settings = DEFAULTS,
    json: JsonFile = None,
    **arguments: Any,
) -> None:
    """Evaluate pretrained weights with changed settings; print the metrics."""
    require_positive(workers=arguments["workers"])
    if arguments["data"] is None:
        raise UsageError("--weights needs --data: a prepared set or a raw source to evaluate on")
    changed = run.replace(model=model)
    _show(api.evaluate(changed, **arguments, reporter=console, **dict(evaluate)), json, console)
