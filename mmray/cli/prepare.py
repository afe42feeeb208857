"""`mmray prepare`: convert raw rows to a prepared set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes

from mmray import api
from mmray.cli.args import OutPath, SourcePath, parse_args
from mmray.config import Prepare
from mmray.console.reporter import ConsoleReporter, shell_path

if TYPE_CHECKING:
    from mmray.data.store.manifest import Manifest


@dataclass(frozen=True)
class PrepareCommand:
    """Validate, deduplicate and pack image-text rows into a set that any run can use."""

    source: SourcePath
    """JSON lines, CSV, TSV, Parquet, tars, COCO, folders of images, or a saved dataset."""
    out: OutPath
    """Folder of the prepared set; the same command again resumes, or adds new rows."""
    settings: OmitArgPrefixes[Prepare] = field(default_factory=Prepare)
    retry_quarantined: bool = False
    """Retry rows that could not be read or decoded, with the other rows of their shards."""
    dry_run: bool = False
    """Print the format, splits, columns and an example, check the first 100 rows, write nothing."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise this machine."""
    wait_for_nodes: bool = False
    """Skip the capacity check and wait for nodes to be added."""
    queue_timeout_s: float = 3600.0
    """Limit for the wait for a free CPU of a cluster, in seconds."""


def prepare(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Convert a raw source of images and texts to a prepared set; with --dry-run only check it.

    Args:
        argv: arguments after the command, such as `["captions.jsonl", "prepared/my"]`.
        console: receives messages and progress.

    Returns:
        Exit status 0.

    Raises:
        MmrayError: an argument is invalid or the source cannot be used; has the exit status.
    """
    command = parse_args(PrepareCommand, argv, "mmray prepare")
    if command.dry_run:
        api.check_source(command.source, reporter=console, **dict(command.settings))
        return 0
    manifest = api.prepare(
        command.source,
        command.out,
        retry_quarantined=command.retry_quarantined,
        address=command.address,
        wait_for_nodes=command.wait_for_nodes,
        queue_timeout_s=command.queue_timeout_s,
        reporter=console,
        **dict(command.settings),
    )
    console.log(_train_command(command.out, manifest), "next")
    return 0


def _train_command(folder: str, manifest: Manifest) -> str:
    """Return the command that trains a recipe for the kind of rows of a set."""
    # Here, because every command imports this module.
    import numpy as np

    from mmray.data.store.prepared_set import PreparedSet
    from mmray.storage.paths import to_path

    command = f"--data.train {shell_path(folder)}"
    (row,) = PreparedSet(to_path(folder), manifest).read_without_references(np.zeros(1, np.int64))
    if row.messages:
        return f"mmray train vlm {command}"
    kinds = " ".join(kinds for counts in manifest.media_kinds.values() for kinds in counts)
    if not kinds:
        return f"mmray train {command}"
    is_sound = "image" not in kinds and "video" not in kinds
    flags = " --model.inputs.frames 0 --objective.kind audio_text" if is_sound else ""
    return f"mmray train sample-av {command}{flags}"
