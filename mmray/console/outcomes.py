"""Lines about the outcome of a command: a run, a prepared set, a sweep."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mmray.report.sweep import SweepRecord

if TYPE_CHECKING:
    from mmray.data.store.manifest import Manifest
    from mmray.training import RunReporter
    from mmray.training.driver import RunOutcome
    from mmray.tuning.sweep import SweepReporter


def log_sweep(sweep: SweepRecord, reporter: SweepReporter) -> None:
    """Log how many trials were measured in which time.

    Args:
        sweep: The sweep, with its trials and summary.
        reporter: Receives the line.
    """
    measured = sum(bool(row.rungs) for row in sweep.trials)
    elapsed_s = sweep.summary["elapsed_s"]
    text = f"{measured} of {len(sweep.trials)} trials measured in {elapsed_s:.0f} s"
    if sweep.status in ("stopped", "budget"):
        text += "; run the same command to resume"
    reporter.log(text, sweep.status)


def log_outcome(outcome: RunOutcome, reporter: RunReporter) -> None:
    """Log in one line how a run ended.

    Args:
        outcome: The run: `path`, `result` (content of result.json) and `already_done`.
        reporter: Receives the line.
    """
    result = outcome.result
    steps = f"{result['steps']:,}"
    if outcome.already_done:
        text = f"{outcome.path} has finished its {steps} steps; raise --train.steps to continue"
        reporter.log(text, "done")
        return
    text = f"{steps} steps in {result['elapsed_s']:.0f} s"
    if result["status"] == "stopped":
        reporter.log(f"{text}; run the same command to resume from step {steps}", "stopped")
        return
    if count := result["restarts"]:
        text += f", {count} restart{'s' * (count > 1)} ({result['wasted_steps']} steps repeated)"
    reporter.log(text, "finished")


def log_manifest(manifest: Manifest, out: str, reporter: RunReporter) -> None:
    """Log the rows of a prepared set, and warnings about them.

    Args:
        manifest: Its manifest, with the numbers of rows.
        out: Folder of the set, as the user gave it.
        reporter: Receives a line for each count.
    """
    splits = ", ".join(f"{name} {rows:,}" for name, rows in sorted(manifest.splits.items()))
    reporter.log(f"{manifest.num_rows:,} rows ({splits or 'no splits'}) in {out}", "prepared")
    by_number: Counter[int] = Counter()
    for counts in manifest.num_images.values():
        by_number.update({int(number): rows for number, rows in counts.items()})
    by_kinds: Counter[str] = Counter()
    for counts in manifest.media_kinds.values():
        by_kinds.update(counts)
    if by_kinds:
        text = ", ".join(
            f"{rows:,} rows have {kinds.replace(' ', ' and ')}"
            for kinds, rows in sorted(by_kinds.items())
        )
        reporter.log(text, "media")
    elif by_number.keys() - {1}:
        several = sum(rows for number, rows in by_number.items() if number > 1)
        text = (
            f"{by_number[0]:,} rows have none, {by_number[1]:,} have one, {several:,} have several"
        )
        reporter.log(text, "images")
    quarantined = f"{manifest.num_quarantined:,} rows"
    if manifest.num_quarantined:
        kinds = ", ".join(f"{count:,} {reason}" for reason, count in manifest.reasons.items())
        quarantined += f": {kinds}; see {out}/quarantine.jsonl"
    reporter.log(quarantined, "quarantined")
    if unreadable := manifest.reasons.get("unreadable"):
        text = "rows failed on a disk or a server; rerun the same command to retry them"
        reporter.log(f"{unreadable:,} {text}", "unreadable")
    for line in manifest.notice_lines:
        reporter.log(line, "notice")
    if manifest.num_same_text:
        text = "rows repeat the texts of an earlier row; they are kept"
        reporter.log(f"{manifest.num_same_text:,} {text}", "texts")
    if leakage := manifest.leakage:
        total = leakage["exact"] + leakage["near"]
        kinds = f"{leakage['exact']:,} exact, {leakage['near']:,} near-duplicates"
        places = [
            f"{rows:,} in {'another split' if name == 'splits' else name}"
            for name, rows in leakage["found_in"].items()
        ]
        kept = "quarantined" if leakage["dropped"] else "kept; --drop-overlap quarantines them"
        text = f"{total:,} rows ({kinds}): {', '.join(places)}; {kept}"
        if total:
            text += f"; listed in {out}/leaks.jsonl"
        reporter.log(text, "contamination")
