"""`mmray prepare`: rows of a source to a prepared set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from mmray.cli.console import Screen
from mmray.cli.parse import STYLE
from mmray.cli.reporter import Reporter
from mmray.config import Cluster, Prepare


@dataclass(frozen=True)
class PrepareCommand:
    """Check, clean and pack image-text rows: done once, used by every run."""

    source: Positional[str]
    """JSON lines, CSV, TSV, Parquet, WebDataset tars, COCO's JSON, a folder for each class, images beside texts,
    images.txt,captions.txt, or a saved Hugging Face dataset: a file, or a folder of them; what it is, is found out."""
    out: Positional[str]
    """Folder of the prepared set; prepared again, it goes on where it was and takes only new rows."""
    settings: OmitArgPrefixes[Prepare] = field(default_factory=Prepare)
    address: str | None = None
    """Ray address; none: RAY_ADDRESS where it is set, else this machine."""


def prepare(argv: Sequence[str], screen: Screen) -> int:
    """mmray prepare SOURCE OUT [--max-bad-fraction 0.01] [--image-side 256] [--holdout 0.1] ..."""
    command = tyro.cli(PrepareCommand, args=list(argv), prog="mmray prepare", config=STYLE)
    from mmray.cluster.join import joined
    from mmray.data.prepare import prepare as prepare_rows

    began_s = time.monotonic()
    with joined(Cluster(address=command.address)), screen.work("starting Ray"):
        reporter = Reporter(screen)
        manifest = prepare_rows(command.source, command.out, command.settings, reporter.preparing, reporter.note)
    splits = ", ".join(f"{name or 'no split'} {rows:,}" for name, rows in sorted(manifest.splits.items()))
    screen.note(f"{manifest.num_read:,} rows read in {time.monotonic() - began_s:.0f} s", "read")
    screen.note(f"{manifest.num_rows:,} rows ({splits}) in {command.out}", "prepared")
    screen.note(
        f"{manifest.num_quarantined:,} rows, each with its reason in {command.out}/quarantine.jsonl", "set aside"
    )
    screen.note(f"mmray train --data.train {command.out}", "next")
    return 0
