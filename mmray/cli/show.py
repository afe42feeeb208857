"""`mmray show`: an HTML page about a prepared set, and a table of its first random rows."""

from __future__ import annotations

from typing import Any

from mmray import api
from mmray.cli.args import command
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import text_table

MAX_LINES = 8  # rows in the terminal; the page has all


@command(api.show)
def show(console: ConsoleReporter, **arguments: Any) -> None:
    record = api.show(**arguments, reporter=console)
    console.print(text_table(record.table[:MAX_LINES]))
