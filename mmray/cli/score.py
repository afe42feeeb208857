"""`mmray score`: similarity of image and caption of each row of a prepared set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmray import api
from mmray.cli.args import SetPath, parse_args
from mmray.console.reporter import ConsoleReporter, shell_path


@dataclass(frozen=True)
class ScoreCommand:
    """Write the cosine of image and caption of each row as a column of a prepared set."""

    data: SetPath
    """Folder of the prepared set; the same command again resumes, or scores new rows."""
    weights: str
    """A run; or a folder saved by transformers, a hub name, or an open_clip checkpoint."""
    name: str = "clip_score"
    """Name of the column, for data.where."""
    embeddings: bool = False
    """Also write the embeddings of the images, for `mmray select --deduplicate semantic=0.95`."""
    captions: str | None = None
    """Column of the captions to use, if the set has several; None: the first."""
    batch: int = 128
    """Rows that are embedded at a time."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise this machine."""


def score(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Write the cosine of image and caption of each row as a column of a prepared set.

    Args:
        argv: arguments after the command, such as `["prepared/my", "--weights", "runs/clip"]`.
        console: receives messages and progress.

    Returns:
        Exit status 0.

    Raises:
        MmrayError: an argument is invalid or the set cannot be scored; has the exit status.
    """
    command = parse_args(ScoreCommand, argv, "mmray score")
    api.score(**vars(command), reporter=console)
    where = f"--data.where '{command.name} > 0.25'"
    console.log(f"mmray train --data.train {shell_path(command.data)} {where}", "next")
    return 0
