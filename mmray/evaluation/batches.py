"""Batches of held-out rows for evaluation: every row once, in the process that evaluates, without
Ray.

A rank reads its part of the set with a thread pool (Pillow releases the GIL while decoding), one
batch ahead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mmray.data.images.boxes import NO_LABEL
from mmray.data.images.decode import MAX_PIXELS, BadImage
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.store.manifest import RECORD_BATCH_ROWS
from mmray.data.store.mixture import ROW_ERRORS, read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row, hash_key
from mmray.data.stream.blocks import Block
from mmray.data.stream.collate import Batch, extra_tensors, token_columns
from mmray.data.stream.reader import RowReader
from mmray.errors import DataError
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Evaluate, Inputs


class SkippedRows(list[str]):
    """A message for each held-out row that cannot be read.

    `add(number, error)` appends the message of a row and logs some of them.
    """

    def add(self, number: int, error: Exception) -> None:
        """Add a row; the first of each 1000 is logged.

        Args:
            number: Index of the row in the set.
            error: Why it cannot be read.
        """
        self.append(f"row {number}: {error}")
        if len(self) % 1000 == 1:
            logging.getLogger(__name__).warning("evaluation skips %s", self[-1])


class EvalRow(NamedTuple):
    """A decoded held-out row.

    Attributes:
        pixels: Transformed image, uint8 [3, S, S].
        columns: Further inputs of the model by name, such as boxes, each [1, ...].
        texts: Its captions, as the encoder formats them.
        label: Class of the row; -1: none.
        image_hash: Equal for equal images.
    """

    pixels: np.ndarray
    columns: Block  # [1, ...], further columns of the model
    texts: list[str]
    label: int  # -1: none
    image_hash: int  # equal for equal images


class EvalDataset:
    """Held-out rows and the settings that turn them into model inputs; base class of the
    evaluators.

    A subclass implements `score(model, group, objective, global_rows)`, which returns metrics by
    name.

    Args:
        prepared: The set with the held-out rows.
        inputs: Image size, preprocessing and tokenization of the model.
        tokenizer_json: Content of tokenizer.json.
        settings: Metrics to compute, rows of a batch, and the limit of rows.
        max_pixels: Images with more pixels are not decoded.
        on_rows: Called with the number of rows of a batch when it is done, to show progress; None:
            not called.
        task: Compute only the metrics of `retrieval` or of `zero_shot` classification; "": both.
    """

    def __init__(
        self,
        prepared: PreparedSet,
        inputs: Inputs,
        tokenizer_json: str,
        settings: Evaluate,
        max_pixels: int = MAX_PIXELS,
        on_rows: Callable[[int], None] | None = None,
        task: str = "",
    ) -> None:
        self.on_rows = on_rows or (lambda _: None)
        self.task = task
        self.prepared = prepared
        self.inputs = inputs
        self.settings = settings
        self.max_pixels = max_pixels
        self.reader = RowReader(prepared, inputs, tokenizer_json, max_pixels)
        self.encoder = self.reader.encoder
        self._check_results: dict[str, BadImage | None] = {}
        self._threads = threading.local()  # one child process per thread

    def check_decodable(self, row: Row) -> None:
        """Decode the image of a row in a child process, because a corrupt one may crash the
        decoder.

        Images that `prepare` has decoded are not checked, and a repeated call for a row only
        returns the result of the first one.

        Args:
            row: The stored row, with its encoded image.

        Raises:
            BadImage: The image cannot be decoded, or crashes the decoder.
        """
        if not self.prepared.manifest.images_verified and row.source not in self._check_results:
            decoder = self._threads.__dict__.setdefault("decoder", SubprocessDecoder())
            error = None
            try:
                decoder.check(row.image, self.max_pixels)
            except BadImage as bad:
                error = BadImage(bad.reason, f"{row.key}: {bad.detail}")
            self._check_results[row.source] = error
        if error := self._check_results.get(row.source):
            raise error


@dataclass
class EvalBatches:
    """Batches of one rank's part of the held-out rows; can be iterated repeatedly.

    A batch has B rows with C captions in total: `image` uint8 [B, 3, S, S]; `row` (index in the
    set), `label` (-1: none) and `image_hash` (equal for equal images) int64 [B]; `input_ids` and
    `attention_mask` int64 [C, T]; `caption_row` (index of the caption's row) and `text_hash` (equal
    for equal captions) int64 [C]. Some models get further columns, such as boxes.

    Iterating raises OSError if an object store fails.

    Args:
        data: The rows and the settings of the model inputs.
        rank: This rank.
        world_size: Number of ranks, which divide the rows.
        limit: Only the first `limit` rows of the set are used; None: all.
        skipped: Filled with a message per unreadable row.
    """

    data: EvalDataset
    rank: int = 0
    world_size: int = 1
    limit: int | None = None
    skipped: SkippedRows = field(default_factory=SkippedRows)

    @property
    def rows(self) -> np.ndarray:
        """Indices of this rank's rows in the set, int64, ascending.

        The ranks get contiguous parts of the set, or of its first `limit` rows if a limit is set.
        Their sizes differ by at most one.
        """
        return rows_of_rank(self.data.prepared, self.limit, self.rank, self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches with at least one row each."""
        return map(self._collate, self.readable_rows())

    def readable_rows(self) -> Iterator[list[tuple[int, EvalRow]]]:
        """Read and decode the rows of this rank, in batches of the setting `evaluate.batch`.

        Unreadable rows are added to `skipped`, which is cleared first. A batch without readable
        rows is omitted.

        Yields:
            A list with (index in the set, EvalRow) of each readable row of a batch, at least one.
            An EvalRow has `pixels` uint8 [3, S, S], `texts`, `label`, `image_hash` and `columns`
            (further inputs).
        """
        self.skipped.clear()
        rows = self.rows
        size = self.data.settings.batch
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        with ThreadPoolExecutor(min(16, cores()), thread_name_prefix="mmray-eval") as pool:
            # A few adjacent rows per task, so a store gets one request for them; `map` submits when
            # it is called.
            ahead: Iterator[list[EvalRow | Exception]] = iter(())
            for part, after in zip([rows[:0], *parts], [*parts, rows[:0]], strict=True):
                current = ahead
                starts = range(0, len(after), RECORD_BATCH_ROWS)
                ahead = pool.map(self._read, [after[at : at + RECORD_BATCH_ROWS] for at in starts])
                readable: list[tuple[int, EvalRow]] = []
                for row, record in zip(part.tolist(), chain.from_iterable(current), strict=True):
                    if isinstance(record, Exception):
                        self.skipped.add(row, record)
                    else:
                        readable.append((row, record))
                if readable:
                    yield readable
                self.data.on_rows(len(part))

    def _read(self, rows: np.ndarray) -> list[EvalRow | Exception]:
        """Read rows; a row that fails becomes its exception."""
        records = read_intact(self.data.prepared, rows)
        return [
            record if isinstance(record, Exception) else self._convert(record) for record in records
        ]

    def _convert(self, record: Row) -> EvalRow | Exception:
        data = self.data
        try:
            data.check_decodable(record)
            image = data.reader.decode_row(record, None)  # no augmentation
        except ROW_ERRORS as error:
            return error
        columns: Block = {}
        for extra in data.reader.extra_columns:
            columns |= extra.empty(1)
            extra.set_row(columns, 0, record, image.image_size, None)
        label = NO_LABEL if record.label is None else record.label
        texts = data.encoder.format_texts(record)
        return EvalRow(image.pixels, columns, texts, label, _image_hash(record))

    def _collate(self, readable: list[tuple[int, EvalRow]]) -> Batch:
        rows = [row for _, row in readable]
        texts = [text for row in rows for text in row.texts]
        tokens = token_columns(*self.data.encoder.encode(texts))
        columns = {
            name: np.concatenate([row.columns[name] for row in rows]) for name in rows[0].columns
        }
        return (
            tokens
            | extra_tensors(columns, self.data.reader.extra_columns)
            | {
                "image": torch.from_numpy(np.stack([row.pixels for row in rows])),
                "row": torch.tensor([number for number, _ in readable]),
                "label": torch.tensor([row.label for row in rows]),
                "image_hash": torch.tensor([row.image_hash for row in rows]),
                "caption_row": torch.tensor(
                    [number for number, row in readable for _ in row.texts]
                ),
                "text_hash": torch.tensor([hash_key(text) for text in texts]),
            }
        )


