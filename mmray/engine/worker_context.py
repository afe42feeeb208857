"""A run as its workers see it, and each worker's line to whoever started it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.reader import RowReader
from mmray.storage.remote_path import Folder

if TYPE_CHECKING:
    from mmray.config import Config

Report = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Job:
    """A run as its workers see it."""

    config: Config
    folder: Folder
    fence: int
    reader: RowReader
    eval_set: PreparedSet | None
    tokenizer_json: str
    data_workers: int = 1
    micro: int = 0  # rows of a micro-batch, fewer than configured, after an attempt had no room; 0: as configured


@dataclass(frozen=True)
class Line:
    """A worker's line to whoever started it: `report` is called on rank 0, the rest on every rank."""

    report: Report
    stop: Callable[[], bool]  # True ends the run after the next step, with a checkpoint
    bad_row: Callable[[int], int]  # counts a row that could not be read; answers how many by now, 0 where it was known
    beat: Callable[[dict[str, Any]], bool]  # takes a heartbeat; answers whether this rank's stacks are wanted
    about: dict[str, Any]  # rank, node and process, for the heartbeat
