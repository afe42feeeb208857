"""Shell completion by tyro for all commands: a parser that is used only to print the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import AvoidSubcommands, arg, configure, subcommand

from mmray.cli.args import REGISTRY
from mmray.cli.bench import LoaderCommand, StepCommand
from mmray.cli.doctor import DoctorCommand
from mmray.cli.evaluate import EvaluateCommand
from mmray.cli.export import ExportCommand
from mmray.cli.prepare import PrepareCommand
from mmray.cli.report import ReportCommand
from mmray.cli.runs import RunsCommand
from mmray.cli.score import score
from mmray.cli.select import select
from mmray.cli.show import show
from mmray.cli.submit import LogsCommand, StatusCommand, SubmitCommand
from mmray.cli.tune import TuneCommand
from mmray.config import Config, recipes

SAMPLE = recipes.sample()
TUNE_SAMPLE = TuneCommand(SAMPLE)
PARSED = {
    "prepare": PrepareCommand,
    "show": show.parameters(),
    "evaluate": EvaluateCommand,
    "export": ExportCommand,
    "report": ReportCommand,
    "runs": RunsCommand,
    "score": score.parameters(),
    "select": select.parameters(),
    "doctor": DoctorCommand,
    "submit": SubmitCommand,
    "status": StatusCommand,
    "logs": LogsCommand,
}


@configure(AvoidSubcommands)
def _train(settings: Annotated[Config, arg(name="")] = SAMPLE) -> None:
    """Train a recipe."""


@configure(AvoidSubcommands)
def _tune(command: Annotated[TuneCommand, arg(name="")] = TUNE_SAMPLE) -> None:
    """Search settings."""


def _bench(
    command: Annotated[StepCommand, subcommand("step")]
    | Annotated[LoaderCommand, subcommand("loader")],
) -> None:
    """Run a benchmark."""


def print_completion(argv: Sequence[str]) -> NoReturn:
    """Print a completion script for a shell, and exit with code 0.

    Args:
        argv: `--tyro-print-completion` and the name of the shell: bash, zsh or tcsh.

    Raises:
        SystemExit: always.
    """
    parsers: dict[str, Any] = {"train": _train, "tune": _tune, "bench": _bench, **PARSED}
    config = (tyro.conf.FlagConversionOff, tyro.conf.OmitSubcommandPrefixes)
    tyro.extras.subcommand_cli_from_dict(
        parsers, prog="mmray", args=list(argv), config=config, registry=REGISTRY
    )
    raise SystemExit(0)
