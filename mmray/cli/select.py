"""`mmray select`: a smaller prepared set of some rows of a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmray import api
from mmray.cli.args import OutPath, SetPath, parse_args
from mmray.console.reporter import ConsoleReporter, shell_path


@dataclass(frozen=True)
class SelectCommand:
    """Write a smaller prepared set of some rows of a set; images are copied, not decoded."""

    source: SetPath
    """Folder of the prepared set."""
    out: OutPath
    """Folder of the smaller set; it must be empty."""
    where: str | None = None
    """Rows for which this holds of columns of the set: `clip_score > 0.25 and width >= 200`."""
    deduplicate: str | None = None
    """semantic=0.95: leave out images whose embedding has this cosine, or more, to a kept one."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise this machine."""


def select(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Write a smaller prepared set of some rows of a set.

    Args:
        argv: arguments after the command, such as
            `["prepared/my", "prepared/good", "--where", "clip_score > 0.25"]`.
        console: receives messages and progress.

    Returns:
        Exit status 0.

    Raises:
        MmrayError: an argument is invalid or the set cannot be used; has the exit status.
    """
    command = parse_args(SelectCommand, argv, "mmray select")
    api.select(**vars(command), reporter=console)
    console.log(f"mmray train --data.train {shell_path(command.out)}", "next")
    return 0
