"""Batches of held-out rows for evaluation: every row once, in the process that evaluates, without Ray.

A rank reads its part of the set with a thread pool (Pillow releases the GIL while decoding), one batch ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.images import boxes
from mmray.data.images.crash_probe import CrashProbes
from mmray.data.images.decode import MAX_PIXELS
from mmray.data.store.manifest import BATCH_ROWS
from mmray.data.store.prepared_set import ROW_ERRORS, PreparedSet, Row, hash_key
from mmray.data.stream.collate import box_columns, lm_columns
from mmray.data.stream.reader import NO_LABEL, Block, RowReader
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Evaluate, Inputs

Batch = dict[str, Tensor]
EvalRow = tuple[np.ndarray, Block, list[Any], int]
EvalRowOrError = EvalRow | FileNotFoundError | ValueError


class EvalDataset:
    """Held-out rows and the settings that turn them into model inputs; base class of the evaluators.

    Unless `prepare` decoded the images, they are first decoded in another process, because a decoder that crashes would
    kill this one.
    """

    def __init__(
        self,
        prepared: PreparedSet,
        inputs: Inputs,
        tokenizer_json: str,
        settings: Evaluate,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.prepared, self.inputs, self.settings, self.max_pixels = prepared, inputs, settings, max_pixels
        self.reader = RowReader(prepared, inputs, tokenizer_json, max_pixels)
        self.encoder = self.reader.encoder
        self.crash_probe = None if prepared.manifest.is_decoded else CrashProbes()


@dataclass
class EvalBatches:
    """Batches of one rank's part of the first `limit` rows; can be iterated repeatedly.

    A batch: image uint8 [B, 3, S, S]; row, label int64 [B] (-1: no label); input_ids, attention_mask int64 [C, T], all
    captions of these rows; caption_row int64 [C], the row of each caption; text_id int64 [C], equal for equal captions;
    labels and image_pos for generative models, boxes with `inputs.max_boxes` (data/stream/collate.py). Unreadable rows
    are listed in `skipped`; a failing object store raises OSError.
    """

    data: EvalDataset
    rank: int = 0
    world: int = 1
    limit: int | None = None
    skipped: list[str] = field(default_factory=list)

    @property
    def rows(self) -> np.ndarray:
        """Row numbers of this rank: contiguous parts that cover the set and differ by at most one row."""
        limit = min(self.data.prepared.num_rows, self.limit or self.data.prepared.num_rows)
        return np.array_split(np.arange(limit), self.world)[self.rank]

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches with at least one row each."""
        self.skipped.clear()
        rows, size = self.rows, self.data.settings.batch
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        with closing(self), ThreadPoolExecutor(min(16, cores()), thread_name_prefix="mmray-eval") as pool:
            # A few adjacent rows per task, so a store gets one request for them; `map` submits when it is called.
            ahead: Iterator[list[EvalRowOrError]] = iter(())
            for part, after in zip([rows[:0], *parts], [*parts, rows[:0]], strict=True):
                current = ahead
                ahead = pool.map(self._read, [after[at : at + BATCH_ROWS] for at in range(0, len(after), BATCH_ROWS)])
                if (batch := self._collate(part, chain.from_iterable(current))) is not None:
                    yield batch

    def close(self) -> None:
        """Stop the child processes that probe images; the next row restarts them."""
        if self.data.crash_probe is not None:
            self.data.crash_probe.close()

    def _read(self, rows: np.ndarray) -> list[EvalRowOrError]:
        """Read rows; a row that fails becomes its exception."""
        records: list[Row | None]
        try:
            records = [*self.data.prepared.read(rows)]
        except ROW_ERRORS:  # of one row: read them one by one
            records = [None] * len(rows)
        results: list[EvalRowOrError] = []
        for row, record in zip(rows.tolist(), records, strict=True):
            try:
                results.append(self._convert(record) if record else self.read(row))
            except ROW_ERRORS as error:
                results.append(error)
        return results

    def read(self, row: int) -> EvalRow:
        """Pixels, box columns, texts and label of one row. Raises OSError or ValueError (BadImage is one)."""
        return self._convert(self.data.prepared.read(np.array([row]))[0])

    def _convert(self, record: Row) -> EvalRow:
        if not record.checksum_ok:
            raise ValueError(f"{record.key} ({record.source}): image digest does not match the prepared set")
        data = self.data
        if data.crash_probe is not None:
            data.crash_probe.probe(record.key, record.image, data.max_pixels)
        pixels, values = data.reader.decode_row(0, record, None)
        columns = boxes.empty_box_columns(1, data.inputs.max_boxes)
        for name, value in values.items():
            columns[name][0] = value
        label = NO_LABEL if record.label is None else record.label
        return pixels, columns, data.encoder.captions_of(record), label

    def _collate(self, rows: np.ndarray, records: Iterable[EvalRowOrError]) -> Batch | None:
        """Collate the readable rows; None if there are none."""
        readable: list[tuple[int, EvalRow]] = []
        for row, record in zip(rows.tolist(), records, strict=True):
            if not isinstance(record, Exception):
                readable.append((row, record))
                continue
            self.skipped.append(f"row {row}: {record}")
            if len(self.skipped) % 1000 == 1:
                logging.getLogger(__name__).warning("evaluation skips %s", self.skipped[-1])
        if not readable:
            return None
        pixels, boxed, texts_of_row, labels = zip(*(record for _, record in readable), strict=True)
        texts = [text for texts in texts_of_row for text in texts]
        columns = self.data.encoder.encode_batch(texts)
        ids, num_tokens = columns["input_ids"], columns["num_tokens"]
        return (
            lm_columns(columns, ids.shape[1])
            | box_columns({name: np.concatenate([each[name] for each in boxed]) for name in boxed[0]})
            | {
                "image": torch.from_numpy(np.stack(pixels)),
                "row": torch.tensor([row for row, _ in readable]),
                "label": torch.tensor(labels),
                "input_ids": torch.from_numpy(ids.astype(np.int64)),
                "attention_mask": (torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]).long(),
                "caption_row": torch.tensor([row for row, record in readable for _ in record[2]]),
                "text_id": torch.tensor([hash_key(str(text)) for text in texts]),
            }
        )
