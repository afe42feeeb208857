"""Batches of held-out rows for evaluation: every row once, in the process that evaluates, without Ray.

A rank reads its part of the set with a thread pool (Pillow releases the GIL while decoding), one batch ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.images import boxes
from mmray.data.images.decode import MAX_PIXELS, decode
from mmray.data.images.sandbox import SandboxedDecoders
from mmray.data.images.transform import transform
from mmray.data.store.manifest import BATCH_ROWS
from mmray.data.store.prepared_set import ROW_ERRORS, PreparedSet, Row, key_id
from mmray.data.stream.collate import box_columns, label_columns
from mmray.data.stream.reader import NO_LABEL, Block
from mmray.data.text.chat import build_encoder
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Evaluate, Inputs

Batch = dict[str, Tensor]
EvalRow = tuple[np.ndarray, Block, list[Any], int]
EvalRowOrError = EvalRow | FileNotFoundError | ValueError


@dataclass
class EvalBatches:
    """Batches of one rank's part of the first `limit` rows; can be iterated repeatedly.

    A batch: image uint8 [B, 3, S, S]; row, label int64 [B] (-1: no label); input_ids, attention_mask int64 [C, T], all
    captions of these rows; owner int64 [C], the row of each caption; text_id int64 [C], equal for equal captions;
    labels and image_pos for generative models, boxes with `inputs.max_boxes` (data/stream/collate.py). Unreadable rows
    are listed in `skipped`; a failing object store raises OSError. With `sandbox`, images are first decoded in another
    process, because a decoder that crashes would kill this one.
    """

    prepared: PreparedSet
    inputs: Inputs
    encoder: Any  # of data/text/chat.py build_encoder
    batch: int
    limit: int | None = None
    rank: int = 0
    world: int = 1
    max_pixels: int = MAX_PIXELS
    sandbox: SandboxedDecoders | None = None
    threads: int = field(default_factory=lambda: min(16, cores()))
    skipped: list[str] = field(default_factory=list)

    @property
    def rows(self) -> np.ndarray:
        """Row numbers of this rank: contiguous parts that cover the set and differ by at most one row."""
        wanted = min(self.prepared.num_rows, self.limit or self.prepared.num_rows)
        return np.array_split(np.arange(wanted), self.world)[self.rank]

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches with at least one row each."""
        self.skipped.clear()
        rows = self.rows
        parts = [rows[start : start + self.batch] for start in range(0, len(rows), self.batch)]
        with closing(self), ThreadPoolExecutor(self.threads, thread_name_prefix="mmray-eval") as pool:
            ahead = self._submit(pool, parts[0]) if parts else []
            for index in range(len(parts)):
                current = ahead
                if index + 1 < len(parts):
                    ahead = self._submit(pool, parts[index + 1])
                records = chain.from_iterable(future.result() for future in current)
                if (batch := self._collate(parts[index], records)) is not None:
                    yield batch

    def close(self) -> None:
        """Stop the sandbox processes; the next row restarts them."""
        if self.sandbox is not None:
            self.sandbox.close()

    def _submit(self, pool: ThreadPoolExecutor, rows: np.ndarray) -> list[Future[list[EvalRowOrError]]]:
        """Submit reads of a few adjacent rows each, so a store gets one request for them."""
        return [pool.submit(self._read_all, rows[at : at + BATCH_ROWS]) for at in range(0, len(rows), BATCH_ROWS)]

    def _read_all(self, rows: np.ndarray) -> list[EvalRowOrError]:
        """Read rows; a row that fails becomes its exception."""
        records: list[Row | None]
        try:
            records = [*self.prepared.read(rows)]
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
        return self._convert(self.prepared.read(np.array([row]))[0])

    def _convert(self, record: Row) -> EvalRow:
        if not record.checksum_ok:
            raise ValueError(f"{record.key} ({record.source}): image digest does not match the prepared set")
        if self.sandbox is not None:
            self.sandbox.check(record.key, record.image, self.max_pixels)
        label = NO_LABEL if record.label is None else record.label
        return *self._pixels_and_boxes(record), self.encoder.texts_of(record), label

    def _pixels_and_boxes(self, record: Row) -> tuple[np.ndarray, Block]:
        """Pixels of a row, and its boxes in model coordinates."""
        inputs, rgb = self.inputs, decode(record.image, self.max_pixels)
        pixels = transform(rgb, inputs)
        if not (inputs.max_boxes and record.boxes):
            return pixels, boxes.empty_box_columns(1, inputs.max_boxes)
        size = (rgb.shape[1], rgb.shape[0])
        model_boxes, labels, count = boxes.transform_boxes(record.boxes, record.box_labels or [], size, inputs)
        columns = {"boxes": model_boxes[None], "box_labels": labels[None], "num_boxes": np.array([count], np.int32)}
        return pixels, columns

    def _collate(self, rows: np.ndarray, records: Iterable[EvalRowOrError]) -> Batch | None:
        """Collate the readable rows; None if there are none."""
        rows_read, pixels, boxed, labels, texts, owner = [], [], [], [], [], []
        for row, one in zip(rows.tolist(), records, strict=True):
            if isinstance(one, Exception):
                self.skipped.append(f"row {row}: {one}")
                if len(self.skipped) % 1000 == 1:
                    logging.getLogger(__name__).warning("evaluation skips %s", self.skipped[-1])
                continue
            image, regions, captions, label = one
            rows_read.append(row)
            pixels.append(image)
            boxed.append(regions)
            labels.append(label)
            texts.extend(captions)
            owner.extend([row] * len(captions))
        if not rows_read:
            return None
        columns = self.encoder.columns(texts)
        ids, num_tokens = columns["input_ids"], columns["num_tokens"]
        return (
            label_columns(columns, ids.shape[1])
            | box_columns({name: np.concatenate([each[name] for each in boxed]) for name in boxed[0]})
            | {
                "image": torch.from_numpy(np.stack(pixels)),
                "row": torch.tensor(rows_read),
                "label": torch.tensor(labels),
                "input_ids": torch.from_numpy(ids.astype(np.int64)),
                "attention_mask": (torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]).long(),
                "owner": torch.tensor(owner),
                "text_id": torch.tensor([key_id(str(text)) for text in texts]),
            }
        )


class EvalDataset:
    """Held-out rows and the settings that turn them into model inputs; base class of the evaluators."""

    def __init__(
        self,
        prepared: PreparedSet,
        inputs: Inputs,
        tokenizer_json: str,
        settings: Evaluate,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self._prepared, self._inputs, self._settings, self._max_pixels = prepared, inputs, settings, max_pixels
        self._encoder = build_encoder(tokenizer_json, inputs)
        self._sandbox = None if prepared.manifest.is_decoded else SandboxedDecoders()

    def _batches(self, rank: int, world: int, limit: int | None) -> EvalBatches:
        """One rank's part of the first `limit` rows."""
        return EvalBatches(
            self._prepared,
            self._inputs,
            self._encoder,
            self._settings.batch,
            limit,
            rank,
            world,
            self._max_pixels,
            self._sandbox,
        )
