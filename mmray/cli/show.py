"""`mmray show`: an HTML page about a prepared set, and a table of its first random rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import UseAppendAction

from mmray import api
from mmray.cli.args import SetPath, parse_args
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import text_table

MAX_LINES = 8  # rows in the terminal; the page has all


@dataclass(frozen=True)
class ShowCommand:
    """Write a self-contained HTML page about a prepared set: random rows with images, audio, video,
    texts and token counts; histograms; repeated images; quarantined rows.
    """

    prepared: SetPath
    """Folder of the prepared set, or its address (s3://...)."""
    out: str | None = None
    """File to write; None: show.html in the folder of the set."""
    rows: int = 24
    """Number of random rows to show."""
    seed: int = 0
    """Seed of the choice of rows."""
    split: str | None = None
    """Split of the set; None: all rows."""
    tokenizer: str | None = None
    """File, folder or hub name of the tokenizer that counts tokens; None: the one of the set."""
    root: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Folder whose images are read if the set refers to them, such as the folder of its source."""


def show(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Write an HTML page about a prepared set, and print a table of some random rows.

    Args:
        argv: arguments after the command, such as `["prepared/my", "--rows", "50"]`.
        console: receives the table and the path of the page.

    Returns:
        Exit status 0.

    Raises:
        MmrayError: an argument is invalid, or the set cannot be read; has the exit status.
    """
    command = parse_args(ShowCommand, argv, "mmray show")
    record = api.show(**vars(command), reporter=console)
    console.print(text_table(record.table[:MAX_LINES]))
    return 0
