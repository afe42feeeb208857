"""`mmray prepare`: rows of a source to a prepared set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional

from mmray.cli.args import parsed
from mmray.cli.console import Reporter, Screen
from mmray.config import Cluster, Prepare

if TYPE_CHECKING:
    from mmray.data.store.manifest import Manifest


@dataclass(frozen=True)
class PrepareCommand:
    """Check, clean and pack image-text rows: done once, used by every run."""

    source: Positional[str]
    """JSON lines, CSV, TSV, Parquet, WebDataset tars, COCO's JSON, a folder for each class, images beside texts,
    images.txt,captions.txt, or a saved Hugging Face dataset: a file, or a folder of them; what it is, is found out."""
    out: Positional[str]
    """Folder of the prepared set; prepared again, it goes on where it was and takes only new rows."""
    settings: OmitArgPrefixes[Prepare] = field(default_factory=Prepare)
    retry_quarantined: bool = False
    """Try again what was set aside because it could not be read or decoded, with the rest of its shard."""
    address: str | None = None
    """Ray address; none: RAY_ADDRESS where it is set, else this machine."""
    wait_for_nodes: bool = False
    """Wait for nodes, though Ray does not say that any may come."""


def _findings(manifest: Manifest, out: str) -> Iterator[tuple[str, str]]:
    """(label, line) of what was found beyond bad rows."""
    if manifest.num_same_text:
        yield "captions", f"{manifest.num_same_text:,} rows repeat the captions of an earlier row; they are kept"
    if found := manifest.leakage:
        total = found["exact"] + found["near"]
        where = ", ".join(
            f"{rows:,} in {'another split' if name == 'splits' else name}" for name, rows in found["found_in"].items()
        )
        kept = "set aside" if found["dropped"] else "kept; --drop-overlap sets them aside"
        yield "leaked", f"{total:,} rows ({found['exact']:,} exact, {found['near']:,} alike): {where}; {kept}"
        if total:
            yield "", f"each with its twin in {out}/leaks.jsonl"


def prepare(argv: Sequence[str], screen: Screen) -> int:
    """mmray prepare SOURCE OUT [--max-bad-fraction 0.01] [--image-side 256] [--check-contamination SET] ..."""
    command = parsed(PrepareCommand, argv, "mmray prepare")
    from mmray.cluster.connect import ray_session
    from mmray.cluster.placement import check_data_capacity
    from mmray.data.prepare.pipeline import prepare as prepare_rows

    began_s = time.monotonic()
    section = Cluster(address=command.address, wait_for_nodes=command.wait_for_nodes)
    with ray_session(section), screen.work("starting Ray"):
        check_data_capacity(section)
        reporter = Reporter(screen)
        manifest = prepare_rows(
            command.source,
            command.out,
            command.settings,
            reporter.prepare_progress,
            reporter.log,
            command.retry_quarantined,
        )
    splits = ", ".join(f"{name} {rows:,}" for name, rows in sorted(manifest.splits.items())) or "no splits"
    screen.note(f"{manifest.num_read:,} rows read in {time.monotonic() - began_s:.0f} s", "read")
    screen.note(f"{manifest.num_rows:,} rows ({splits}) in {command.out}", "prepared")
    screen.note(
        f"{manifest.num_quarantined:,} rows, each with its reason in {command.out}/quarantine.jsonl", "set aside"
    )
    for label, line in _findings(manifest, command.out):
        screen.note(line, label)
    screen.note(f"mmray train --data.train {command.out}", "next")
    return 0
