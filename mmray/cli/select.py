"""`mmray select`: a smaller prepared set of some rows of a set."""

from __future__ import annotations

from typing import Any

from mmray import api
from mmray.cli.args import command
from mmray.console.reporter import ConsoleReporter, shell_path


@command(api.select)
def select(console: ConsoleReporter, **arguments: Any) -> None:
    api.select(**arguments, reporter=console)
    console.log(f"mmray train --data.train {shell_path(arguments['out'])}", "next")
