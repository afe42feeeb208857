"""What a worker passes on to people: logged lines, what checkpoints cost, advice, examples, names of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import torch

from mmray.data.stream.reader import RowReader
from mmray.engine.advice import advice
from mmray.engine.checkpoint.async_saver import Writer
from mmray.engine.worker_context import Job, Report
from mmray.report.run import EXAMPLES
from mmray.storage.file_ops import write_whole
from mmray.storage.remote_path import Folder


class Reporting:
    """Passes on what is logged, and what a checkpoint cost; a callback like a user's own."""

    def __init__(self, report: Report, writer: Writer):
        self.report, self.writer = report, writer
        self._told_s: float | None = None

    def on_step(self, step: int, metrics: dict[str, Any] | None) -> None:
        self.writer.check()
        if self.writer.cost_s != self._told_s:
            self._told_s = self.writer.cost_s
            self.report({"checkpoint_s": self._told_s})
        if metrics is not None:
            self.report(metrics)


def advise(job: Job, report: Report, device: torch.device, wait_share: float) -> None:
    """A line for people when training waits for rows."""
    config, kind = job.config, "GPU" if device.type == "cuda" else "CPU"
    line = advice(wait_share, job.data_workers, config.prepare.image_side, config.model.inputs.image_side, kind)
    if line is not None:
        tell(report, "pace", line)


def keep_examples(folder: Folder, report: Report, step: int, examples: dict[str, Any]) -> None:
    """Write what the report shows of the newest evaluation; that the storage does not take it is told."""
    try:
        write_whole(folder / EXAMPLES, orjson.dumps({"step": step, **examples}).decode())
    except OSError as error:
        tell(report, "storage", f"the examples of step {step} are not kept: {error}")


def tell(report: Report, label: str, text: str) -> None:
    """A line for people."""
    report({"note": text, "label": label})


def names(reader: RowReader, rows: list[int]) -> list[str]:
    """Keys of rows of the set, for messages; a row that cannot be read goes by its number."""
    try:
        return [
            f"{record.key} (row {row})" for row, record in zip(rows, reader.prepared.read(np.array(rows)), strict=True)
        ]
    except (OSError, ValueError):
        return [f"row {row}" for row in rows]
