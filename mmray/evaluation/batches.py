"""Batches of held-out rows for evaluation: every row once, in the process that evaluates, without
Ray.

A rank reads its part of the set with a thread pool (Pillow releases the GIL while decoding), one
batch ahead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmray.data.images.decode import MAX_PIXELS, BadImage
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.store.manifest import RECORD_BATCH_ROWS
from mmray.data.store.mixture import ROW_ERRORS, read_each_when_mounted
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row, hash_key
from mmray.data.stream.blocks import NO_LABEL, Block
from mmray.data.stream.collate import Batch, clip_tensors, token_columns
from mmray.data.stream.reader import RowReader
from mmray.errors import DataError, first_line
from mmray.machine import cores
from mmray.plugins import load_class, merge_metrics
from mmray.storage.requests import iter_parallel

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.config.training import EvalSettings
    from mmray.engine.collectives import Group


SaveExamples = Callable[[dict[str, Any]], None]  # called with the content of examples.json
OnProgress = Callable[[str, int], None]  # unit, `rows` or `prompts`, and the number in a batch


class EvalReader:
    """Reads every held-out row once, in batches; base class of the evaluators.

    `batches()` yields lists of pairs: index of the row in the set, and the stored Row. EvalDataset
    and its subclasses yield dicts of tensors instead.

    Each evaluator has a method `score(model, group, objective, global_batch_size,
    save_examples=None)`. It gets the unwrapped model, the Group of all ranks, the objective of the
    run, the number of rows of a step, and a function to call with the content of examples.json. It
    returns metrics by name.

    Args:
        prepared: The set with the held-out rows.
        settings: Metrics to compute, rows of a batch, and the limit of rows.
        on_progress: Called with (unit, number) when a batch of `rows` or `prompts` is done; None:
            not called.

    Attributes:
        skipped: A message for each row of the last call of `batches` that cannot be read.
        class_embeddings: Embeddings of classes by their names and prompts, of sets that were scored
            with the same weights; None: they are not kept.
    """

    class_embeddings: dict[tuple[Any, ...], Tensor] | None = None

    def __init__(
        self,
        prepared: PreparedSet,
        settings: EvalSettings,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.prepared = prepared
        self.settings = settings
        self.on_progress = on_progress or (lambda unit, number: None)
        self.skipped: list[str] = []
        self._own_metrics = {
            name: load_class(name, "evaluate.metrics") for name in settings.metrics
        }

    def add_own_metrics(
        self, metrics: dict[str, float], group: Group, *inputs: object
    ) -> dict[str, float]:
        """Return metrics, and those of the functions that `evaluate.metrics` names; a collective
        call.

        Args:
            inputs: Arguments of the functions, equal on all ranks: the embeddings by modality and
                the labels, or the generated answers and their references.

        Raises:
            UsageError: A function returned the name of another metric.
            RuntimeError: A function raised an error.
        """
        for name, function in self._own_metrics.items():
            source = f"evaluate.metrics: `{name}`"
            try:
                own = {
                    metric: float(value)
                    for metric, value in function(*deepcopy(inputs)).items()  # it may change them
                }
            except Exception as error:
                raise RuntimeError(
                    f"{source} raised {type(error).__name__}: {first_line(error)}"
                ) from error
            # Those of rank 0, because a function with random numbers differs between ranks.
            metrics = merge_metrics(metrics, group.broadcast_object(own), source)
        return metrics

    def batches(
        self, rank: int = 0, world_size: int = 1, limit: int | None = None
    ) -> Iterator[Any]:
        """Yield the rows of a rank in batches of the size `evaluate.batch`.

        The ranks get contiguous parts of the set, whose sizes differ by at most one. Unreadable
        rows are added to `skipped`, which is cleared first. A batch without readable rows is
        omitted.

        Args:
            world_size: Number of ranks, which divide the rows.
            limit: Only the first `limit` rows of the set are divided; None: all.

        Yields:
            A batch: for models that embed a dict of tensors by column (see EvalDataset), for
            conversations a list of pairs (index of the row in the set, stored Row).

        Raises:
            OSError: An object store fails.
        """
        self.skipped.clear()
        num_rows = min(self.prepared.num_rows, limit or self.prepared.num_rows)
        rows = np.array_split(np.arange(num_rows), world_size)[rank]
        size = self.settings.batch
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        # A few adjacent rows per call, so a store gets one request for them.
        adjacent = np.split(rows, range(RECORD_BATCH_ROWS, len(rows), RECORD_BATCH_ROWS))
        results = chain.from_iterable(iter_parallel(self._read, adjacent, min(16, cores())))
        for part in parts:
            items: list[Any] = []
            for row, row_items in zip(part.tolist(), results, strict=False):
                if isinstance(row_items, Exception):
                    self.skip(row, row_items)
                else:
                    items += row_items
            for start in range(0, len(items), size):
                yield self._collate(items[start : start + size])
            self.on_progress("rows", len(part))

    def skip(self, number: int, error: Exception, source: str = "") -> None:
        """Add an unreadable row to `skipped`; the first of each 1000 is logged."""
        place = f" ({source})" if source else ""
        self.skipped.append(f"row {number}{place}: {error}")
        if len(self.skipped) % 1000 == 1:
            logging.getLogger(__name__).warning("evaluation skips %s", self.skipped[-1])

    def count_bad_rows(self, num_rows: int, group: Group) -> int:
        """Return the number of rows in `skipped` on all ranks, the unreadable ones; a collective
        call.

        Raises:
            DataError: No row is readable; raised on every rank.
        """
        skipped = torch.tensor([len(self.skipped)])
        bad_rows = int(group.all_gather_variable(skipped).sum())
        if not num_rows:
            first = "; ".join(self.skipped[:1])
            raise DataError(f"cannot read any of {bad_rows} evaluation rows: {first}")
        return bad_rows

    def _read(self, numbers: np.ndarray) -> list[list[Any] | Exception]:
        """Read rows; a row that fails, or whose media were changed, becomes its exception."""
        out: list[list[Any] | Exception] = []
        read = read_each_when_mounted(self.prepared, numbers)
        for number, row in zip(numbers.tolist(), read, strict=True):
            try:
                if isinstance(row, Exception):
                    raise row
                if not row.checksum_ok:
                    location = f"{row.key} ({row.source})"
                    raise BadImage("checksum", f"{location}: digest does not match the set")
                out.append(self._convert(number, row))
            except ROW_ERRORS as error:
                out.append(error)
        return out

    def _convert(self, number: int, row: Row) -> list[Any]:
        """Return the items of a row, of which batches are made, in a thread of the pool."""
        return [(number, row)]

    def _collate(self, items: list[Any]) -> Any:
        """Return a batch of items, at least one."""
        return items


class EvalRow(NamedTuple):
    """A decoded held-out row.

    Attributes:
        number: Index of the row in the set.
        columns: Inputs of the model by name: `image` uint8 [1, 3, S, S], resized and cropped.
        texts: Its captions, as the tokenizer gets them.
        label: Class of the row; -1: none.
        image_hash: Hash of the bytes of its images, int64.
    """

    number: int
    columns: Block
    texts: list[str]
    label: int
    image_hash: int


class EvalDataset(EvalReader):
    """Held-out rows as inputs of a model that embeds images and texts.

    A batch has B rows with C captions in total: `image` uint8 [B, 3, S, S]; `row` (index in the
    set), `label` (-1: none) and `image_hash` (equal for equal images) int64 [B]; `input_ids` and
    `attention_mask` int64 [C, T]; `caption_row` (index of the caption's row) and `text_hash` (equal
    for equal captions) int64 [C].

    Args:
        prepared: The set with the held-out rows.
        inputs: Image size, preprocessing and tokenization of the model.
        settings: Metrics to compute, rows of a batch, and the limit of rows.
        max_pixels: Images with more pixels are not decoded.
        on_progress: Called with (unit, number) when a batch of `rows` or `prompts` is done; None:
            not called.
        task: Compute only the metrics of `retrieval` or of `zero_shot` classification; "": both.
    """

    def __init__(
        self,
        prepared: PreparedSet,
        inputs: Inputs,
        tokenizer_json: str,
        settings: EvalSettings,
        max_pixels: int = MAX_PIXELS,
        on_progress: OnProgress | None = None,
        task: str = "",
    ) -> None:
        super().__init__(prepared, settings, on_progress)
        self.task = task
        self.inputs = inputs
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

    def collate_inputs(self, items: list[Any], texts: list[str]) -> Batch:
        """Return the tokens of texts, and the inputs of items other than images.

        Returns:
            `input_ids` and `attention_mask` int64 [C, T], and the columns by name as tensors
            [number of items, ...], such as `audio`, as a model reads them.
        """
        columns = {
            name: np.concatenate([item.columns[name] for item in items])
            for name in items[0].columns
        }
        tokens = token_columns(*self.encoder.encode(texts))
        return tokens | clip_tensors(columns)

    def _convert(self, number: int, row: Row) -> list[Any]:
        self.check_decodable(row)
        columns = self.reader.encode_row(row)  # no augmentation
        label = NO_LABEL if row.label is None else row.label
        texts = [*map(self.encoder.format_caption, row.texts)]
        image_hash = hash_key(" ".join(media.sha256 for media in row.media))
        return [EvalRow(number, columns, texts, label, image_hash)]

    def _collate(self, items: list[Any]) -> Batch:
        texts = [text for row in items for text in row.texts]
        return self.collate_inputs(items, texts) | {
            "image": torch.from_numpy(np.concatenate([row.columns["image"] for row in items])),
            "row": torch.tensor([row.number for row in items]),
            "label": torch.tensor([row.label for row in items]),
            "image_hash": torch.tensor([row.image_hash for row in items]),
            "caption_row": torch.tensor([row.number for row in items for _ in row.texts]),
            "caption_number": torch.tensor([n for row in items for n in range(len(row.texts))]),
            "text_hash": torch.tensor([hash_key(text) for text in texts]),
        }
