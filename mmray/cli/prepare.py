"""`mmray prepare`: convert raw rows to a prepared set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes

from mmray.cli.args import OutPath, SourcePath, parse_args
from mmray.cli.console import Reporter, Terminal, shell_path
from mmray.config import Cluster, Prepare

if TYPE_CHECKING:
    from mmray.data.store.manifest import Manifest


@dataclass(frozen=True)
class PrepareCommand:
    """Validate, deduplicate and pack image-text rows into a set that any run can use."""

    source: SourcePath
    """JSON lines, CSV, TSV, Parquet, tars, class folders, images with texts, COCO or a saved
    dataset; detected.
    """
    out: OutPath
    """Folder of the prepared set; the same command again resumes, or adds new rows."""
    settings: OmitArgPrefixes[Prepare] = field(default_factory=Prepare)
    retry_quarantined: bool = False
    """Retry rows that could not be read or decoded, with the other rows of their shards."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise this machine."""
    wait_for_nodes: bool = False
    """Skip the capacity check and wait for nodes to be added."""


def _findings(manifest: Manifest, out: str) -> Iterator[tuple[str, str]]:
    """Yield (label, line) for unreadable rows, repeated captions and contamination."""
    if unreadable := manifest.reasons.get("unreadable"):
        yield (
            "unreadable",
            (
                f"{unreadable:,} rows failed on a disk or a server; rerun the same "
                "command to retry them"
            ),
        )
    if manifest.num_same_text:
        yield (
            "captions",
            (
                f"{manifest.num_same_text:,} rows repeat the captions of an earlier "
                "row; they are kept"
            ),
        )
    if leakage := manifest.leakage:
        total = leakage["exact"] + leakage["near"]
        found_in = leakage["found_in"].items()
        where = ", ".join(
            f"{rows:,} in {'another split' if name == 'splits' else name}"
            for name, rows in found_in
        )
        kept = "quarantined" if leakage["dropped"] else "kept; --drop-overlap quarantines them"
        kinds = f"{leakage['exact']:,} exact, {leakage['near']:,} near-duplicates"
        listed = f"; listed in {out}/leaks.jsonl" * bool(total)
        yield "contamination", f"{total:,} rows ({kinds}): {where}; {kept}{listed}"


def prepare(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray prepare SOURCE OUT [--max-bad-fraction 0.01] [--image-side 256] [--check-contamination
    SET] ...
    """
    run_prepare(parse_args(PrepareCommand, argv, "mmray prepare"), terminal)
    return 0


def run_prepare(command: PrepareCommand, terminal: Terminal) -> Manifest:
    """Prepare a set; show its progress and its counts. Raises MmrayError."""
    from mmray.cluster.connect import data_session
    from mmray.data.prepare.pipeline import prepare as prepare_rows
    from mmray.storage.storage import Storage

    for address in (command.source, command.out):
        Storage(address)  # raises UsageError for an invalid one before Ray starts
    start_s = time.monotonic()
    cluster_config = Cluster(address=command.address, wait_for_nodes=command.wait_for_nodes)
    with terminal.progress("starting"), data_session(cluster_config):
        reporter = Reporter(terminal)
        report = (reporter.prepare_progress, reporter.log)
        manifest = prepare_rows(
            command.source, command.out, command.settings, *report, command.retry_quarantined
        )
    splits = (
        ", ".join(f"{name} {rows:,}" for name, rows in sorted(manifest.splits.items()))
        or "no splits"
    )
    terminal.note(f"{manifest.num_read:,} rows in {time.monotonic() - start_s:.0f} s", "read")
    terminal.note(f"{manifest.num_rows:,} rows ({splits}) in {command.out}", "prepared")
    reasons = f"; reasons are in {command.out}/quarantine.jsonl" * bool(manifest.num_quarantined)
    terminal.note(f"{manifest.num_quarantined:,} rows{reasons}", "quarantined")
    for label, line in _findings(manifest, command.out):
        terminal.note(line, label)
    terminal.note(f"mmray train --data.train {shell_path(command.out)}", "next")
    return manifest
