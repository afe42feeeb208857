"""`mmray report`: a run or a sweep as one page to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tyro.conf import Positional

from mmray.cli.args import parsed
from mmray.cli.console import Screen


@dataclass(frozen=True)
class ReportCommand:
    """Write one self-contained HTML page of a run or a sweep; also of one that is under way."""

    run: Positional[str]
    """Folder (or address, s3://...) of the run, or folder of the sweep."""
    out: str | None = None
    """File to write; none: report.html in the folder."""


def report(argv: Sequence[str], screen: Screen) -> int:
    """mmray report RUN [--out FILE]"""
    command = parsed(ReportCommand, argv, "mmray report")
    from mmray.report.write import write_report  # late: Plotly takes a second to import
    from mmray.storage.paths import to_path

    page = write_report(to_path(command.run), None if command.out is None else to_path(command.out))
    screen.note(f"{page} ({page.stat().st_size / 1e6:.1f} MB; opens without a network)", "report")
    return 0
