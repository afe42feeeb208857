"""Conversations with images, videos and audio as the inputs of a vision-language model, by its own
processor.

Image processors of transformers run in numpy (`pil`), so a data process needs no torch: about 110
MB instead of 700 MB. Pixels stay uint8; the model normalizes them on its device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from mmray.data.messages import Message, split_rejected
from mmray.data.rows import MAX_OVERHANG_S
from mmray.data.store.stored_row import Row
from mmray.data.vlm.chat_template import (
    ALL_TARGETS,
    ChatTemplate,
    RowError,
    Span,
    Targets,
    weights_of_spans,
)
from mmray.data.vlm.families import (
    GENERAL,
    budget_arguments,
    find_family,
    read_config,
    refusal,
)
from mmray.data.vlm.processor import (
    crop_arguments,
    load_frame_processor,
    load_processor,
    torch_hidden,
)
from mmray.data.vlm.video import Clip, FrameProcessor, kind_of

TOO_LONG = "tokens"  # reason of a row over `max_tokens`
# Settings of `model.inputs` that are arguments of ProcessorEncoder.
_INPUT_SETTINGS = (
    "max_tokens",
    "max_pixels",
    "min_pixels",
    "frames",
    "frame_rate",
    "frame_pixels",
)
# Outputs of a processor that are no inputs of an encoder of media.
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
_TEXT_COLUMNS = (
    *TOKEN_TYPES,
    "input_ids",
    "attention_mask",
    "offset_mapping",
    "text_replacement_offsets",
)
CHECK_SIDE = 64  # pixels of images of checks; several tokens in each family
_DTYPES = {
    "pixel_values": np.uint8,
    "input_features": np.float16,
    "pixel_attention_mask": bool,
    # As tensors of transformers: the model rounds positions down, of 1.9999999999999996 to 1.
    "second_per_grid_ts": np.float32,
}


@dataclass(frozen=True)
class EncodedRow:
    """A conversation with its media as inputs of a vision-language model, T tokens.

    Args:
        input_ids: Token ids int32 [T], with the placeholders of media.
        loss_weights: float32 [T], factors of the loss: 0 for tokens that are no targets, and the
            `weight` of the message (1 if it has none) for the assistant's.
        images: Inputs of the encoders of images, videos and audio, under the names and in the
            shapes of transformers, such as `pixel_values` (uint8, not normalized), `image_grid_thw`
            and `input_features` (log-mel spectrograms, float16). Empty without media.
        token_types: What the processor of a model without a descriptor returns for each token
            besides its id, int32 [T]: `mm_token_type_ids` or `token_type_ids`.
        rejected: The conversation with the rejected answer and the same media, if this one has the
            chosen answer of a row for dpo.
        reference: Log-probabilities of the chosen and the rejected answer by the reference model,
            float64 [2], of a row for dpo; NaN or None: not known.
    """

    input_ids: np.ndarray
    loss_weights: np.ndarray
    images: dict[str, np.ndarray] = field(default_factory=dict)
    token_types: dict[str, np.ndarray] = field(default_factory=dict)
    rejected: EncodedRow | None = None
    reference: np.ndarray | None = None

    @property
    def conversations(self) -> list[EncodedRow]:
        """This conversation, and for dpo the one with the rejected answer."""
        return [self] if self.rejected is None else [self, self.rejected]


class MediaSize(NamedTuple):
    """What determines the number of tokens of an image, a video or audio.

    Args:
        width: Upright width in pixels; 0 for audio.
        height: Upright height in pixels; 0 for audio.
        times_s: Times of the frames of a video in seconds from its start, ascending; () for others.
        samples: Number of samples of audio, at `ProcessorEncoder.audio_rate`; 0 for others.
    """

    width: int = 0
    height: int = 0
    times_s: Sequence[float] = ()
    samples: int = 0


def preference_of(row: Row) -> tuple[list[Message], list[Message]]:
    """Return the conversations with the chosen and with the rejected answer of a stored row.

    Raises:
        RowError: It has no rejected answer.
    """
    pair = split_rejected(row.messages or [])
    if pair is None:
        raise RowError("messages", "the row has no rejected answer, which objective dpo needs")
    return pair


def encoder_arguments(inputs: object) -> dict[str, Any]:
    """Return the limits of the section `model.inputs` as arguments of ProcessorEncoder; a section
    that an older version exported may lack settings.
    """
    return {name: value for name, value in vars(inputs).items() if name in _INPUT_SETTINGS}


class ProcessorEncoder:
    """Encodes conversations with the processor of a model.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
        max_tokens: Maximum number of tokens of a row. Longer rows are errors, because cutting one
            may cut an image.
        max_pixels: Maximum width x height of an image after resizing; None: the processor's
            default, as for the next one and `frame_pixels`.
        min_pixels: Minimum width x height of an image after resizing.
        frames: Most frames of a video; 0: rows with videos are errors.
        frame_rate: Frames per second of a video, unless they would be more than `frames`.
        frame_pixels: Maximum width x height of a frame after resizing.
        without_torch: Do not import torch, in a process that will not need it.

    Attributes:
        config: Content of the model's config.json.
        family: GENERAL if the model has no descriptor.
        kinds: Kinds of media that a row may have, of `image`, `video` and `audio`.
        tokenizer: The tokenizer of transformers.
        reserved_tokens: Tokens that start or end a turn or are part of a medium; other special
            tokens, such as those of boxes, stay in texts and answers.

    Raises:
        UsageError: The model is not supported, takes no videos, or has no usable chat template.
    """

    def __init__(
        self,
        weights: str,
        max_tokens: int,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
        frames: int = 0,
        frame_rate: float = 2.0,
        frame_pixels: int | None = None,
        without_torch: bool = False,
    ) -> None:
        self.weights = weights
        self.config = read_config(weights)
        self.family = find_family(self.config, weights)
        self.max_tokens = max_tokens
        self.frames = frames
        self.frame_rate = frame_rate
        self.kinds = self.family.media_kinds(frames, weights)
        is_general = self.family == GENERAL
        with torch_hidden() if without_torch and not is_general else nullcontext():
            self.processor = load_processor(weights, None if is_general else self.config)
            if is_general and not hasattr(self.processor, "image_token"):
                raise refusal(weights, self.config, "placeholders", "it has no `image_token`")
            if "video" in self.kinds:
                self.processor.video_processor = load_frame_processor(
                    weights, self.family, self.processor, frame_pixels
                )
        self.tokenizer = self.processor.tokenizer
        self._budget = budget_arguments(
            self.media_settings("image_processor"), max_pixels, min_pixels
        )
        self._image_arguments: dict[str, Any] = dict(self._budget)
        if not is_general:
            self._image_arguments |= {"do_rescale": False, "do_normalize": False}
        self._count_arguments = self._image_arguments | crop_arguments(
            self.media_settings("image_processor")
        )
        self.template = ChatTemplate(self.processor, self.kinds, weights)
        # `encode` removes them from texts, `decode` from answers.
        self.reserved_tokens = self.template.reserved_tokens
        added = self.tokenizer.added_tokens_decoder.items()
        self._reserved_ids = {
            number for number, token in added if token.content in self.reserved_tokens
        }
        self._replacements: dict[Any, str] = {}

    def media_settings(self, part: str) -> dict[str, Any]:
        """Return the settings of a part of the processor, such as `image_processor`; {}: it has no
        such part.
        """
        processor = vars(self.processor).get(part)
        return {} if processor is None else vars(processor)

    @property
    def digest(self) -> str:
        """SHA-256 as hex of what determines the tokens of a row.

        This is the version of transformers, the model type, the tokenizer, the chat template, and
        the settings of the processors of images, videos and audio.
        """
        video_processor = self.processor.video_processor if "video" in self.kinds else None
        names = ("image_processor", "feature_extractor")
        processors = [vars(self.processor).get(name) for name in names]
        parts = (
            version("transformers"),
            self.config["model_type"],
            self.tokenizer.backend_tokenizer.to_str(),
            self.tokenizer.special_tokens_map,
            self.template.source,
            self.reserved_tokens,
            self.template.turn_end,
            *(each.to_json_string() for each in processors if each is not None),
            self._image_arguments,
            video_processor and (vars(video_processor), self.frames, self.frame_rate),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def limit_pixels(self, processor: Any) -> dict[str, Any]:
        """Set the limits of images and videos in a whole processor, which then computes the same
        inputs as this encoder, up to rounding of pixels.

        Args:
            processor: The processor that transformers loads from `weights`; changed in place.

        Returns:
            Keyword arguments with which it must be called in addition, because its class replaces
            the limits of videos; usually {}.
        """
        for name, value in self._budget.items():
            setattr(processor.image_processor, name, value)
        if "video" not in self.kinds:
            return {}
        frames: FrameProcessor = self.processor.video_processor
        limits = frames.limits(self.frames, self.frame_rate)
        for name, value in limits.items():
            setattr(processor.video_processor, name, value)
        fixed = getattr(processor, "videos_kwargs", {})
        replaced = {
            name: value for name, value in limits.items() if fixed.get(name, value) != value
        }
        return {"videos_kwargs": replaced} if replaced else {}

    def encode(
        self, messages: Sequence[Message], media: Sequence[Any], targets: Targets = ALL_TARGETS
    ) -> EncodedRow:
        """Encode one row for training, without `reserved_tokens` in the texts of its messages."""
        return self.encode_all([messages], media, targets)[0]

    def encode_all(
        self,
        conversations: Sequence[Sequence[Message]],
        media: Sequence[Any],
        targets: Targets = ALL_TARGETS,
    ) -> list[EncodedRow]:
        """Encode conversations about the same media, whose inputs are computed once, if the family
        shares them.

        Args:
            media: One for each part of its kind, in order: RGB images of PIL or uint8 [H, W, 3],
                `Clip`s of videos, and mono audio int16 [N] of `audio_rate` samples per second.
            targets: Which tokens of the assistant are targets.

        Raises:
            RowError: The row has no target, too many tokens, media that do not match its parts or
                that the processor rejects, or messages that the chat template does not render.
            UsageError: The chat template does not determine which tokens are the assistant's.
        """
        rows: list[EncodedRow] = []
        inputs: dict[str, Any] = {}
        for messages in conversations:
            conversation = self._clean(messages, media)
            text, spans = self.template.target_spans(conversation, targets)
            if rows and media and self.family.shares_media:
                inputs = self._expand(text, inputs["text_replacement_offsets"][0])
                row = replace(self._encoded(inputs, spans), images=rows[0].images)
            else:
                inputs = self._process(text, media)
                row = self._encoded(inputs, spans)
            if len(row.input_ids) > self.max_tokens:
                raise RowError(
                    TOO_LONG,
                    f"{len(row.input_ids)} tokens exceed model.inputs.max_tokens {self.max_tokens}",
                )
            rows.append(row)
        return rows

    def encode_prompt(self, messages: Sequence[Message], media: Sequence[Any]) -> EncodedRow:
        """Encode a conversation up to where the model generates the assistant's next message.

        Takes what `encode` takes. The number of tokens is not limited, and all weights are 0.

        Raises:
            RowError: The media do not match the parts, or the processor rejects one.
        """
        conversation = self._clean(messages, media)
        return self._encoded(self._process(self.template.render_prompt(conversation), media), [])

    def _encoded(self, inputs: dict[str, Any], spans: Sequence[Span]) -> EncodedRow:
        weights = weights_of_spans(
            spans, inputs["offset_mapping"][0], inputs["text_replacement_offsets"][0]
        )
        input_ids = np.asarray(inputs["input_ids"][0], np.int32)
        names = [name for name in TOKEN_TYPES if name in inputs and self.family == GENERAL]
        types = {name: np.asarray(inputs[name][0], np.int32) for name in names}
        return EncodedRow(input_ids, weights, self._media_columns(inputs), types)

    def encode_dummy(self) -> EncodedRow:
        """Encode a prompt with one small blank medium of each kind that the model takes.

        It is added to a micro-batch that lacks a kind, so that the vision encoder always runs
        equally often.
        """
        parts = [{"type": kind} for kind in self.kinds]
        side = CHECK_SIDE if self.family == GENERAL else 28
        blanks = [self.blank(kind, side, length_s=0.1) for kind in self.kinds]
        return self.encode_prompt([{"role": "user", "content": parts}], blanks)

    def blank(self, kind: str, side: int, length_s: float) -> Any:
        """Return a black image or video, or silence, as `encode` takes them.

        Args:
            side: Width and height in pixels.
        """
        image = np.zeros((side, side, 3), np.uint8)
        if kind == "image":
            return image
        if kind == "audio":
            return np.zeros(self.num_samples(length_s), np.int16)
        times_s = self.choose_times(length_s, phase=0.5)
        return Clip(np.stack([image] * len(times_s)), times_s)

    @property
    def audio_rate(self) -> int:
        """Samples per second of the audio that the model takes."""
        return int(self._features.sampling_rate)

    @property
    def max_audio_s(self) -> float:
        """Longest audio that the model takes, in seconds."""
        return float(self._features.chunk_length)

    def num_samples(self, length_s: float) -> int:
        """Return the number of samples with which audio of some seconds is given to the model.

        It is a multiple of the hop length of the feature extractor. Audio shorter than the family's
        minimum is padded with silence, and up to 0.5 s over `max_audio_s` are cut.

        Raises:
            RowError: It is longer, so that a text about it would be about what the model does not
                get.
        """
        if length_s > self.max_audio_s + MAX_OVERHANG_S:
            raise RowError(
                TOO_LONG,
                f"a text is about {length_s:.1f} s of audio, and the model takes "
                f"{self.max_audio_s:g} s: cut the recording, or give its texts t0_s and t1_s",
            )
        length_s = min(max(length_s, self.family.min_audio_s), self.max_audio_s)
        # Whether an incomplete hop counts depends on the other audio of a row.
        hop = self._features.hop_length
        return int(hop * round(length_s * self.audio_rate / hop))

    @property
    def _features(self) -> Any:
        return self.processor.feature_extractor

    def count_tokens(self, messages: Sequence[Message], sizes: Sequence[MediaSize]) -> int:
        """Return how many tokens a row will have after encoding, from its texts and the sizes of
        its media.
        """
        text = self.template.render(self.template.clean(messages))
        images = [size for size in sizes if size.width and not size.times_s]
        expanded, _ = self.processor.get_text_with_replacements(
            [text],
            images_replacements=[self._replacement(size, len(images)) for size in images],
            videos_replacements=[self._clip_text(size) for size in sizes if size.times_s],
            audio_replacements=[self._audio_text(size) for size in sizes if size.samples],
        )
        return len(self._tokenize(expanded[0])["input_ids"])

    def choose_times(self, length_s: float, phase: float) -> list[float]:
        """Return the times of the frames that represent a video.

        Args:
            phase: Number in [0, 1): place of each frame in its interval; 0: its start.
        """
        frames: FrameProcessor = self.processor.video_processor
        return frames.choose_times(length_s, self.frames, self.frame_rate, phase)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the token ids of one generated sequence, without `reserved_tokens`."""
        kept = [number for number in token_ids if number not in self._reserved_ids]
        return str(self.tokenizer.decode(kept))

    def _clean(self, messages: Sequence[Message], media: Sequence[Any]) -> list[Message]:
        """Return the messages with lists of parts, without reserved tokens.

        Raises RowError unless the model takes the media, and there is one for each part.
        """
        conversation = self.template.clean(messages)
        types = [part["type"] for message in conversation for part in message["content"]]
        given = [kind_of(each) for each in media]
        for kind in ("image", "video", "audio"):
            if kind in types and kind not in self.kinds:
                raise RowError("media", f"the row has {kind}, which {self.weights} does not take")
            if types.count(kind) != given.count(kind):
                raise RowError(
                    "images",
                    f"the messages have {types.count(kind)} {kind} parts, the row "
                    f"{given.count(kind)} {kind}s",
                )
        return conversation

    def _process(self, text: str, media: Sequence[Any]) -> dict[str, Any]:
        """Call the processor on one text. Raises RowError."""
        if not media:
            encoded = self._tokenize(text, return_offsets_mapping=True)
            inputs = {name: [value] for name, value in encoded.items()}
            return inputs | {"text_replacement_offsets": [[]]}
        arguments: dict[str, Any] = {
            "images_kwargs": self._image_arguments
            | {"return_tensors": "pt" if self.family == GENERAL else "np"},
            "text_kwargs": {
                "return_tensors": None,
                "return_offsets_mapping": True,
                "add_special_tokens": self._adds_special_tokens(text),
            },
        }
        by_kind: dict[str, list[Any]] = {}
        for each in media:
            by_kind.setdefault(kind_of(each), []).append(each)
        if clips := by_kind.get("video"):
            video_processor = self.processor.video_processor
            metadata = [video_processor.metadata(clip.times_s) for clip in clips]
            arguments["videos"] = [clip.frames for clip in clips]
            arguments["videos_kwargs"] = {"video_metadata": metadata}
        if images := by_kind.get("image"):
            arguments["images"] = [images]
        if audio := by_kind.get("audio"):
            arguments["audio"] = [each.astype(np.float32) / 32768 for each in audio]
            arguments["audio_kwargs"] = {
                "sampling_rate": self.audio_rate,
                "return_tensors": "np",
            }
            if self.family.audio == "own":
                # Otherwise padded to up to 300 s, which takes 0.8 s of a core; the last spectra
                # reach into the padding.
                features = self._features
                length = max(map(len, audio)) + features.n_fft
                length += -length % features.hop_length
                arguments["audio_kwargs"]["max_length"] = min(length, features.n_samples)
        try:
            inputs = dict(
                self.processor(
                    text=[text],
                    return_text_replacement_offsets=True,
                    **arguments,
                )
            )
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            raise RowError("image", f"the processor refuses it: {error}") from None
        if "video_second_per_grid" in inputs:
            # The processors of Omni assume one frame rate for all videos.
            num_frames = video_processor.temporal_patch_size
            inputs["video_second_per_grid"] = [num_frames / each.fps for each in metadata]
        return inputs

    def _expand(self, text: str, replacements: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what `_process` returns for a text whose media it has processed for another one,
        without the inputs of media.

        Args:
            replacements: The `text_replacement_offsets` of the other text.
        """
        by_kind: dict[str, list[str]] = {"image": [], "video": [], "audio": []}
        for each in replacements:
            by_kind[each["type"]].append(each["replacement"])
        expanded, offsets = self.processor.get_text_with_replacements([text], *by_kind.values())
        encoded = self._tokenize(expanded[0], return_offsets_mapping=True).items()
        return {name: [value] for name, value in encoded} | {"text_replacement_offsets": offsets}

    def _tokenize(self, text: str, **options: object) -> dict[str, Any]:
        return dict(
            self.tokenizer(text, add_special_tokens=self._adds_special_tokens(text), **options)
        )

    def _adds_special_tokens(self, text: str) -> bool:
        """As apply_chat_template of transformers: not if the template wrote the first one."""
        first = self.tokenizer.bos_token
        return first is None or not text.startswith(first)

    def _media_columns(self, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the inputs of the encoders of media, pixels as uint8 and audio as float16."""
        columns = {}
        for name, value in inputs.items():
            if name not in _TEXT_COLUMNS:
                column = np.asarray(value)
                if self.family.pixels == "row_tiles":
                    # All rows become one row of tiles: [1, tiles, ...] -> [tiles, ...].
                    column = column[0]
                if self.family is not GENERAL:
                    column = column.astype(_DTYPES.get(name, column.dtype), copy=False)
                columns[name] = column
        return columns

    def _clip_text(self, size: MediaSize) -> str:
        """Return the text that replaces the placeholder of a video."""
        video_processor = self.processor.video_processor
        grid = video_processor.grid(len(size.times_s), size.height, size.width)
        inputs = {
            "video_grid_thw": np.array([grid]),
            "video_metadata": [video_processor.metadata(size.times_s)],
        }
        return str(self.processor.replace_video_token(inputs, 0, load_audio_from_video=False))

    def _audio_text(self, size: MediaSize) -> str:
        """Return the text that replaces the placeholder of audio."""
        if hasattr(self.processor, "_get_num_audio_tokens"):
            num_tokens = self.processor._get_num_audio_tokens(size.samples)
        else:
            hops = -(-size.samples // self._features.hop_length)
            # Two convolutions and a pooling halve the spectrogram twice.
            num_tokens = ((hops - 1) // 2 + 1 - 2) // 2 + 1
        return str(self.processor.replace_audio_token({"num_audio_tokens": [num_tokens]}, 0))

    def _replacement(self, size: MediaSize, num_images: int) -> str:
        """Return the text that replaces the placeholder of an image."""
        width = size.width
        height = size.height
        # Images of a row with several may be represented by fewer tiles.
        key: object = (width, height, num_images > 1)
        if self.family.count_is_exact:
            data = self.processor._get_num_multimodal_tokens(
                image_sizes=[(height, width)], **self._count_arguments
            )
            key = data["num_image_tokens"][0]
        if key not in self._replacements:
            count = min(num_images, 2)
            image = np.zeros((height, width, 3), np.uint8)
            inputs = self._process(self.processor.image_token * count, [image] * count)
            self._replacements[key] = inputs["text_replacement_offsets"][0][0]["replacement"]
        return self._replacements[key]
