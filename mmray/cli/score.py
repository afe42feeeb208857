"""`mmray score`: similarity of image and caption of each row of a prepared set."""

from __future__ import annotations

from typing import Any

from mmray import api
from mmray.cli.args import command
from mmray.console.reporter import ConsoleReporter, shell_path


@command(api.score)
def score(console: ConsoleReporter, **arguments: Any) -> None:
    """Write the column, and print how to select rows by it."""
    api.score(**arguments, reporter=console)
    where = f"--data.where '{arguments['name']} > 0.25'"
    console.log(f"mmray train --data.train {shell_path(arguments['data'])} {where}", "next")
