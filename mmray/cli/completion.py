"""Shell completion by tyro for all commands: a parser that is used only to print the script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import arg, subcommand

from mmray.cli import COMMANDS
from mmray.cli.args import REGISTRY, STYLE, Command
from mmray.cli.bench import BENCHES
from mmray.cli.evaluate import evaluate_run
from mmray.cli.export import export_run
from mmray.cli.submit import submit_words
from mmray.cli.tune import tune_recipe
from mmray.config import Config, recipes

SAMPLE = recipes.sample()


def _train(settings: Annotated[Config, arg(name="")] = SAMPLE) -> None:
    """Train a recipe."""


def parsers() -> dict[str, Any]:
    """Return what tyro parses for each command, by name."""
    listed = [each for each in COMMANDS.values() if isinstance(each, Command)]
    listed += [evaluate_run, export_run, submit_words]
    benches = [
        Annotated[Any, subcommand(name, constructor=each.parameters())]
        for name, each in BENCHES.items()
    ]
    return {
        "train": _train,
        "tune": tune_recipe.parameters(settings=SAMPLE),
        "bench": reduce(or_, benches),
        **{each.__name__: each.parameters() for each in listed},
    }


def print_completion(argv: Sequence[str]) -> NoReturn:
    """Print a completion script for a shell, and exit with code 0.

    Args:
        argv: `--tyro-print-completion` and the name of the shell: bash, zsh or tcsh.

    Raises:
        SystemExit: always.
    """
    tyro.extras.subcommand_cli_from_dict(
        parsers(),
        prog="mmray",
        args=list(argv),
        config=(*STYLE, tyro.conf.OmitSubcommandPrefixes),
        registry=REGISTRY,
    )
    raise SystemExit(0)
