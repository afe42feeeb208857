"""A run as its workers see it, and each worker's line to whoever started it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import torch

from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.reader import RowReader
from mmray.engine.metrics.writers import Metrics
from mmray.report.run import EXAMPLES
from mmray.storage.paths import AnyPath, write_atomic

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.engine.checkpoint.manager import CheckpointManager


Report = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class WorkerContext:
    """A run as its workers see it."""

    config: Config
    folder: AnyPath
    fence: int
    reader: RowReader
    eval_set: PreparedSet | None
    tokenizer_json: str
    data_workers: int = 1
    micro: int = 0  # rows of a micro-batch, fewer than configured, after an attempt had no room; 0: as configured


@dataclass(frozen=True)
class DriverHandle:
    """A worker's line to whoever started it: `report` is called on rank 0, the rest on every rank."""

    report: Report
    stop: Callable[[], bool]  # True ends the run after the next step, with a checkpoint
    bad_row: Callable[[int], int]  # counts a row that could not be read; answers how many by now, 0 where it was known
    beat: Callable[[dict[str, Any]], bool]  # takes a heartbeat; answers whether this rank's stacks are wanted
    about: dict[str, Any]  # rank, node and process, for the heartbeat


# What would make a run faster, in a line for people: from the share of time that training waited for rows.
BOUND = 0.15  # of the time: below it, more data workers would hardly be felt
EVERY = 100  # steps between two lines


def input_bound_hint(
    wait_share: float, data_workers: int, prepared_side: int, model_side: int, device: str
) -> str | None:
    """The line for a run that waits for rows `wait_share` of its time; None for one that hardly does.

    With w workers the rows come at the pace of (1 - wait) of what training could take, so w / (1 - wait) would do.
    prepared_side: shorter side that images were re-encoded to, 0 for their own; model_side: what the model sees.
    """
    if wait_share < BOUND:
        return None
    more = max(1, ceil(data_workers * wait_share / max(0.01, 1 - wait_share)))
    smaller = -(-round(model_side * 1.14) // 32) * 32  # room for a crop
    shrink = f" or --prepare.image-side {smaller}" if prepared_side == 0 or prepared_side > smaller else ""
    workers = "CPU worker" if more == 1 else "CPU workers"
    return f"input-bound {wait_share:.0%}: {more} more {workers}{shrink} would feed this {device}"


@dataclass
class InputBoundHint:
    """Says so every EVERY steps, over all that was logged between; a callback of the loop."""

    say: Callable[[float], None]
    _next: int = EVERY
    _shares: tuple[float, ...] = ()

    def on_step(self, step: int, metrics: Metrics | None) -> None:
        if metrics is not None and "time/data_wait_share" in metrics:
            self._shares += (metrics["time/data_wait_share"],)
        if step >= self._next and self._shares:
            self.say(sum(self._shares) / len(self._shares))
            self._next, self._shares = step + EVERY, ()


# What a worker passes on to people: logged lines, what checkpoints cost, advice, examples, names of rows.
class ProgressReporter:
    """Passes on what is logged, and what a checkpoint cost; a callback like a user's own."""

    def __init__(self, report: Report, checkpoints: CheckpointManager):
        self.report, self.checkpoints = report, checkpoints
        self._told_s: float | None = None

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        self.checkpoints.poll()
        if self.checkpoints.cost_s != self._told_s:
            self._told_s = self.checkpoints.cost_s
            self.report({"checkpoint_s": self._told_s})
        if metrics is not None:
            self.report(metrics)


def report_hint(job: WorkerContext, report: Report, device: torch.device, wait_share: float) -> None:
    """A line for people when training waits for rows."""
    config, kind = job.config, "GPU" if device.type == "cuda" else "CPU"
    line = input_bound_hint(
        wait_share, job.data_workers, config.prepare.image_side, config.model.inputs.image_side, kind
    )
    if line is not None:
        report_note(report, "pace", line)


def save_examples(folder: AnyPath, report: Report, step: int, examples: dict[str, Any]) -> None:
    """Write what the report shows of the newest evaluation; that the storage does not take it is told."""
    try:
        write_atomic(folder / EXAMPLES, orjson.dumps({"step": step, **examples}).decode())
    except OSError as error:
        report_note(report, "storage", f"the examples of step {step} are not kept: {error}")


def report_note(report: Report, label: str, text: str) -> None:
    """A line for people."""
    report({"note": text, "label": label})


def row_keys(reader: RowReader, rows: list[int]) -> list[str]:
    """Keys of rows of the set, for messages; a row that cannot be read goes by its number."""
    try:
        return [
            f"{record.key} (row {row})" for row, record in zip(rows, reader.prepared.read(np.array(rows)), strict=True)
        ]
    except (OSError, ValueError):
        return [f"row {row}" for row in rows]
