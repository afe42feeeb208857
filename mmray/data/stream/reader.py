"""Read, decode and resize rows, choose a caption and tokenize it: row ids to the arrays of a block,
without Ray.

An unreadable row keeps its position with valid=False, so a step always has the rows of the sample
order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np

from mmray.data.images.decode import MAX_PIXELS, BadImage, decode
from mmray.data.images.patches import pixel_shape
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.images.transform import transform
from mmray.data.media.clips import NUM_CLIP_UNIFORMS, clip_columns
from mmray.data.store.mixture import PreparedMixture, read_each_when_mounted
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media, Row, hash_key
from mmray.data.stream.block_fetcher import BlockFetcher
from mmray.data.stream.blocks import NO_LABEL, TEACHER_COLUMNS, Block
from mmray.data.stream.order import (
    PADDING,
    SamplePlan,
    hash_choice,
    hash_uniform,
    weighted_choice,
)
from mmray.data.text.tokenizer import TextEncoder

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs

# Memory of a data process for the decoded images of a small set. Without them `mmray train`
# took 1.15 times as long on two cores.
IMAGE_CACHE_MB = 256.0
CRASH_NOTE = (
    "{process} died and was restarted; its blocks are read again. If no image is named as the "
    "cause, the machine may "
    "have run out of memory: lower --data.workers or --data.block-mb"
)
T = TypeVar("T")


class SetReader(ABC):
    """Reads the rows of a prepared set in the sample order; base of the readers of model inputs.

    Cheap to pickle; files are opened on first use. A subclass also implements `read_block(plan,
    positions)`, which returns arrays [R, ...] by column.

    Attributes:
        row_errors: Types of the errors of a row that cannot be used; each has `reason`, a word, and
            `detail`, a sentence.
    """

    row_errors: ClassVar[tuple[Any, ...]] = (BadImage,)

    def __init__(self, prepared: PreparedSet | PreparedMixture, max_pixels: int) -> None:
        self.prepared = prepared
        self.max_pixels = max_pixels
        # Decodes each image in a child process first; used in a process that was restarted after a
        # crash.
        self.subprocess_decoder: SubprocessDecoder | None = None
        self.fetcher = BlockFetcher(prepared) if prepared.is_cached else None
        # Whole blocks are awaited from this position of the sample order on.
        self.first_fetched: int | None = None

    def read_rows(
        self, plan: SamplePlan, positions: np.ndarray
    ) -> tuple[list[Row | None], np.ndarray, np.ndarray, np.ndarray]:
        """Read the rows at some positions of the sample order.

        Args:
            positions: int64 [R]; PADDING (-1) for no row.

        Returns:
            The rows, None for padding and for an unreadable row; their numbers in the set int64
            [R], PADDING for padding; how often the run has taken each before, int64 [R]; and the
            hash of the key of each, int64 [R], 0 for no row.
        """
        row_ids, pass_index = plan.row_ids_and_pass_indices_at(positions)
        stored = np.flatnonzero(row_ids != PADDING)
        rows: list[Row | None] = [None] * len(row_ids)
        whole_blocks = self._request_blocks(plan, positions[stored])
        read = read_each_when_mounted(self.prepared, row_ids[stored], whole_blocks)
        for index, stored_row in zip(stored.tolist(), read, strict=True):
            rows[index] = None if isinstance(stored_row, Exception) else stored_row
        row_hash = np.array([hash_key(row.key) if row else 0 for row in rows], np.int64)
        return rows, row_ids, pass_index, row_hash

    def choose_texts(
        self,
        plan: SamplePlan,
        rows: Sequence[Row | None],
        num_texts: Sequence[int],
        pass_index: np.ndarray,
        row_hash: np.ndarray,
    ) -> list[int]:
        """Choose the index of a text of each row, by the weights of `data.captions` if it has some.

        It is a pure function of seed, key and `pass_index`.

        Args:
            num_texts: Number of texts of each row to choose from, at least 1.
            pass_index: How often the run has taken each row before, int64 [R].
            row_hash: Hash of the key of each row, int64 [R].
        """
        counts = np.array(num_texts, np.int64)
        chosen: list[int] = hash_choice(plan.seed, pass_index, row_hash, counts).tolist()
        for index, row in enumerate(rows):
            if row is not None and row.text_weights and num_texts[index] > 1:
                chosen[index] = weighted_choice(
                    plan.seed, int(pass_index[index]), int(row_hash[index]), row.text_weights
                )
        return chosen

    def _request_blocks(self, plan: SamplePlan, positions: np.ndarray) -> bool:
        """Fetch the blocks of these positions and of the next window in the background; return
        whether to wait for those that are missing.

        In the first window of a process nothing was fetched ahead: its rows are read one by one
        until their blocks are there, so that the first step need not wait for all blocks of a
        window.
        """
        if self.fetcher is None or not positions.size:
            return True
        if self.first_fetched is None:
            self.first_fetched = int(positions.min()) + plan.window_positions
        in_first_window = bool(positions.min() < self.first_fetched)
        self.fetcher.request(plan, positions, in_first_window)
        return not in_first_window

    @abstractmethod
    def encode_row(self, row: Row) -> Any:
        """Return the inputs of the model for a stored row: arrays [1, ...] by column in RowReader,
        an EncodedRow in ConversationReader.

        Raises:
            Exception: The row cannot be used; one of the types in `row_errors`.
        """

    def check_media(self, media: Sequence[Media], max_pixels: int) -> None:
        """Decode media in a child process first, if this process was restarted after a crash.
        Raises BadImage.
        """
        if self.subprocess_decoder is None:
            return
        for each in media:
            if each.kind == "image":
                self.subprocess_decoder.check(each.data, max_pixels)
            else:
                self.subprocess_decoder.check_media(each.data, each.kind, max_pixels)

    def explain_bad_row(
        self, row_id: int, decoder: SubprocessDecoder
    ) -> tuple[Row | None, str, str]:
        """Read a row again that could not be used, and return the reason for quarantine.jsonl.

        Args:
            decoder: Decodes its media in a child process first, because an image may have crashed a
                worker.

        Returns:
            The row (None if it cannot be read), the reason in a word (`temporary` if the row can be
            used now), and a sentence.
        """
        try:
            stored = self.prepared.read(np.array([row_id]))[0]
        except (OSError, ValueError) as error:
            return None, "unreadable", str(error)
        if not stored.checksum_ok:
            return stored, "checksum", "the bytes differ from those that were prepared"
        outside = self.subprocess_decoder
        self.subprocess_decoder = decoder
        try:
            self.encode_row(stored)
        except self.row_errors as error:
            return stored, error.reason, error.detail
        finally:
            self.subprocess_decoder = outside
        return stored, "temporary", "readable at the second attempt"


@dataclass(frozen=True)
class Teacher:
    """Embeddings of the rows of a set by another model, which `mmray score` stored.

    Args:
        image_column: Column with the embedding of the image.
        text_column: Column with the embeddings of the captions.
        width: Dimensions of an embedding.
        logit_scale: Factor of its cosines in its own loss.
    """

    image_column: str
    text_column: str
    width: int
    logit_scale: float

    def embeddings(
        self, prepared: PreparedSet | PreparedMixture, row_ids: np.ndarray, texts: Sequence[int]
    ) -> Block:
        """Return `teacher_image`, times the logit scale, and `teacher_text`, float32 [R, D]; 0 for
        a row without embeddings.

        Args:
            row_ids: Numbers of the rows int64 [R]; PADDING for no row.
            texts: Index of the caption of each row.
        """
        image, text = np.zeros((2, len(row_ids), self.width), np.float32)
        stored = np.flatnonzero(row_ids != PADDING)
        values = prepared.columns(row_ids[stored], (self.image_column, self.text_column))
        for index, value in zip(stored.tolist(), values, strict=True):
            captions = value[self.text_column]
            if value[self.image_column] is not None and len(captions):
                image[index] = value[self.image_column]
                text[index] = captions.reshape(-1, self.width)[texts[index]]
        return dict(zip(TEACHER_COLUMNS, (self.logit_scale * image, text), strict=True))


class RowReader(SetReader):
    """Reads rows of a prepared set as inputs of a model that takes one image or one clip a row.

    Args:
        inputs: The `model.inputs` section.
        tokenizer_json: Content of the run's tokenizer.json.
        max_pixels: Maximum width x height of an image before it is resized.
        augment: The `augment` section; None for none.
        function: Name of the user's function that is applied after `augment`, `data.augment`.
        teacher: Embeddings of the rows by another model; None: none.
        image_cache_mb: Keep the decoded images, if all of the set need at most this and are not
            augmented; otherwise hits would be rare.
    """

    def __init__(
        self,
        prepared: PreparedSet | PreparedMixture,
        inputs: Inputs,
        tokenizer_json: str,
        max_pixels: int,
        augment: Augment | None = None,
        function: str | None = None,
        teacher: Teacher | None = None,
        image_cache_mb: float = 0.0,
    ):
        super().__init__(prepared, max_pixels)
        self.teacher = teacher
        self.inputs = _to_namespace(inputs)
        self.augment = None
        if augment is not None and (augment.is_active or function is not None):
            self.augment = _to_namespace(augment)
            vars(self.augment)["function"] = function
        # Frames and samples instead of one image.
        self.clips = clip_columns(self.inputs, self.augment)
        self.encoder = TextEncoder(tokenizer_json, inputs.max_tokens)
        set_bytes = prepared.num_rows * math.prod(self.pixel_shape or (math.inf,))
        is_kept = self.augment is None and set_bytes <= image_cache_mb * 1e6
        self._images: dict[int, Block] | None = {} if is_kept else None  # by row id

    @property
    def row_bytes(self) -> int:
        """Approximate bytes of a row after decoding: its pixels and token ids."""
        if self.clips is None:
            num_bytes = math.prod(pixel_shape(self.inputs))
        else:
            num_bytes = sum(column.nbytes for column in self.clips.empty(1).values())
        return num_bytes + 4 * self.inputs.max_tokens

    @property
    def pixel_shape(self) -> tuple[int, ...] | None:
        """Shape of the pixels of a row: (3, S, S), or that of patches; None for clips."""
        return pixel_shape(self.inputs) if self.clips is None else None

    def read_block(
        self, plan: SamplePlan, positions: np.ndarray, pixels: np.ndarray | None = None
    ) -> Block:
        """Read, decode and encode the rows at some positions of the sample order.

        A row with a bad image keeps its label and input_ids, but has valid False, key 0, num_tokens
        1, zero pixels and no values in further columns. Padding and unreadable rows also have label
        -1 and an empty text.

        Args:
            positions: int64 [R]; PADDING (-1) for no row.
            pixels: Memory for `image`, uint8 [R, 3, S, S]; None: new memory.

        Returns:
            The columns of `row_columns`; `input_ids` int32 [R, T], padded on the right, and
            `num_tokens` int32 [R]; `image` uint8 [R, 3, S, S], unless the model takes clips; those
            of its ClipColumns; and TEACHER_COLUMNS, if there is a teacher.
        """
        rows, row_ids, pass_index, row_hash = self.read_rows(plan, positions)
        uniforms = (
            hash_uniform(plan.seed, pass_index, row_hash, NUM_CLIP_UNIFORMS)
            if self.augment or self.clips is not None
            else [None] * len(rows)
        )
        num_texts = [len(row.texts) or 1 if row else 1 for row in rows]
        chosen = self.choose_texts(plan, rows, num_texts, pass_index, row_hash)
        texts = [
            self.encoder.format_caption("".join(row.with_text(choice).texts)) if row else ""
            for row, choice in zip(rows, chosen, strict=True)
        ]
        if pixels is None and self.pixel_shape is not None:
            pixels = np.empty((len(rows), *self.pixel_shape), np.uint8)
        valid = np.zeros(len(rows), bool)
        columns: Block = {} if self.clips is None else self.clips.empty(len(rows))
        if pixels is not None:
            columns["image"] = pixels
        for index, row in enumerate(rows):
            if row is None or not row.checksum_ok:
                continue
            with suppress(BadImage):
                encoded = self._encode(int(row_ids[index]), row, chosen[index], uniforms[index])
                for name, column in columns.items():
                    column[index] = encoded[name][0]
                valid[index] = True
        if pixels is not None:
            pixels[~valid] = 0
        if self.teacher is not None:
            columns |= self.teacher.embeddings(self.prepared, row_ids, chosen)
        input_ids, num_tokens = self.encoder.encode(texts)
        return (
            {
                "input_ids": input_ids,
                "num_tokens": np.where(valid, num_tokens, 1).astype(np.int32),
            }
            | row_columns(rows, row_hash, positions, valid)
            | columns
        )

    def _encode(self, row_id: int, row: Row, choice: int, uniforms: np.ndarray | None) -> Block:
        """Return what `encode_row` does, or did before if the images are kept."""
        if self._images is None:
            return self.encode_row(row, choice, uniforms)
        if row_id not in self._images:
            self._images[row_id] = self.encode_row(row, choice, uniforms)
        return self._images[row_id]

    def encode_row(self, row: Row, choice: int = 0, uniforms: np.ndarray | None = None) -> Block:
        if self.clips is not None:
            row = row.with_text(choice)
            self.check_media(row.media, MAX_PIXELS)
            columns = self.clips.empty(1)
            self.clips.set_row(columns, 0, row, uniforms)
            return columns
        if self.subprocess_decoder is not None:
            self.subprocess_decoder.check(
                row.image, self.max_pixels, (self.inputs, self.augment, uniforms)
            )
        rgb = decode(row.image, self.max_pixels)
        return {"image": transform(rgb, self.inputs, self.augment, uniforms)[None]}


def row_columns(
    rows: list[Row | None], row_hash: np.ndarray, positions: np.ndarray, valid: np.ndarray
) -> Block:
    """Return the columns `key` (0 for an invalid row), `label` (-1: none), `valid` and `pos`.

    Args:
        rows: None for no row.
        row_hash: Hash of the key of each row, int64 [R].
    """
    labels = [NO_LABEL if row is None or row.label is None else row.label for row in rows]
    return {
        "key": np.where(valid, row_hash, 0),
        "label": np.array(labels, np.int64),
        "valid": valid,
        "pos": positions,
    }


def _to_namespace(settings: T) -> T:
    """Copy settings to a plain object: their types would make each decode actor import pydantic and
    tyro (0.3 s).
    """
    computed = (name for name, value in vars(type(settings)).items() if isinstance(value, property))
    values = {name: getattr(settings, name) for name in (*vars(settings), *computed)}
    return cast(T, SimpleNamespace(**values))
