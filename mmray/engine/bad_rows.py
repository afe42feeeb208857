"""Quarantine rows that cannot be read during training, up to a limit.

worker.py passes the stream's blocks through here. A bad row keeps its position in the step but does
not count.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import orjson

from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.store.manifest import QUARANTINE
from mmray.data.stream.blocks import NO_LABEL
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import Block, RowReader
from mmray.data.vlm.encoder import TOO_LONG
from mmray.data.vlm.reader import ConversationReader
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, RemotePath, remove_tree

if TYPE_CHECKING:
    from mmray.config import Config

# `prepare` decoded all rows. More that cannot be read are a fault of the storage or of the source.
MAX_BAD_ROWS = 16


def quarantine_bad_rows(
    blocks: Iterable[Block],
    config: Config,
    folder: AnyPath,
    reader: RowReader | ConversationReader,
    decoder: SubprocessDecoder,
    plan: SamplePlan,
    count_bad_row: Callable[[int], int],
) -> Iterator[Block]:
    """Yield the blocks unchanged; write rows that could not be read to the run's quarantine.jsonl.

    Each row is written and counted once, over all ranks, epochs and restarts of the workers. Its
    line is a JSON object: `key`, `source` (`file:line`; both null if the row cannot be read at
    all), `row` (number in the set), `stage` (`train`), `reason` (a word) and `detail` (a text).

    Args:
        blocks: Arrays of R rows by column, of which these are read: `pos` int64 [R], the position
            in the sample order, -1 for padding; `valid` bool [R], False for padding and unreadable
            rows; and `label` int64 [R], -1 for none.
        reader: Reads the training set; it returns why a row cannot be read.
        decoder: Decodes the bad rows. Its process starts with the first one; the caller closes it.
        plan: The sample order: which row (its number in the set) is at which position.
        count_bad_row: Called with the number of a row in the set; returns how many bad rows the run
            has so far, or 0 if this one was counted before.

    Raises:
        DataError: More than MAX_BAD_ROWS (16) rows could not be read (rows that are too long for
            the model do not count), or a label has no class in the model.
    """
    for block in blocks:
        _check_labels(block, config)
        positions = block["pos"][~block["valid"] & (block["pos"] >= 0)]
        for row in plan.row_ids_at(positions).tolist():
            if count_bad_row(row) == 0:
                continue
            record, reason, detail = reader.explain_bad_row(row, decoder)
            key, source = (record.key, record.source) if record else (None, None)
            entry = {
                "key": key,
                "source": source,
                "row": row,
                "stage": "train",
                "reason": reason,
                "detail": detail,
            }
            append_bad_row(folder / QUARANTINE, orjson.dumps(entry))
            if reason == TOO_LONG:  # a limit of the model, no fault of the data
                continue
            # Of all ranks and attempts; rare, so the file may be read.
            num_unreadable = sum(each != TOO_LONG for each in load_bad_rows(folder).values())
            if num_unreadable > MAX_BAD_ROWS:
                raise DataError(
                    f"{num_unreadable} rows could not be read, more than {MAX_BAD_ROWS}, the last: "
                    f"row {row} ({key}, {source}): {reason}: {detail}. All are listed in "
                    f"{folder / QUARANTINE}; run `mmray prepare` again from the source"
                )
        yield block


def _check_labels(block: Block, config: Config) -> None:
    """Raise DataError for a label without a class in the model, because it would fail a device-side
    assert on a GPU.
    """
    for label in np.unique(block["label"]).tolist():
        problem = "" if label == NO_LABEL else config.model.label_problem(label)
        if problem:
            raise DataError(f"a row of {config.data.train} has {problem}")


def append_bad_row(file: AnyPath, line: bytes) -> None:
    """Append a line to the run's quarantine.jsonl, to which several processes may append.

    An object cannot be appended to. On a store the line is written as an object of its own, until
    `merge_bad_rows` merges these objects.
    """
    if isinstance(file, RemotePath):
        name = f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}"
        (_parts_of(file) / name).write_bytes(line + b"\n")
    else:
        with file.open("ab") as stream:
            stream.write(line + b"\n")


def merge_bad_rows(folder: AnyPath) -> None:
    """Merge the lines of the run's quarantine.jsonl that are separate objects on a store.

    Call it from one process only. Without effect on a local disk.
    """
    file = folder / QUARANTINE
    if not isinstance(file, RemotePath) or not _parts_of(file).is_dir():
        return
    before = file.read_bytes() if file.exists() else b""
    # A deletion that failed leaves objects whose lines are merged already.
    merged = set(before.splitlines(keepends=True))
    lines = [part.read_bytes() for part in _parts_of(file).iterdir()]
    file.write_bytes(before + b"".join(line for line in lines if line not in merged))
    remove_tree(_parts_of(file))


def _parts_of(file: RemotePath) -> RemotePath:
    """Return the folder of the lines that are objects of their own."""
    return file.with_name(f"{file.name}.parts")


def load_bad_rows(folder: AnyPath) -> dict[int, str]:
    """Return the reasons of the rows in the run's quarantine.jsonl by their numbers, which are
    indices in the training set; empty without the file. Truncated lines are ignored.
    """
    rows = {}
    file = folder / QUARANTINE
    files = [file] if file.exists() else []
    if isinstance(file, RemotePath) and _parts_of(file).is_dir():
        files += _parts_of(file).iterdir()
    for line in chain.from_iterable(each.read_bytes().splitlines() for each in files):
        try:
            entry = orjson.loads(line)
            rows[int(entry["row"])] = str(entry.get("reason"))
        except (ValueError, KeyError, TypeError):
            continue
    return rows
