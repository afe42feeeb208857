"""Conversations with images, videos and audio as the inputs of a vision-language model, by its own
processor.

Image processors of transformers run in numpy (`pil`), so a data process needs no torch: about 110
MB instead of 700 MB. Pixels stay uint8; the model normalizes them on its device.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mmray.data.prepare.row_checks import MAX_OVERHANG_S
from mmray.data.text.tokenizer import remove_tokens
from mmray.data.vlm.families import (
    WEIGHTS_SETTING,
    budget_arguments,
    find_family,
    read_config,
)
from mmray.data.vlm.processor import load_frame_processor, load_processor, torch_hidden
from mmray.data.vlm.video import Clip, FrameProcessor
from mmray.errors import UsageError

Message = dict[str, Any]  # of mmray.data.messages
TEMPLATE_ADVICE = (
    "Mark the assistant's text with {% generation %} ... {% endgeneration %} in "
    "chat_template.jinja of the weights"
)
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
SEPARATE_COLUMNS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


class RowError(ValueError):
    """A row that the model cannot be trained on; it is left out and listed in quarantine.jsonl.

    Args:
        reason: `messages` (no answer), `tokens` (too many, or too long audio), `image` (a medium
            that the processor rejects), `images` (the numbers of media and of their parts differ)
            or `media` (the model takes none of this kind).
        detail: A sentence for the user, which is also the message of the error.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Targets(NamedTuple):
    """Which tokens of the assistant are targets.

    Args:
        last_only: Only those of the last message of the assistant.
        without_reasoning: Not those of its reasoning, up to and including `</think>`.
    """

    last_only: bool = False
    without_reasoning: bool = False


ALL_TARGETS = Targets()


@dataclass(frozen=True)
class EncodedRow:
    """A conversation with its media as inputs of a vision-language model, T tokens.

    Args:
        input_ids: Token ids int32 [T], with the placeholders of media.
        loss_weights: float32 [T], by which the loss of each token is multiplied: 0 for tokens that
            are no targets, and the `weight` of the message (1 if it has none) for the assistant's.
        images: Inputs of the encoders of images, videos and audio, under the names and in the
            shapes of the model's processor in transformers, such as `pixel_values` and
            `pixel_values_videos` (uint8, not normalized), `image_grid_thw`, and `input_features`
            (log-mel spectrograms, float16). Empty without media.
    """

    input_ids: np.ndarray
    loss_weights: np.ndarray
    images: dict[str, np.ndarray] = field(default_factory=dict)


class MediaSize(NamedTuple):
    """What determines the number of tokens of an image, a video or audio.

    Args:
        width: Upright width in pixels; 0 for audio.
        height: Upright height in pixels; 0 for audio.
        times_s: Times of the frames of a video in seconds from its start, ascending; () for an
            image and for audio.
        samples: Number of samples of audio, at the rate of the model's processor
            (`ProcessorEncoder.audio_rate`); 0 for others.
    """

    width: int = 0
    height: int = 0
    times_s: Sequence[float] = ()
    samples: int = 0


def encoder_arguments(inputs: Any) -> dict[str, Any]:
    """Return the limits that the section `model.inputs` sets, as keyword arguments of
    ProcessorEncoder.

    Args:
        inputs: The section as an object with the settings as attributes; one that an older version
            exported may lack settings.
    """
    return {name: getattr(inputs, name) for name in _INPUT_SETTINGS if hasattr(inputs, name)}


