"""`mmray evaluate`: metrics of a run's checkpoint or of pretrained weights on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from tyro.conf import arg

from mmray import api
from mmray.cli.args import JsonFile, command, write_json
from mmray.cli.lines import Line, flag_names, read_weights
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


def read_line(words: Sequence[str]) -> Line:
    """Read a line, with the names of its flags."""
    line = read_weights(words)
    return replace(line, given=line.given | {"flags": flag_names(words)})


@command(api.evaluate, read_line)
def evaluate(
    console: ConsoleReporter,
    run: api.ModelPath,
    weights: str,
    model: AnyModel | None,
    flags: set[str],
    evaluate: Settings = DEFAULTS,
    json: JsonFile = None,
    **arguments: Any,
) -> None:
    """Evaluate a checkpoint of a run, or pretrained weights; print the metrics."""
    require_positive(workers=arguments["workers"])
    if isinstance(run, Config):
        if arguments["data"] is None:
            raise UsageError(
                "--weights needs --data: a prepared set or a raw source to evaluate on"
            )
        run = run.replace(model=model)
    changed = {name: value for name, value in dict(evaluate).items() if f"evaluate.{name}" in flags}
    metrics = api.evaluate(run, **arguments, reporter=console, **changed)
    console.print(*scores_tables(metrics))
    write_json(json, {"metrics": metrics})
