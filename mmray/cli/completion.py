"""Shell completion by tyro for all commands: a parser that is used only to print the script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import subcommand

from mmray.cli import COMMANDS
from mmray.cli.args import REGISTRY, STYLE, Command
from mmray.cli.bench import BENCHES
from mmray.errors import UsageError


def parsers() -> dict[str, Any]:
    """Return what tyro parses for each command, by name."""
    benches = [
        Annotated[Any, subcommand(name, constructor=each.parser(each.read(())))]
        for name, each in BENCHES.items()
    ]
    commands = [each for each in COMMANDS.values() if isinstance(each, Command)]
    return {
        "bench": reduce(or_, benches),
        **{each.__name__: each.parser(each.read(())) for each in commands},
    }


def print_completion(argv: Sequence[str]) -> NoReturn:
    """Print a completion script for a shell, and exit with code 0.

    Args:
        argv: `--tyro-print-completion` and the name of the shell: bash, zsh or tcsh.

    Raises:
        SystemExit: always.
        UsageError: the shell needs a package that is not installed.
    """
    try:
        tyro.extras.subcommand_cli_from_dict(
            parsers(),
            prog="mmray",
            args=list(argv),
            config=(*STYLE, tyro.conf.OmitSubcommandPrefixes),
            registry=REGISTRY,
        )
    except ImportError as error:  # shtab, for tcsh
        raise UsageError(str(error)) from None
    raise SystemExit(0)
