"""Conversations with images as the inputs of a vision-language model, by its own processor.

Image processors of transformers run in numpy (`pil`), so a data process needs no torch: about 110
MB instead of 700 MB. Pixels stay uint8; the model normalizes them on its device.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from mmray.data.text.tokenizer import remove_tokens
from mmray.data.vlm.families import (
    WEIGHTS_SETTING,
    budget_arguments,
    find_family,
    read_config,
)
from mmray.errors import UsageError

Message = dict[str, Any]
TEMPLATE_ADVICE = (
    "Mark the assistant's text with {% generation %} ... {% endgeneration %} in "
    "chat_template.jinja of the weights"
)
TOO_LONG = "tokens"  # reason of a row over `max_tokens`
SEPARATE_COLUMNS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


class RowError(ValueError):
    """A row that the model cannot be trained on, which is then quarantined.

    Args:
        reason: Short word: `messages` (no answer), `tokens` (too many), `image` (rejected by the
            processor) or `images` (their number differs from the image parts).
        detail: A sentence for the user.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class EncodedRow:
    """Inputs of one row of T tokens.

    Args:
        input_ids: int32 [T].
        loss_mask: bool [T], True for the assistant's tokens.
        images: Inputs of the vision encoder by name, as the processor returns them, such as
            `pixel_values` (uint8, not normalized) and `image_grid_thw`. Empty without images.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    images: dict[str, np.ndarray] = field(default_factory=dict)


class ProcessorEncoder:
    """Encodes conversations with the processor of a model.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
        max_tokens: Maximum number of tokens of a row. Longer rows are errors, because cutting one
            may cut an image.
        max_pixels: Maximum width x height of an image after resizing; None: the processor's
            default.
        min_pixels: Minimum width x height of an image after resizing; None: the processor's
            default.
        without_torch: Do not import torch, in a process that will not need it.

    Raises:
        UsageError: The model is not supported, or has no usable chat template.
    """

    def __init__(
        self,
        weights: str,
        max_tokens: int,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
        without_torch: bool = False,
    ) -> None:
        self.weights = weights
        self.config = read_config(weights)
        self.family = find_family(self.config, weights)
        self.max_tokens = max_tokens
        with _torch_hidden() if without_torch else nullcontext():
            self.processor = load_processor(weights, self.config)
        self.tokenizer = self.processor.tokenizer
        self._image_arguments = {"do_rescale": False, "do_normalize": False} | budget_arguments(
            self.family, self.processor.image_processor, max_pixels, min_pixels
        )
        if self.processor.chat_template is None:
            raise UsageError(
                f"{WEIGHTS_SETTING}: {weights} has no chat template, so conversations cannot be "
                "written as its model expects. Add chat_template.jinja to a copy of the folder"
            )
        self._template = self.processor._resolve_chat_template(None)
        self._has_marks = re.search(r"{%-?\s*generation\b", self._template) is not None
        self._special_tokens = sorted(self._user_forbidden_tokens(), key=len, reverse=True)
        self._replacements: dict[Any, str] = {}

    @property
    def digest(self) -> str:
        """SHA-256 as hex of what determines the tokens of a row.

        This is the version of transformers, the model type, the tokenizer, the chat template, and
        the settings of the image processor.
        """
        parts = (
            version("transformers"),
            self.config["model_type"],
            self.tokenizer.backend_tokenizer.to_str(),
            self.tokenizer.special_tokens_map,
            self._template,
            self.processor.image_processor.to_json_string(),
            self._image_arguments,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def encode(self, messages: Sequence[Message], images: Sequence[Any]) -> EncodedRow:
        """Encode one row for training. Special tokens in the texts of its messages are removed.

        Args:
            messages: Messages {role, content}. content is a text or a list of parts
                {"type": "image"} and {"type": "text", "text": "..."}.
            images: RGB images of PIL or uint8 [H, W, 3], one for each image part, in order.

        Returns:
            Token ids [T], the mask of the assistant's tokens, and the inputs of the vision encoder.

        Raises:
            RowError: The row has no answer, too many tokens, or images that do not match its image
                parts or that the processor rejects.
            UsageError: The chat template does not determine which tokens are the assistant's.
        """
        conversation = self._as_parts(messages)
        _check_images(conversation, images)
        text, spans = self._render_with_spans(conversation)
        if not spans:
            raise RowError("messages", "no message is the assistant's: there is nothing to learn")
        inputs = self._process(text, images)
        input_ids = np.asarray(inputs["input_ids"][0], np.int32)
        if len(input_ids) > self.max_tokens:
            raise RowError(
                TOO_LONG,
                f"{len(input_ids)} tokens exceed model.inputs.max_tokens {self.max_tokens}",
            )
        loss_mask = _mask_of_spans(
            spans, inputs["offset_mapping"][0], inputs.get("text_replacement_offsets") or [[]]
        )
        return EncodedRow(input_ids, loss_mask, self._image_columns(inputs) if images else {})

    def encode_prompt(self, messages: Sequence[Message], images: Sequence[Any]) -> EncodedRow:
        """Encode a conversation up to where the model generates the assistant's next message.

        Args:
            messages: Messages {role, content}. content is a text or a list of parts
                {"type": "image"} and {"type": "text", "text": "..."}.
            images: RGB images of PIL or uint8 [H, W, 3], one for each image part, in order.

        Returns:
            Token ids [T] and the inputs of the vision encoder; `loss_mask` is False everywhere. The
            number of tokens is not limited.

        Raises:
            RowError: The images do not match the image parts, or the processor rejects one.
        """
        conversation = self._as_parts(messages)
        _check_images(conversation, images)
        text, _ = self._render(conversation, add_generation_prompt=True)
        inputs = self._process(text, images)
        input_ids = np.asarray(inputs["input_ids"][0], np.int32)
        return EncodedRow(
            input_ids,
            np.zeros(len(input_ids), bool),
            self._image_columns(inputs) if images else {},
        )

    def encode_dummy(self) -> EncodedRow:
        """Encode a prompt with one blank image of 28 x 28 pixels and without targets.

        It is added to a micro-batch without images, so that the vision encoder always runs.

        Returns:
            Token ids [T], a `loss_mask` that is False everywhere, and the inputs of the vision
            encoder.
        """
        blank = np.zeros((28, 28, 3), np.uint8)
        return self.encode_prompt([{"role": "user", "content": [{"type": "image"}]}], [blank])

    def count_tokens(self, messages: Sequence[Message], sizes: Sequence[tuple[int, int]]) -> int:
        """Return how many tokens a row will have after encoding, from its texts and the sizes of
        its images.

        Args:
            messages: Messages {role, content}. content is a text or a list of parts {"type":
                "image"} and {"type": "text", "text": "..."}.
            sizes: (width, height) in pixels of the image of each image part, in order.
        """
        text, _ = self._render(self._as_parts(messages))
        texts = [self._replacement(size, len(sizes)) for size in sizes]
        expanded, _ = self.processor.get_text_with_replacements([text], images_replacements=texts)
        return len(self._tokenize(expanded[0])["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated token ids, without special tokens and white space at its
        ends.
        """
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True)).strip()

    # --- templates

    def _as_parts(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with lists of parts, without special tokens in their texts."""
        conversation = []
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            cleaned = [
                {"type": "text", "text": remove_tokens(part["text"], self._special_tokens)}
                if part["type"] == "text"
                else {"type": part["type"]}
                for part in parts
            ]
            conversation.append({"role": message["role"], "content": cleaned})
        return conversation

    def _user_forbidden_tokens(self) -> list[str]:
        """Special tokens, which would end a turn or stand for an image inside a text."""
        added = self.tokenizer.added_tokens_decoder.values()
        return [token.content for token in added if token.special]

    def _render(
        self, conversation: list[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the character spans that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[conversation],
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=self._has_marks,
            **self.tokenizer.special_tokens_map,
        )
        texts, spans = rendered
        return texts[0], [(first, last) for first, last in spans[0]] if self._has_marks else []

    def _render_with_spans(self, conversation: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the character spans of the assistant's turns."""
        text, spans = self._render(conversation)
        if self._has_marks:
            return text, spans
        for index, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(conversation[:index], add_generation_prompt=True)
            after, _ = self._render(conversation[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise UsageError(
                    f"{WEIGHTS_SETTING}: the chat template does not mark the assistant's text, "
                    "and the text of a conversation does not start with the text of its first "
                    f"{index + 1} messages, so it is unknown which tokens are the assistant's. "
                    f"{TEMPLATE_ADVICE}"
                )
            # The model stops at the token that ends its turn; a line break after it is the
            # template's.
            spans.append((len(before), len(after.rstrip())))
        return text, spans

    # --- processor

    def _process(self, text: str, images: Sequence[Any]) -> dict[str, Any]:
        """Call the processor on one text. Raises RowError."""
        if not images:
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
        try:
            return dict(
                self.processor(
                    text=[text],
                    images=[list(images)],
                    return_text_replacement_offsets=True,
                    **arguments,
                )
            )
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            raise RowError("image", f"the processor refuses it: {error}") from None

    def _tokenize(self, text: str, **options: Any) -> dict[str, Any]:
        return dict(
            self.tokenizer(text, add_special_tokens=self._adds_special_tokens(text), **options)
        )

    def _adds_special_tokens(self, text: str) -> bool:
        """As apply_chat_template of transformers: not if the template wrote the first one."""
        first = self.tokenizer.bos_token
        return first is None or not text.startswith(first)

    def _image_columns(self, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        """Return the inputs of the vision encoder, `pixel_values` as uint8."""
        columns = {
            name: np.asarray(value)
            for name, value in inputs.items()
            if name not in (*SEPARATE_COLUMNS, "offset_mapping", "text_replacement_offsets")
        }
        if self.family.pixels == "row_tiles":
            # All rows become one row of tiles: [1, tiles, ...] -> [tiles, ...].
            columns = {name: value[0] for name, value in columns.items()}
        columns["pixel_values"] = columns["pixel_values"].astype(np.uint8)
        if "pixel_attention_mask" in columns:
            columns["pixel_attention_mask"] = columns["pixel_attention_mask"].astype(bool)
        return columns

    def _replacement(self, size: tuple[int, int], num_images: int) -> str:
        """Return the text that replaces the placeholder of an image (width, height)."""
        width, height = size
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


def _check_images(conversation: Sequence[Message], images: Sequence[Any]) -> None:
    """Raise RowError unless there is an image for each image part."""
    num_parts = sum(
        part["type"] == "image" for message in conversation for part in message["content"]
    )
    if num_parts != len(images):
        raise RowError(
            "images", f"the messages have {num_parts} image parts, the row {len(images)} images"
        )


def _mask_of_spans(
    spans: list[tuple[int, int]], offsets: Any, replacements: list[list[dict[str, Any]]]
) -> np.ndarray:
    """Return bool [T]: tokens that overlap a character span of the text before its placeholders
    were replaced.

    Args:
        spans: First and last character + 1 of each.
        offsets: Character spans of the tokens in the text after the replacements [T, 2].
        replacements: `text_replacement_offsets` of the processor.
    """
    start, stop = np.asarray(offsets, np.int64).reshape(-1, 2).T
    is_text = stop > start
    mask = np.zeros(len(start), bool)
    for first, last in spans:
        shift = 0
        for replaced in replacements[0]:
            if replaced["span"][1] <= first:
                shift = replaced["new_span"][1] - replaced["span"][1]
        mask |= is_text & (start < last + shift) & (stop > first + shift)
    return mask


# --- loading


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Scope in which transformers does not find torch, unless one of them was imported before.

    transformers imports torch whenever it is installed, which costs 600 MB in each data process.
    It checks once, so other packages can import torch afterwards.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    logger = logging.getLogger("transformers")  # it warns that it has no torch
    sys.modules["torch"] = None  # type: ignore[assignment]
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False
        del sys.modules["torch"]


def load_processor(weights: str, config: dict[str, Any]) -> Any:
    """Load the processor of a model with an image processor in numpy and without a video processor,
    which would need torch.

    Args:
        weights: Folder saved by transformers, or a name of the Hugging Face Hub.
        config: Content of its config.json; `model_type` determines the class.

    Returns:
        A transformers.ProcessorMixin with `tokenizer`, `image_processor` and `chat_template`.

    Raises:
        UsageError: The processor cannot be loaded.
    """
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    processor_class = getattr(transformers, PROCESSOR_MAPPING_NAMES[config["model_type"]])

    class WithoutVideo(processor_class):  # type: ignore[misc,valid-type]
        def check_argument_for_proper_class(self, _name: str, argument: Any) -> Any:
            return type(argument)

        @classmethod
        def _get_arguments_from_pretrained(
            cls, path: str, processor_dict: Any = None, **options: Any
        ) -> list[Any]:
            parts = {
                "image_processor": AutoImageProcessor.from_pretrained(path, backend="pil"),
                "tokenizer": AutoTokenizer.from_pretrained(path),
                "video_processor": None,
            }
            return [parts[name] for name in processor_class.get_attributes()]

    try:
        return WithoutVideo.from_pretrained(weights)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"{WEIGHTS_SETTING}: cannot load the processor of `{weights}`: "
            f"{str(error).strip().splitlines()[0]}"
        ) from None