def read_intact(prepared: PreparedSet, numbers: np.ndarray) -> list[Row | Exception]:
    """Read rows; one that cannot be read, or whose media were changed, becomes its exception.

    Args:
        prepared: The set.
        numbers: Indices of the rows, int64.

    Returns:
        For each index a Row (`key`, `media` with encoded bytes, `texts` or `messages` and others),
        or the exception.
    """
    return [
        row
        if isinstance(row, Exception) or row.checksum_ok
        else BadImage("checksum", f"{row.key} ({row.source}): digest does not match the set")
        for row in read_each(prepared, numbers)
    ]


def rows_of_rank(
    prepared: PreparedSet, limit: int | None, rank: int, world_size: int
) -> np.ndarray:
    """Return the indices of a rank's contiguous part of a set, int64, ascending.

    Args:
        prepared: The set.
        limit: Only its first `limit` rows are divided; None: all.
        rank: The rank.
        world_size: Number of ranks; the sizes of their parts differ by at most one.
    """
    num_rows = min(prepared.num_rows, limit or prepared.num_rows)
    return np.array_split(np.arange(num_rows), world_size)[rank]


def count_bad_rows(skipped: Sequence[str], num_rows: int, group: Any) -> int:
    """Return the number of unreadable rows of all ranks; a collective call.

    Args:
        skipped: A message for each unreadable row of this rank.
        num_rows: Number of readable rows of all ranks.
        group: The Group of all ranks.

    Raises:
        DataError: No row is readable; raised on every rank.
    """
    bad_rows = int(group.all_gather_variable(torch.tensor([len(skipped)])).sum())
    if not num_rows:
        raise DataError(f"cannot read any of {bad_rows} evaluation rows: {'; '.join(skipped[:1])}")
    return bad_rows


def _image_hash(record: Row) -> int:
    """Return a hash of the bytes of a row's images, or of their location without a checksum."""
    return hash_key(" ".join(media.sha256 or str(media.ref) for media in record.media))
