"""`mmray report`: an HTML page about a run or a sweep."""

from __future__ import annotations

from mmray.cli.args import RunPath, command
from mmray.console.reporter import ConsoleReporter


@command()
def report(console: ConsoleReporter, *, run: RunPath, out: str | None = None) -> None:
    """Write a self-contained HTML page about a run or a sweep, finished or not.

    Args:
        run: folder (or address, s3://...) of the run, or folder of the sweep.
        out: file to write; None: report.html in the folder.
    """
    from mmray.report.write import write_report  # importing Plotly takes a second
    from mmray.storage.paths import to_path

    page = write_report(to_path(run), None if out is None else to_path(out))
    console.log(f"{page} ({page.stat().st_size / 1e6:.1f} MB; self-contained)", "report")
