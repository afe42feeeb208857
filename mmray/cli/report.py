"""`mmray report`: an HTML page about a run or a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmray.cli.args import RunPath, parse_args
from mmray.console.reporter import ConsoleReporter


@dataclass(frozen=True)
class ReportCommand:
    """Write a self-contained HTML page about a run or a sweep, finished or not."""

    run: RunPath
    """Folder (or address, s3://...) of the run, or folder of the sweep."""
    out: str | None = None
    """File to write; None: report.html in the folder."""


def report(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Write an HTML page about a run or a sweep, finished or not, and print its path.

    Args:
        argv: arguments after the command, such as `["runs/clip", "--out", "clip.html"]`.
        console: receives the path of the page.

    Returns:
        Exit status 0.

    Raises:
        UsageError: the folder is neither a run nor a sweep, or the page cannot be written.
    """
    command = parse_args(ReportCommand, argv, "mmray report")
    from mmray.report.write import write_report  # importing Plotly takes a second
    from mmray.storage.paths import to_path

    page = write_report(to_path(command.run), None if command.out is None else to_path(command.out))
    console.log(f"{page} ({page.stat().st_size / 1e6:.1f} MB; self-contained)", "report")
    return 0
