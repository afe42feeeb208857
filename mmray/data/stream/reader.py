"""Read, decode and resize rows, choose a caption and tokenize it: row ids to the arrays of a block,
without Ray.

An unreadable row keeps its position with valid=False, so a step always has the rows of the sample
order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np

from mmray.data.columns import extra_columns
from mmray.data.images.boxes import NO_LABEL
from mmray.data.images.decode import BadImage, decode
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.images.transform import transform
from mmray.data.media.clips import NUM_CLIP_UNIFORMS, ClipColumns
from mmray.data.store.mixture import PreparedMixture, read_each
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row, hash_key
from mmray.data.stream.block_fetcher import BlockFetcher
from mmray.data.stream.blocks import Block
from mmray.data.stream.order import (
    PADDING,
    SamplePlan,
    hash_choice,
    hash_uniform,
    weighted_choice,
)
from mmray.data.text.languages import build_encoder

if TYPE_CHECKING:
    from mmray.config import Augment, Inputs

# decoded images cached by a worker, if the full set fits and is not augmented
IMAGE_CACHE_MB = 256.0
CRASH_NOTE = (
    "{process} died and was restarted; its blocks are read again. If no image is named as the "
    "cause, the machine may "
    "have run out of memory: lower --data.workers or --data.block-mb"
)
T = TypeVar("T")


class DecodedImage(NamedTuple):
    """The decoded image of a row.

    Args:
        pixels: uint8 [3, S, S], after the transform to the model's image side S.
        image_size: (width, height) of the upright image before the transform.
    """

    pixels: np.ndarray
    image_size: tuple[int, int]


class SetReader(ABC):
    """Reads the rows of a prepared set in the sample order; base of the readers of model inputs.

    Cheap to pickle; files are opened on first use.

    A subclass implements `check_row`, which raises an error of `row_errors` for a row that cannot
    be used, and `read_block(plan, positions)`, which returns arrays of the rows by column.

    Args:
        prepared: The set or mixture.
        max_pixels: Maximum width x height of an image.
    """

    # Errors of a row that cannot be used; they have a `reason` and a `detail`.
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
            plan: The sample order of the run: which row each position takes.
            positions: Positions in it (how many rows the run takes before), int64 [R]; PADDING (-1)
                for no row.

        Returns:
            Four values for the R positions. The rows; None for padding and for an unreadable row.
            Row numbers in the set, int64 [R]; PADDING for padding. How often the run has taken each
            row before, int64 [R]. The hash of the key (name) of each row, int64 [R]; 0 for no row.
        """
        row_ids, pass_index = plan.row_ids_and_pass_indices_at(positions)
        stored = np.flatnonzero(row_ids != PADDING)
        rows: list[Row | None] = [None] * len(row_ids)
        whole_blocks = self._request_blocks(plan, positions[stored])
        read = read_each(self.prepared, row_ids[stored], whole_blocks=whole_blocks)
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
        """Choose one of the texts of each row, by the weights of `data.captions` if it has some.

        Args:
            plan: The sample order of the run, with its seed.
            rows: R rows; None for no row.
            num_texts: Number of texts of each row to choose from, at least 1.
            pass_index: How often the run has taken each row before, int64 [R].
            row_hash: Hash of the key (name) of each row, int64 [R].

        Returns:
            A number for each row, the same whenever the run takes it at this pass.
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
    def check_row(self, row: Row) -> None:
        """Check whether a stored row can be used for training; images are decoded in a child
        process.

        Args:
            row: A stored row: its key, images, and texts or messages.

        Raises:
            Exception: The reason, one of the types in `row_errors`.
        """

    def explain_bad_row(self, row_id: int) -> tuple[Row | None, str, str]:
        """Read a row again that could not be used, and return the reason for quarantine.jsonl.

        Args:
            row_id: Number of the row in the set.

        Returns:
            The row (None if it cannot be read), the reason in a word, and a sentence. The reason is
            `temporary` if the row can be used now.
        """
        advice = (
            "; if it is not the set, delete data.local_cache" if self.prepared.is_cached else ""
        )
        try:
            stored = self.prepared.read(np.array([row_id]))[0]
        except (OSError, ValueError) as error:
            return None, "unreadable", f"{error}{advice}"
        try:
            if not stored.checksum_ok:
                detail = f"the bytes differ from those that were prepared{advice}"
                return stored, "checksum", detail
            self.check_row(stored)  # in a child process: an image may have crashed a worker
        except self.row_errors as error:
            return stored, error.reason, error.detail
        return stored, "temporary", "readable at the second attempt"


class RowReader(SetReader):
    """Reads rows of a prepared set as inputs of a model that takes one image or one clip a row.

    `read_block(plan, positions)` returns arrays by column for R positions of the sample order:
    `image` uint8 [R, 3, S, S], `input_ids` int32 [R, T], `valid` bool [R] and others.

    Args:
        prepared: The set or mixture.
        inputs: The `model.inputs` section.
        tokenizer_json: Content of the run's tokenizer.json.
        max_pixels: Maximum width x height of an image before it is resized.
        augment: The `augment` section; None for none.
        image_cache_mb: Keep all decoded images in memory, if they need at most this and are not
            augmented.
    """

    def __init__(
        self,
        prepared: PreparedSet | PreparedMixture,
        inputs: Inputs,
        tokenizer_json: str,
        max_pixels: int,
        augment: Augment | None = None,
        image_cache_mb: float = 0.0,
    ):
        super().__init__(prepared, max_pixels)
        self.inputs = _to_namespace(inputs)
        self.augment = _to_namespace(augment) if augment is not None and augment.is_active else None
        fits = prepared.num_rows * 3 * inputs.image_side**2 <= image_cache_mb * 1e6
        self.extra_columns = extra_columns(self.inputs, self.augment)
        # Frames and samples instead of one image.
        self.takes_clips = any(isinstance(extra, ClipColumns) for extra in self.extra_columns)
        # Decoded images by row; used only if all of them fit, because hits would be rare otherwise.
        self.image_cache: dict[int, DecodedImage] | None = (
            {} if fits and self.augment is None else None
        )
        self.encoder = build_encoder(tokenizer_json, self.inputs)

    @property
    def row_bytes(self) -> int:
        """Approximate bytes of a row after decoding: its pixels and token ids."""
        columns = [column for extra in self.extra_columns for column in extra.empty(1).values()]
        num_bytes = sum(column.nbytes for column in columns) + 4 * self.inputs.max_tokens
        return num_bytes + (0 if self.pixel_shape is None else 3 * self.inputs.image_side**2)

    @property
    def pixel_shape(self) -> tuple[int, ...] | None:
        """Shape of the pixels of a row: (3, S, S); None for clips."""
        return None if self.takes_clips else (3, self.inputs.image_side, self.inputs.image_side)

    def read_block(
        self, plan: SamplePlan, positions: np.ndarray, pixels: np.ndarray | None = None
    ) -> Block:
        """Read, decode and encode the rows at some positions of the sample order.

        A row with a bad image keeps its label and input_ids, but has valid False, key 0, num_tokens
        1, zero pixels and no values in further columns. Padding and unreadable rows also have label
        -1 and an empty text.

        Args:
            plan: The sample order of the run: which row each position takes.
            positions: Positions in it (how many rows the run takes before), int64 [R]; PADDING (-1)
                for no row.
            pixels: Memory for `image`, uint8 [R, 3, S, S]; None: new memory.

        Returns:
            - `image` uint8 [R, 3, S, S], for the image side S of the model; not for clips.
            - `input_ids` int32 [R, T], padded to the longest text, and `num_tokens` int32 [R].
            - `key` int64 [R], the hash of the row key; `label` int64 [R], -1 for none.
            - `valid` bool [R]; `pos` int64 [R], the positions.
            - Further columns that the model's inputs ask for, such as `boxes`, or `video` and
              `audio`.
        """
        rows, row_ids, pass_index, row_hash = self.read_rows(plan, positions)
        uniforms = (
            hash_uniform(plan.seed, pass_index, row_hash, NUM_CLIP_UNIFORMS)
            if self.augment or self.takes_clips
            else [None] * len(rows)
        )
        texts = [(self.encoder.format_texts(row) if row else []) or [""] for row in rows]
        chosen = self.choose_texts(plan, rows, [*map(len, texts)], pass_index, row_hash)
        if pixels is None and self.pixel_shape is not None:
            pixels = np.empty((len(rows), *self.pixel_shape), np.uint8)
        valid = np.zeros(len(rows), bool)
        columns: Block = {}
        for extra in self.extra_columns:
            columns |= extra.empty(len(rows))
        for index, row in enumerate(rows):
            if row is not None and row.checksum_ok:
                with suppress(BadImage):
                    image_size = (0, 0)
                    if pixels is not None:
                        image = self.decode_row(int(row_ids[index]), row, uniforms[index])
                        pixels[index] = image.pixels
                        image_size = image.image_size
                    row_of_text = row.with_text(chosen[index]) if self.takes_clips else row
                    for extra in self.extra_columns:
                        extra.set_row(columns, index, row_of_text, image_size, uniforms[index])
                    valid[index] = True
        if pixels is not None:
            pixels[~valid] = 0
            columns["image"] = pixels
        input_ids, num_tokens = self.encoder.encode(
            [choices[n] for choices, n in zip(texts, chosen, strict=True)]
        )
        return (
            {
                "input_ids": input_ids,
                "num_tokens": np.where(valid, num_tokens, 1).astype(np.int32),
            }
            | row_columns(rows, row_hash, positions, valid)
            | columns
        )

    def check_row(self, row: Row) -> None:
        """Check whether a stored row can be used; its image is decoded in a child process.

        Args:
            row: A stored row: its key, images, and texts or messages.

        Raises:
            BadImage: The row has not one image, or it cannot be decoded.
        """
        decoder = SubprocessDecoder()
        if not self.takes_clips:
            decoder.check(row.image, self.max_pixels)
            return
        for media in row.media:
            if media.kind == "image":
                decoder.check(media.data, self.max_pixels)
            else:
                decoder.check_media(media.data, media.kind, self.max_pixels)
        # Also what a check of the file does not find, such as two videos in a row.
        for extra in self.extra_columns:
            extra.set_row(extra.empty(1), 0, row.with_text(0), (0, 0), None)

    def decode_row(self, row_id: int, row: Row, uniforms: np.ndarray | None) -> DecodedImage:
        """Return the model input of the image of a row.

        Args:
            row_id: Number of the row in the set, for the cache of images.
            row: The stored row, with one image.
            uniforms: Random numbers in [0, 1) that determine its augmentation, float64
                [NUM_UNIFORMS (49)]; None: no augmentation.

        Returns:
            Pixels uint8 [3, S, S] for the image side S of the model, and (width, height) of the
            upright image before it was resized.

        Raises:
            BadImage: The row has not one image, or it cannot be decoded.
        """
        if self.image_cache is not None and row_id in self.image_cache:
            return self.image_cache[row_id]
        if self.subprocess_decoder is not None:
            self.subprocess_decoder.check(
                row.image, self.max_pixels, (self.inputs, self.augment, uniforms)
            )
        rgb = decode(row.image, self.max_pixels)
        height, width = rgb.shape[:2]
        pixels = transform(rgb, self.inputs, self.augment, uniforms)
        image = DecodedImage(pixels, (width, height))
        if self.image_cache is not None:
            self.image_cache[row_id] = image
        return image


def row_columns(
    rows: list[Row | None], row_hash: np.ndarray, positions: np.ndarray, valid: np.ndarray
) -> Block:
    """Return the columns of some rows that every model has.

    Args:
        rows: R rows; None for no row.
        row_hash: Hash of the key (name) of each row, int64 [R].
        positions: Their positions in the sample order, int64 [R].
        valid: Whether each row can be used, bool [R].

    Returns:
        `key` int64 [R], the hash, 0 for a row that is not valid; `label` int64 [R], -1 for none;
        `valid` bool [R]; `pos` int64 [R], the positions.
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
