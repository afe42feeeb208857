"""Read rows of conversations, decode their media, and encode both with the processor of a
vision-language model: row ids to the arrays of a block.

Rows have different sizes, so a block has the bytes of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from mmray.data.images.decode import MAX_PIXELS, BadImage, decode
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.images.transform import to_pillow
from mmray.data.media.clips import full_span
from mmray.data.media.decode import BadMedia, read_audio, read_frames
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media, Row
from mmray.data.stream.blocks import Block
from mmray.data.stream.order import SamplePlan, hash_uniform
from mmray.data.stream.reader import SetReader, row_columns
from mmray.data.vlm.chat_template import ALL_TARGETS, RowError, Targets
from mmray.data.vlm.encoder import (
    TOKEN_TYPES,
    EncodedRow,
    ProcessorEncoder,
    encoder_arguments,
    preference_of,
)
from mmray.data.vlm.families import GENERAL, find_family, read_config
from mmray.data.vlm.video import Clip, clip_length_s

if TYPE_CHECKING:
    from mmray.config import Data as DataConfig
    from mmray.config import Vlm as VlmConfig

ADAPTERS_OFF = "adapters_off"  # value of `objective.reference`
# Start of the names of the arrays of a rejected answer in a record.
_REJECTED = "rejected "
# Bytes of a token in a block: Qwen3-VL has 4 patches of 1,536 values for a token of an image.
BYTES_PER_TOKEN = 6000


@dataclass(frozen=True)
class ReferenceLogProbs:
    """Log-probabilities of the answers of a set by the reference model of dpo.

    Args:
        column: Value of `objective.reference`.
        weights: The weights of the reference model, for messages.
        digest: `hash_weights` of the reference model.
    """

    column: str
    weights: str = ""
    digest: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether they are columns of the set; otherwise the model computes them without its
        adapters.
        """
        return self.column != ADAPTERS_OFF

    def of_rows(self, prepared: PreparedSet | PreparedMixture, row_ids: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of the chosen and the rejected answers of rows, float64 [R,
        2], NaN for a row without them; PADDING is any row.
        """
        if not self.is_stored:
            return np.full((len(row_ids), 2), np.nan)
        names = (f"{self.column}_chosen", f"{self.column}_rejected")
        values = prepared.columns(np.maximum(row_ids, 0), names)
        return np.array([[row[name] for name in names] for row in values], np.float64)


class ConversationReader(SetReader):
    """Reads rows of a prepared set as inputs of a vision-language model, in the sample order.

    Args:
        prepared: The set or mixture.
        spec: The `model` section, with the weights whose processor encodes the rows.
        max_pixels: Maximum width x height of an image before it is resized.
        data: The `data` section, with `targets` and `reasoning`; None: all are targets.
        references: Of a run of dpo, whose rows are chosen and rejected answers; None: rows are
            single conversations.
    """

    # A block has no column `image` of a fixed shape, which processes could share.
    pixel_shape: tuple[int, ...] | None = None
    row_errors = (BadImage, RowError)

    def __init__(
        self,
        prepared: PreparedSet | PreparedMixture,
        spec: VlmConfig,
        max_pixels: int,
        data: DataConfig | None = None,
        references: ReferenceLogProbs | None = None,
    ) -> None:
        super().__init__(prepared, max_pixels)
        self.references = references
        self._targets = ALL_TARGETS
        if data is not None:
            self._targets = Targets(data.targets == "last", data.reasoning == "masked")
        self.question = spec.inputs.question
        inputs = spec.inputs
        self._weights = spec.weights
        self._arguments = encoder_arguments(inputs)

    @cached_property
    def encoder(self) -> ProcessorEncoder:
        """The processor of the model, which is loaded on first use."""
        return ProcessorEncoder(self._weights, **self._arguments, without_torch=True)

    @property
    def row_bytes(self) -> int:
        """Approximate maximum bytes of an encoded row: its images as pixels, and its token ids."""
        family = find_family(read_config(self._weights), self._weights)
        pixel_bytes = 4 if family == GENERAL else 1  # float32
        conversations = 1 if self.references is None else 2
        max_tokens = conversations * int(self._arguments["max_tokens"])
        return pixel_bytes * BYTES_PER_TOKEN * max_tokens

    def read_block(
        self, plan: SamplePlan, positions: np.ndarray, pixels: np.ndarray | None = None
    ) -> Block:
        """Read and encode the rows at some positions of the sample order.

        Args:
            positions: int64 [R]; PADDING (-1) for no row.
            pixels: Not used, because rows have different sizes.

        Returns:
            The columns of `row_columns`, `num_tokens` int32 [R], and `record` object [R], the
            encoded row as bytes for `unpack_rows`. A row that is not valid has 0 tokens and b"".
        """
        rows, row_ids, pass_index, row_hash = self.read_rows(plan, positions)
        num_texts = [len(row.texts) if row and not row.messages else 1 for row in rows]
        chosen = self.choose_texts(plan, rows, num_texts, pass_index, row_hash)
        # Where frames are in their intervals.
        phases = hash_uniform(plan.seed, pass_index, row_hash, 1)[:, 0].tolist()
        if self.references is not None:
            references = self.references.of_rows(self.prepared, row_ids)
        # A column of bytes, because the columns of a block of Ray have equal lengths.
        records = np.full(len(rows), b"", object)
        num_tokens = np.zeros(len(rows), np.int32)
        for index, (row, choice) in enumerate(zip(rows, chosen, strict=True)):
            if row is not None and row.checksum_ok:
                try:
                    encoded = self.encode_row(row, choice, phases[index])
                except (BadImage, RowError):
                    continue
                if self.references is not None:
                    if self.references.is_stored and np.isnan(references[index]).any():
                        continue
                    encoded = replace(encoded, reference=references[index])
                records[index] = _pack_row(encoded)
                num_tokens[index] = sum(len(each.input_ids) for each in encoded.conversations)
        return row_columns(rows, row_hash, positions, num_tokens > 0) | {
            "num_tokens": num_tokens,
            "record": records,
        }

    def explain_bad_row(
        self, row_id: int, decoder: SubprocessDecoder
    ) -> tuple[Row | None, str, str]:
        row, reason, detail = super().explain_bad_row(row_id, decoder)
        if reason == "temporary" and self.references is not None:
            column = self.references.column
            values = self.references.of_rows(self.prepared, np.array([row_id]))
            if self.references.is_stored and np.isnan(values).any():
                return row, "reference", f"column {column}: `mmray score` wrote no value"
        return row, reason, detail

    def media_of(self, row: Row, choice: int = 0, phase: float = 0.5) -> list[Any]:
        """Decode the media of a stored row, as ProcessorEncoder takes them.

        Args:
            phase: Random number in [0, 1): place of each frame of a video in its interval.

        Raises:
            BadImage: A medium cannot be decoded, or has more than `max_pixels`.
            RowError: The model does not take its kind.
        """
        span = row.spans[choice] if row.spans else None
        decoded: list[Any] = []
        for media in row.media:
            if media.kind not in self.encoder.kinds:
                raise RowError("media", f"the row has {media.kind}, which the model does not take")
            self.check_media([media], self.max_pixels)
            if media.kind == "image":
                decoded.append(to_pillow(decode(media.data, self.max_pixels)))
            else:
                decoded.append(read_clip(media, self.encoder, span, phase, self.max_pixels))
        return decoded

    def encode_row(self, row: Row, choice: int = 0, phase: float = 0.5) -> EncodedRow:
        if self.references is not None:
            # The reference model saw the middles of the intervals of videos.
            decoded = self.media_of(row)
            chosen, rejected = self.encoder.encode_all(preference_of(row), decoded, self._targets)
            return replace(chosen, rejected=rejected)
        messages = row.conversations(self.question)[choice]
        # A row whose other text is about too much audio is not used either, as in token counts.
        for media in row.media:
            for span in (row.spans or [None]) if media.kind == "audio" else []:
                self.encoder.num_samples(clip_length_s(media, span))
        decoded = self.media_of(row, choice, phase)
        return self.encoder.encode(messages, decoded, self._targets)


def read_clip(
    media: Media,
    encoder: ProcessorEncoder,
    span: Sequence[float] | None = None,
    phase: float = 0.5,
    max_pixels: int = MAX_PIXELS,
) -> Clip | np.ndarray:
    """Decode the frames that represent a video, or the samples of audio.

    Args:
        media: Video or audio with its bytes.
        encoder: Determines the times of the frames, and the rate and the longest length of audio.
        span: Start and end in seconds, as timestamps of the file; None: the whole file.
        phase: Number in [0, 1): place of each frame in its interval.
        max_pixels: Maximum width x height of a frame before it is resized.

    Returns:
        A Clip, whose times are seconds from the start of the span, or mono samples int16 [N].

    Raises:
        BadMedia: It cannot be decoded, or a video has no frame in the span.
        RowError: The model does not take so much audio.
    """
    start, end = full_span(media) if span is None else span
    if media.kind == "audio":
        rate = encoder.audio_rate
        return read_audio(media.data, start, start + encoder.num_samples(end - start) / rate, rate)
    if span is not None:
        first, last = full_span(media)
        if start >= last or end <= first:
            frames_at = f"its frames are at {first:.2f} to {last:.2f} s"
            raise BadMedia("span", f"no frame at {start:.2f} to {end:.2f} s; {frames_at}")
    times_s = encoder.choose_times(end - start, phase)
    if span is not None:
        # Of a part without frames the first or last one would be repeated.
        shown_s = min(end, last) - max(start, first)
        scale = shown_s / (end - start)
        times_s = [max(0.0, first - start) + scale * time for time in times_s]
    frames, _ = read_frames(media.data, [start + time for time in times_s], max_pixels)
    return Clip(frames, times_s)


def _pack_row(row: EncodedRow) -> bytes:
    arrays = _arrays(row)
    if row.rejected is not None and row.reference is not None:
        others = _arrays(row.rejected).items()
        arrays |= {
            f"{_REJECTED}{name}": array
            for name, array in others
            if array is not row.images.get(name)
        }
        arrays["reference"] = row.reference
    # Arrays that are not contiguous would be saved wrongly.
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def _arrays(row: EncodedRow) -> dict[str, np.ndarray]:
    tokens = {"input_ids": row.input_ids, "loss_weights": row.loss_weights} | row.token_types
    return tokens | row.images


def unpack_rows(block: Block) -> list[EncodedRow | None]:
    """Return the encoded rows of a block of ConversationReader, None for invalid ones."""
    return [_unpack_row(data) if data else None for data in block["record"]]


def _unpack_row(data: bytes) -> EncodedRow:
    arrays = dict(sorted(load(data).items()))  # `load` returns them in random order
    reference = arrays.pop("reference", None)
    others = {name: arrays.pop(name) for name in [*arrays] if name.startswith(_REJECTED)}
    row = _from_arrays(arrays)
    if not others:
        return row
    rejected = _from_arrays(
        row.images | {name.removeprefix(_REJECTED): array for name, array in others.items()}
    )
    return replace(row, rejected=rejected, reference=reference)


def _from_arrays(arrays: dict[str, np.ndarray]) -> EncodedRow:
    types = {name: arrays.pop(name) for name in TOKEN_TYPES if name in arrays}
    return EncodedRow(arrays.pop("input_ids"), arrays.pop("loss_weights"), arrays, types)
