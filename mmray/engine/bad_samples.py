"""Rows that cannot be read in training: named in the run's quarantine.jsonl, counted once, and budgeted.

worker.py lets the blocks of the stream pass through here. A row keeps its place in the step; it just does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import orjson

from mmray.data.store.manifest import QUARANTINE
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import NO_LABEL, Block, RowReader
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, append_line

if TYPE_CHECKING:
    from mmray.config import Config


def quarantine_bad_rows(
    blocks: Iterable[Block],
    config: Config,
    folder: AnyPath,
    reader: RowReader,
    plan: SamplePlan,
    count: Callable[[int], int],
) -> Iterator[Block]:
    """Blocks as they come; rows that could not be read are named in quarantine.jsonl, up to `data.max_bad_rows`.

    Each row is named and counted once, on whatever rank, in whatever epoch and attempt it comes.
    """
    for block in blocks:
        _check_labels(block, config)
        _check_box_labels(block, config)
        positions = block["pos"][~block["valid"] & (block["pos"] >= 0)]
        for row in plan.rows_at(positions).tolist():
            bad = count(row)
            if bad == 0:
                continue
            told = _quarantine(folder, reader, row)
            if bad > config.data.max_bad_rows:
                budget = f"data.max_bad_rows {config.data.max_bad_rows}"
                raise DataError(
                    f"{bad} rows could not be read ({budget}), the last: {told}. "
                    f"All are named in {folder / QUARANTINE}; prepare the set again from its source"
                )
        yield block


def _check_labels(block: Block, config: Config) -> None:
    """Raise DataError at a label that the model has no class for; a GPU would die of it without a word."""
    classes = getattr(config.model, "classes", 0)
    if classes and (largest := int(block["label"].max(initial=0))) >= classes:
        raise DataError(
            f"a row of {config.data.train} has the label {largest}, and model.classes is {classes}: labels count "
            f"from 0; set --model.classes to {largest + 1} or more"
        )


def _check_box_labels(block: Block, config: Config) -> None:
    """Raise DataError at a box whose label has no name."""
    names = getattr(config.model, "region_labels", ())
    if not names or "box_labels" not in block:
        return
    labels = np.unique(block["box_labels"])
    bad = [label for label in labels.tolist() if label != NO_LABEL and not (label < len(names) and names[label])]
    if bad:
        raise DataError(
            f"a box of {config.data.train} has the label {bad[0]}, which model.region_labels has no name for: give "
            "one for each label, counted from 0"
        )


def load_bad_rows(folder: AnyPath) -> set[int]:
    """Rows that a run has named in quarantine.jsonl so far; a line that a kill cut off in the middle names none."""
    rows, file = set(), folder / QUARANTINE
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            rows.add(int(orjson.loads(line)["row"]))
        except (ValueError, KeyError, TypeError):
            continue
    return rows


def _quarantine(folder: AnyPath, reader: RowReader, row: int) -> str:
    """Write down one row that failed in training; returns its name and reason."""
    record, reason = reader.explain_bad_row(row)
    entry = {
        "key": record.key if record else None,
        "source": record.source if record else None,
        "row": row,
        "stage": "train",
        "reason": reason,
    }
    append_line(folder / QUARANTINE, orjson.dumps(entry))
    return f"row {row} ({entry['key']}, {entry['source']}): {reason}"