class ProcessorEncoder:
    """Encodes conversations with the processor of a model.

    `encode(messages, media)` takes messages {"role": "system" | "user" | "assistant", "content":
    a text or a list of parts}, and the decoded images, videos and audio of these parts. It returns
    an EncodedRow: `input_ids` int32 [T], `loss_weights` float32 [T] (0 but for the assistant's
    tokens), and `images`, the inputs of the encoders of media by name.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
        max_tokens: Maximum number of tokens of a row. Longer rows are errors, because cutting one
            may cut an image.
        max_pixels: Maximum width x height of an image after resizing; None: the processor's
            default.
        min_pixels: Minimum width x height of an image after resizing; None: the processor's
            default.
        frames: Most frames of a video; 0: rows with videos are errors.
        frame_rate: Frames per second of a video, unless they would be more than `frames`.
        frame_pixels: Maximum width x height of a frame after resizing; None: the processor's
            default.
        without_torch: Do not import torch, in a process that will not need it.

    Attributes:
        config: Content of the model's config.json.
        kinds: Kinds of media that a row may have, of `image`, `video` and `audio`.
        tokenizer: The tokenizer of transformers.
        reserved_tokens: Tokens that start or end a turn or are part of a medium. They are removed
            from texts and from answers; other special tokens, such as those of boxes, stay.

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
        with torch_hidden() if without_torch else nullcontext():
            self.processor = load_processor(weights, self.config)
            if "video" in self.kinds:
                self.processor.video_processor = load_frame_processor(
                    weights, self.family, self.processor, frame_pixels
                )
        self.tokenizer = self.processor.tokenizer
        self._budget = budget_arguments(
            self.family, getattr(self.processor, "image_processor", None), max_pixels, min_pixels
        )
        self._image_arguments = {"do_rescale": False, "do_normalize": False} | self._budget
        if self.processor.chat_template is None:
            raise UsageError(
                f"{WEIGHTS_SETTING}: {weights} has no chat template, so conversations cannot be "
                "written as its model expects. Add chat_template.jinja to a copy of the folder"
            )
        self._template = self.processor._resolve_chat_template(None)
        self._has_marks = re.search(r"{%-?\s*generation\b", self._template) is not None
        # Tokens that `encode` removes from texts and `decode` from answers, the longest first.
        reserved = self._find_reserved_tokens()
        self.reserved_tokens = sorted(reserved, key=lambda token: (-len(token), token))
        added = self.tokenizer.added_tokens_decoder.items()
        self._reserved_ids = {number for number, token in added if token.content in reserved}
        self._replacements: dict[Any, str] = {}

    @property
    def digest(self) -> str:
        """SHA-256 as hex of what determines the tokens of a row.

        This is the version of transformers, the model type, the tokenizer, the chat template, and
        the settings of the processors of images, videos and audio.
        """
        video_processor = getattr(self.processor, "video_processor", None)
        names = ("image_processor", "feature_extractor")
        processors = [getattr(self.processor, name, None) for name in names]
        parts = (
            version("transformers"),
            self.config["model_type"],
            self.tokenizer.backend_tokenizer.to_str(),
            self.tokenizer.special_tokens_map,
            self._template,
            self.reserved_tokens,
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
        """Encode one row for training, without `reserved_tokens` in the texts of its messages.

        Args:
            messages: Messages {"role": "system" | "user" | "assistant", "content": ...}, where the
                content is a text or a list of parts {"type": "image" | "video" | "audio"} and
                {"type": "text", "text": "..."}.
            media: RGB images of PIL or uint8 [H, W, 3], `Clip`s of videos (frames uint8 [F, H, W,
                3] and their times in seconds), and mono audio int16 [N] with as many samples per
                second as this object's `audio_rate`: one for each part of its kind, in order.
            targets: Which tokens of the assistant are targets.

        Raises:
            RowError: The row has no target, too many tokens, media that do not match its parts or
                that the processor rejects, or messages that the chat template does not render.
            UsageError: The chat template does not determine which tokens are the assistant's.
        """
        conversation = self._as_parts(messages)
        self._check_media(conversation, media)
        text, spans = self._target_spans(conversation, targets)
        inputs = self._process(text, media)
        input_ids = np.asarray(inputs["input_ids"][0], np.int32)
        if len(input_ids) > self.max_tokens:
            raise RowError(
                TOO_LONG,
                f"{len(input_ids)} tokens exceed model.inputs.max_tokens {self.max_tokens}",
            )
        loss_weights = _weights_of_spans(
            self._without_media(text, spans),
            inputs["offset_mapping"][0],
            inputs.get("text_replacement_offsets") or [[]],
        )
        return EncodedRow(input_ids, loss_weights, self._media_columns(inputs) if media else {})

    def encode_prompt(self, messages: Sequence[Message], media: Sequence[Any]) -> EncodedRow:
        """Encode a conversation up to where the model generates the assistant's next message.

        Args:
            media: RGB images of PIL or uint8 [H, W, 3], `Clip`s of videos (frames uint8 [F, H, W,
                3] and their times in seconds), and mono audio int16 [N] with as many samples per
                second as this object's `audio_rate`: one for each part of its kind, in order.

        Returns:
            An EncodedRow: `input_ids` int32 [T], `images`, the inputs of the encoders of media by
            name, and `loss_weights`, 0 everywhere. The number of tokens is not limited.

        Raises:
            RowError: The media do not match the parts, or the processor rejects one.
        """
        conversation = self._as_parts(messages)
        self._check_media(conversation, media)
        text, _ = self._render(conversation, add_generation_prompt=True)
        self._check_rendered(conversation, text)
        inputs = self._process(text, media)
        input_ids = np.asarray(inputs["input_ids"][0], np.int32)
        return EncodedRow(
            input_ids,
            np.zeros(len(input_ids), np.float32),
            self._media_columns(inputs) if media else {},
        )

    def encode_dummy(self) -> EncodedRow:
        """Encode a prompt without targets, with one small blank medium of each kind that the model
        takes.

        It is added to a micro-batch that lacks a kind, so that the vision encoder always runs
        equally often.

        Returns:
            An EncodedRow: `input_ids` int32 [T], `loss_weights` float32 [T], 0 everywhere, and
            `images`, the inputs of the vision encoder by name, such as `pixel_values`.
        """
        parts = [{"type": kind} for kind in self.kinds]
        blanks = [self.blank(kind, side=28, length_s=0.1) for kind in self.kinds]
        return self.encode_prompt([{"role": "user", "content": parts}], blanks)

    def blank(self, kind: str, side: int, length_s: float) -> Any:
        """Return a black image or video, or silence.

        Args:
            side: Width and height in pixels.

        Returns:
            An image uint8 [side, side, 3]; a `Clip` with `frames` uint8 [F, side, side, 3] and
            their `times_s` in seconds; or audio int16 [N] of `audio_rate` samples per second.
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
        """Return the number of samples that audio of some seconds is given to the model with.

        These are samples at `audio_rate` per second (the rate of the model's feature extractor),
        rounded to a multiple of the extractor's hop length. Shorter audio than the family's minimum
        (0.1 s for most) gets the number of the minimum: it is padded with silence.

        Args:
            length_s: Length of the audio in seconds. Up to 0.5 s over `max_audio_s` (the longest
                that the model takes) are cut.

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

        Args:
            messages: Messages {"role": "system" | "user" | "assistant", "content": ...}, where the
                content is a text or a list of parts {"type": "image" | "video" | "audio"} and
                {"type": "text", "text": "..."}.
        """
        text, _ = self._render(self._as_parts(messages))
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

        There are `frame_rate` frames per second, at most `frames` in all (arguments of this
        encoder), at equal distances; their number is a multiple of 2, the frames of a patch.

        Args:
            length_s: Length of the video in seconds.
            phase: Number in [0, 1): place of each frame in its interval, the time from a frame to
                the next; 0: its start.
        """
        frames: FrameProcessor = self.processor.video_processor
        return frames.choose_times(length_s, self.frames, self.frame_rate, phase)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids (one sequence that the model generated), without
        `reserved_tokens`.
        """
        kept = [number for number in token_ids if number not in self._reserved_ids]
        return str(self.tokenizer.decode(kept))

    # --- templates

    def _as_parts(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with lists of parts, without `reserved_tokens` in their texts."""
        conversation = []
        for message in messages:
            cleaned = [
                {"type": "text", "text": remove_tokens(part["text"], self.reserved_tokens)}
                if part["type"] == "text"
                else {"type": part["type"]}
                for part in _content_parts(message["content"])
            ]
            fields = {
                name: self._clean(value) for name, value in message.items() if name != "content"
            }
            # `developer` is the later name of OpenAI.
            if message["role"] == "developer" and "developer" not in self._template:
                fields["role"] = "system"
            conversation.append(fields | {"content": cleaned})
        return conversation

    def _clean(self, value: Any) -> Any:
        """Return a JSON value without `reserved_tokens` in its texts."""
        if isinstance(value, str):
            return remove_tokens(value, self.reserved_tokens)
        if isinstance(value, list):
            return [self._clean(each) for each in value]
        if isinstance(value, dict):
            return {name: self._clean(each) for name, each in value.items()}
        return value

    def _find_reserved_tokens(self) -> set[str]:
        """Return the special tokens that the template writes around turns and media, and those that
        tokenizer and processor name, such as `eos_token` and `image_token`.
        """
        from jinja2 import TemplateError

        parts = [*({"type": kind} for kind in self.kinds), {"type": "text", "text": "x"}]
        turns = [{"role": role, "content": parts} for role in ("user", "assistant", "user")]
        turns[1] = turns[1] | {"content": parts[-1:]}
        rendered = ""
        for system in ([{"role": "system", "content": parts[-1:]}], []):
            with suppress(TemplateError, RowError):  # some take no system
                rendered += self._render(system + turns)[0]
        added = self.tokenizer.added_tokens_decoder.values()
        in_template = {each.content for each in added if each.special and each.content in rendered}
        named = chain(self.tokenizer.special_tokens_map.items(), vars(self.processor).items())
        return in_template | {
            value for name, value in named if name.endswith("_token") and isinstance(value, str)
        }

    def _render(
        self, conversation: list[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the character spans that the template marks.

        Raises RowError.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [
            {name: value for name, value in message.items() if name not in ("weight", "tools")}
            for message in conversation
        ]
        try:
            rendered: Any = render_jinja_template(
                conversations=[turns],
                tools=conversation[0].get("tools") if conversation else None,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=self._has_marks,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError("messages", f"the chat template cannot render it: {error}") from None
        texts, spans = rendered
        return texts[0], [(first, last) for first, last in spans[0]] if self._has_marks else []

    def _target_spans(
        self, conversation: list[Message], targets: Targets
    ) -> tuple[str, list[tuple[int, int, float]]]:
        """Return the text of a conversation, and its spans of targets: first character, last
        character + 1, and weight.
        """
        text, marked = self._render(conversation)
        self._check_rendered(conversation, text)
        answers = [index for index, each in enumerate(conversation) if each["role"] == "assistant"]
        spans = []
        for number, index in enumerate(answers):
            weight = conversation[index].get("weight", 1.0)
            if not weight or (targets.last_only and index != answers[-1]):
                continue
            if len(marked) == len(answers):
                turn = [marked[number]]
            elif self._has_marks:  # the template marks parts of a turn
                first, stop = (
                    len(self._render(conversation[:end])[1]) for end in (index, index + 1)
                )
                turn = marked[first:stop]
            else:
                turn = [self._turn_span(conversation, index, text)]
            for first, last in turn:
                if targets.without_reasoning:
                    first = _after_reasoning(conversation[index], text, first, last)
                spans.append((first, last, weight))
        if not spans:
            raise RowError("messages", "no message is the assistant's: there is nothing to learn")
        return text, spans

    def _check_rendered(self, conversation: list[Message], text: str) -> None:
        """Raise RowError if the text of a conversation lacks a part of it.

        Templates may drop the reasoning of earlier answers, and write the result of a tool as JSON.
        """
        advice = f": correct chat_template.jinja of {self.weights}, or the rows"
        for message in conversation:
            for part in message["content"]:
                own = part.get("text", "").rpartition("</think>")[2].strip()
                if own not in text and json.dumps(own, ensure_ascii=False)[1:-1] not in text:
                    raise RowError(
                        "messages",
                        "the chat template does not render a message of the "
                        f"{message['role']}{advice}",
                    )
        for name in ("tool_calls", "tools", "reasoning_content"):
            having = [number for number, each in enumerate(conversation, 1) if name in each]
            if not having:
                continue
            # Reasoning is rendered in the last answer.
            turns = conversation[: having[-1]] if name == "reasoning_content" else conversation
            without = [
                {field: value for field, value in message.items() if field != name}
                for message in turns
            ]
            if self._render(without)[0] == self._render(turns)[0]:
                raise RowError("messages", f"the chat template does not render `{name}`{advice}")

    def _turn_span(self, conversation: list[Message], index: int, text: str) -> tuple[int, int]:
        """Return the span of an answer in the text of a conversation, by the texts of its starts.

        It ends with the token at which the model stops; a line break after it is the template's.
        """
        before, _ = self._render(conversation[:index], add_generation_prompt=True)
        after, _ = self._render(conversation[: index + 1])
        if text.startswith(after) and after.startswith(before):
            return len(before), len(after.rstrip())
        # Templates omit the reasoning of earlier turns, and may start that of the next answer: find
        # the answer by its header, which no text contains.
        start = before.removeprefix(self._render(conversation[:index])[0])
        header, tag, rest = start.partition("<think>")
        headers = [found.end() for found in re.finditer(re.escape(header), text)]
        roles = [message["role"] for message in conversation]
        eos = self.tokenizer.eos_token
        if header.strip() and len(headers) == roles.count("assistant"):
            first = headers[roles[:index].count("assistant")]
            first += len(tag + rest) if text.startswith(tag + rest, first) else 0
            end = text.find(eos, first)
            if end >= 0:
                return first, end + len(eos)
        message = (
            "the chat template does not mark the assistant's text, and the text of a conversation "
            f"does not start with the text of its first {index + 1} messages, so it is unknown "
            f"which tokens are the assistant's. {TEMPLATE_ADVICE}"
        )
        if self._keeps_starts:
            raise RowError("messages", message)
        raise UsageError(f"{WEIGHTS_SETTING}: {message}")

    @cached_property
    def omitted_reasoning(self) -> tuple[str, ...]:
        """In which notations the chat template omits the reasoning of answers before the last
        question: `reasoning_content`, the field, and `</think>` in a text.
        """
        question = {"role": "user", "content": [{"type": "text", "text": "a"}]}
        omitted = []
        for name, text, fields in (
            ("reasoning_content", "b", {"reasoning_content": "\ue000"}),
            ("</think>", "<think>\n\ue000\n</think>\n\nb", {}),
        ):
            answer = {"role": "assistant", "content": [{"type": "text", "text": text}]} | fields
            with suppress(RowError):  # no template of such conversations
                last, earlier = (
                    "\ue000" in self._render([question, answer, *rest])[0]
                    for rest in ([], [question])
                )
                if last and not earlier:
                    omitted.append(name)
        return tuple(omitted)

    @cached_property
    def _keeps_starts(self) -> bool:
        """Whether the text of a plain answer starts with that of its prompt."""
        text = [{"type": "text", "text": "a"}]
        turns = [{"role": role, "content": text} for role in ("user", "assistant")]
        prompt, _ = self._render(turns[:1], add_generation_prompt=True)
        return self._render(turns)[0].startswith(prompt)

    def _without_media(
        self, text: str, spans: list[tuple[int, int, float]]
    ) -> list[tuple[int, int, float]]:
        """Return the parts of spans of a rendered text that do not stand for media."""
        parts = []
        for first, last, weight in spans:
            for medium in self._media_pattern.finditer(text, first, last):
                parts.append((first, medium.start(), weight))
                first = medium.end()
            parts.append((first, last, weight))
        return [part for part in parts if part[0] < part[1]]

    @cached_property
    def _media_pattern(self) -> re.Pattern[str]:
        """What the chat template writes for a medium, such as <|vision_start|>, the placeholder and
        <|vision_end|>.
        """
        alternatives = []
        for kind in self.kinds:
            first, last = ({"type": "text", "text": each} for each in "\ue000\ue001")
            content = [first, {"type": kind}, last]
            text, _ = self._render([{"role": "user", "content": content}])
            placeholder = getattr(self.processor, f"{kind}_token")
            between = re.search(f"\ue000(.*{re.escape(placeholder)}.*)\ue001", text, re.DOTALL)
            alternatives.append(re.escape(between[1] if between else placeholder))
        return re.compile("|".join(alternatives))

    # --- processor

    def _check_media(self, conversation: Sequence[Message], media: Sequence[Any]) -> None:
        """Raise RowError unless the model takes the media, and there is one for each part."""
        types = [part["type"] for message in conversation for part in message["content"]]
        given = [_kind_of(each) for each in media]
        for kind in ("image", "video", "audio"):
            if kind in types and kind not in self.kinds:
                raise RowError("media", f"the row has {kind}, which {self.weights} does not take")
            if types.count(kind) != given.count(kind):
                raise RowError(
                    "images",
                    f"the messages have {types.count(kind)} {kind} parts, the row "
                    f"{given.count(kind)} {kind}s",
                )

    def _process(self, text: str, media: Sequence[Any]) -> dict[str, Any]:
        """Call the processor on one text. Raises RowError."""
        if not media:
            return {
                name: [value]
                for name, value in self._tokenize(text, return_offsets_mapping=True).items()
            }
        arguments: dict[str, Any] = {
            "images_kwargs": self._image_arguments | {"return_tensors": "np"},
            "text_kwargs": {
                "return_offsets_mapping": True,
                "add_special_tokens": self._adds_special_tokens(text),
            },
        }
        by_kind: dict[str, list[Any]] = {}
        for each in media:
            by_kind.setdefault(_kind_of(each), []).append(each)
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

    def _tokenize(self, text: str, **options: Any) -> dict[str, Any]:
        return dict(
            self.tokenizer(text, add_special_tokens=self._adds_special_tokens(text), **options)
        )

    def _adds_special_tokens(self, text: str) -> bool:
        """As apply_chat_template of transformers: not if the template wrote the first one."""
        first = self.tokenizer.bos_token
        return first is None or not text.startswith(first)

    def _media_columns(self, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the inputs of the encoders of media, pixels as uint8 and audio as float16."""
        columns = {
            name: np.asarray(value)
            for name, value in inputs.items()
            if name not in (*SEPARATE_COLUMNS, "offset_mapping", "text_replacement_offsets")
        }
        if self.family.pixels == "row_tiles":
            # All rows become one row of tiles: [1, tiles, ...] -> [tiles, ...].
            columns = {name: value[0] for name, value in columns.items()}
        if "pixel_values" in columns:
            columns["pixel_values"] = columns["pixel_values"].astype(np.uint8)
        if "input_features" in columns:
            columns["input_features"] = columns["input_features"].astype(np.float16)
        if "pixel_attention_mask" in columns:
            columns["pixel_attention_mask"] = columns["pixel_attention_mask"].astype(bool)
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
        key: Any = (width, height, num_images > 1)
        if self.family.count_is_exact:
            data = self.processor._get_num_multimodal_tokens(
                image_sizes=[(height, width)], **self._image_arguments
            )
            key = data["num_image_tokens"][0]
        if key not in self._replacements:
            count = min(num_images, 2)
            image = np.zeros((height, width, 3), np.uint8)
            inputs = self._process(self.processor.image_token * count, [image] * count)
            self._replacements[key] = inputs["text_replacement_offsets"][0][0]["replacement"]
        return self._replacements[key]


def _content_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of a message as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _kind_of(medium: Any) -> str:
    if isinstance(medium, Clip):
        return "video"
    return "audio" if getattr(medium, "ndim", 3) == 1 else "image"


def _after_reasoning(message: Message, text: str, first: int, last: int) -> int:
    """Return where the answer starts in the span of a turn, after its reasoning."""
    for end in ("</think>", message.get("reasoning_content") or "</think>"):
        start = text.rfind(end, first, last)
        if start >= 0:
            rest = text[start + len(end) : last]
            return last - len(rest.lstrip())
    return first


def _weights_of_spans(
    spans: list[tuple[int, int, float]], offsets: Any, replacements: list[list[dict[str, Any]]]
) -> np.ndarray:
    """Return float32 [T]: the weight of tokens that overlap a span, 0 for others.

    Args:
        spans: First character, last character + 1 and weight of each, in the text before its
            placeholders were replaced; none has a placeholder.
        offsets: Character spans of the tokens in the text after the replacements [T, 2].
        replacements: `text_replacement_offsets` of the processor.
    """
    start, stop = np.asarray(offsets, np.int64).reshape(-1, 2).T
    is_text = stop > start
    weights = np.zeros(len(start), np.float32)
    for first, last, weight in spans:
        shift = 0
        for replaced in replacements[0]:
            if replaced["span"][1] <= first:
                shift = replaced["new_span"][1] - replaced["span"][1]
        weights[is_text & (start < last + shift) & (stop > first + shift)] = weight
    return weights
