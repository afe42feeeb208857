"""The page at the end of a run or a sweep: drawn where it can be, and never the reason that one fails."""

from __future__ import annotations

from collections.abc import Callable

from mmray.storage.remote_path import Folder


def draw_at_end(folder: Folder, note: Callable[[str, str], None]) -> None:
    """Write the page of `folder`, however its run or sweep ended; that it cannot be drawn is told by `note`."""
    try:
        from mmray.report.write import write_report  # late: Plotly is of no use before

        note(str(write_report(folder)), "report")
    except Exception as error:  # noqa: BLE001 - the weights are there; a picture of them must not cost a user the run
        note(f"not written ({type(error).__name__}: {error}); try `mmray report {folder}`", "report")
