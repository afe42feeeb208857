"""The rows of an evaluation set as batches for the model: every row once, none dropped, in the process that scores.

A rank reads its own part of the set with a pool of threads (Pillow lets go of the interpreter while it decodes), the
next batch while the model embeds the last one. Without Ray, so that it serves in training, in `mmray evaluate`, and in
a plain script alike.
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
from mmray.data.store.prepared_set import BATCH_ROWS, ROW_ERRORS, PreparedSet, Row, key_id
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
    """Batches of one rank's part of the first `limit` rows; iterate as often as wanted.

    A batch: image uint8 [B, 3, S, S]; row, label int64 [B] (-1: no label); input_ids, attention_mask int64 [C, T], all
    captions of these rows; owner int64 [C], the row of each caption; said int64 [C], equal for equal captions; for a
    model that writes also labels and image_pos (data/collate.py); with `inputs.max_boxes` columns of boxes, as there.
    Rows that cannot be read are left out and named in `faults`; a store that does not answer raises OSError. With
    `apart` each image is tried there first: one that kills its decoder would take this process, which trains, with it.
    """

    prepared: PreparedSet
    inputs: Inputs
    encoder: Any  # data/words.py
    batch: int
    limit: int | None = None
    rank: int = 0
    world: int = 1
    max_pixels: int = MAX_PIXELS
    apart: SandboxedDecoders | None = None
    threads: int = field(default_factory=lambda: min(16, cores()))
    faults: list[str] = field(default_factory=list)

    @property
    def rows(self) -> np.ndarray:
        """Row numbers of this rank; the ranks' parts are disjoint, cover the set, and differ by one row at most."""
        wanted = min(self.prepared.num_rows, self.limit or self.prepared.num_rows)
        return np.array_split(np.arange(wanted), self.world)[self.rank]

    def __iter__(self) -> Iterator[Batch]:
        """Batches with at least one row each."""
        self.faults.clear()
        rows = self.rows
        parts = [rows[start : start + self.batch] for start in range(0, len(rows), self.batch)]
        with closing(self), ThreadPoolExecutor(self.threads, thread_name_prefix="mmray-eval") as pool:
            coming = self._ask(pool, parts[0]) if parts else []
            for index in range(len(parts)):
                reading = coming
                if index + 1 < len(parts):
                    coming = self._ask(pool, parts[index + 1])
                found = chain.from_iterable(one.result() for one in reading)
                if (batch := self._collate(parts[index], found)) is not None:
                    yield batch

    def close(self) -> None:
        """End what was begun to read rows apart; it begins again with the next one."""
        if self.apart is not None:
            self.apart.close()

    def _ask(self, pool: ThreadPoolExecutor, rows: np.ndarray) -> list[Future[list[EvalRowOrError]]]:
        """Jobs of few rows each that lie together, so that a store is asked once for all of them."""
        return [pool.submit(self._read_all, rows[at : at + BATCH_ROWS]) for at in range(0, len(rows), BATCH_ROWS)]

    def _read_all(self, rows: np.ndarray) -> list[EvalRowOrError]:
        """What `read` gives for each of these rows, or what it raises."""
        records: list[Row | None]
        try:
            records = [*self.prepared.read(rows)]
        except ROW_ERRORS:  # at one of them; which, shows row by row
            records = [None] * len(rows)
        found: list[EvalRowOrError] = []
        for row, record in zip(rows.tolist(), records, strict=True):
            try:
                found.append(self._made(record) if record else self.read(row))
            except ROW_ERRORS as error:
                found.append(error)
        return found

    def read(self, row: int) -> EvalRow:
        """Pixels, columns of boxes, words and label of one row. Raises OSError or ValueError (BadImage is one)."""
        return self._made(self.prepared.read(np.array([row]))[0])

    def _made(self, record: Row) -> EvalRow:
        if not record.checksum_ok:
            raise ValueError(f"{record.key} ({record.source}): its images are not those that were prepared")
        if self.apart is not None:
            self.apart.check(record.key, record.image, self.max_pixels)
        label = NO_LABEL if record.label is None else record.label
        return *self._seen(record), self.encoder.texts_of(record), label

    def _seen(self, record: Row) -> tuple[np.ndarray, Block]:
        """Pixels of a row, and its boxes on them where they are asked for."""
        inputs, rgb = self.inputs, decode(record.image, self.max_pixels)
        pixels = transform(rgb, inputs)
        if not (inputs.max_boxes and record.boxes):
            return pixels, boxes.empty_box_columns(1, inputs.max_boxes)
        size = (rgb.shape[1], rgb.shape[0])
        found, labels, count = boxes.transform_boxes(record.boxes, record.box_labels or [], size, inputs)
        columns = {"boxes": found[None], "box_labels": labels[None], "num_boxes": np.array([count], np.int32)}
        return pixels, columns

    def _collate(self, rows: np.ndarray, found: Iterable[EvalRowOrError]) -> Batch | None:
        """The batch of what could be read; None when nothing could."""
        good, pixels, boxed, labels, texts, owner = [], [], [], [], [], []
        for row, one in zip(rows.tolist(), found, strict=True):
            if isinstance(one, Exception):
                self.faults.append(f"row {row}: {one}")
                if len(self.faults) % 1000 == 1:
                    logging.getLogger(__name__).warning("an evaluation leaves out %s", self.faults[-1])
                continue
            image, regions, captions, label = one
            good.append(row)
            pixels.append(image)
            boxed.append(regions)
            labels.append(label)
            texts.extend(captions)
            owner.extend([row] * len(captions))
        if not good:
            return None
        columns = self.encoder.columns(texts)
        ids, num_tokens = columns["input_ids"], columns["num_tokens"]
        return (
            label_columns(columns, ids.shape[1])
            | box_columns({name: np.concatenate([each[name] for each in boxed]) for name in boxed[0]})
            | {
                "image": torch.from_numpy(np.stack(pixels)),
                "row": torch.tensor(good),
                "label": torch.tensor(labels),
                "input_ids": torch.from_numpy(ids.astype(np.int64)),
                "attention_mask": (torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]).long(),
                "owner": torch.tensor(owner),
                "said": torch.tensor([key_id(str(text)) for text in texts]),
            }
        )


class EvalDataset:
    """A set of held-out rows and how a model's inputs are made of them: what each evaluator is built upon."""

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
        self._apart = None if prepared.manifest.is_decoded else SandboxedDecoders()

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
            self._apart,
        )
