"""Names of mmray.console that the modules of `tune` still use."""

from __future__ import annotations

from typing import Any

from mmray.console.reporter import ConsoleReporter, relative_paths, shell_path
from mmray.console.tables import COMPACT, rows_table

__all__ = ["COMPACT", "Reporter", "Terminal", "relative_paths", "rows_table", "shell_path"]


class Terminal(ConsoleReporter):
    note = ConsoleReporter.log
    output = ConsoleReporter.print_raw
    error = ConsoleReporter.print_error
    progress = ConsoleReporter.show_progress
    show = ConsoleReporter.show_above
    update = ConsoleReporter.set_progress


class Reporter:
    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)
