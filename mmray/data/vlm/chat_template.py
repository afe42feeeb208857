"""Chat templates of models: conversations as texts, and which of their characters are targets."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmray.data.messages import REJECTED, Message
from mmray.data.text.tokenizer import remove_tokens
from mmray.data.vlm.families import WEIGHTS_SETTING
from mmray.errors import UsageError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

TEMPLATE_ADVICE = (
    "Mark the assistant's text with {% generation %} ... {% endgeneration %} in "
    "chat_template.jinja of the weights"
)
# Fields of messages that no chat template reads.
_FIELDS_OF_ROWS = ("weight", "tools", REJECTED)
# First character, last character + 1, and weight of a part of a text.
Span = tuple[int, int, float]


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


class ChatTemplate:
    """Renders conversations with the chat template of a processor.

    Args:
        processor: The processor of transformers, with `tokenizer` and `chat_template`.
        kinds: Kinds of media that the model takes, of `image`, `video` and `audio`.
        weights: Name or folder of the model, for messages.

    Attributes:
        source: The template.
        reserved_tokens: Tokens that start or end a turn or are part of a medium, the longest first.

    Raises:
        UsageError: The processor has no chat template.
    """

    def __init__(self, processor: ProcessorMixin, kinds: Sequence[str], weights: str) -> None:
        if processor.chat_template is None:
            raise UsageError(
                f"{WEIGHTS_SETTING}: {weights} has no chat template, so conversations cannot be "
                "written as its model expects. Add chat_template.jinja to a copy of the folder"
            )
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._kinds = kinds
        self._weights = weights
        self.source: str = processor._resolve_chat_template(None)
        self._has_marks = re.search(r"{%-?\s*generation\b", self.source) is not None
        reserved = self._find_reserved_tokens()
        self.reserved_tokens = sorted(reserved, key=lambda token: (-len(token), token))

    def clean(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with lists of parts, without `reserved_tokens` in their texts."""
        conversation = []
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            parts = [part if part["type"] == "text" else {"type": part["type"]} for part in content]
            cleaned = self._clean_value(message | {"content": parts})
            # `developer` is the later name of OpenAI.
            if message["role"] == "developer" and "developer" not in self.source:
                cleaned["role"] = "system"
            conversation.append(cleaned)
        return conversation

    def _clean_value(self, value: object) -> Any:
        """Return a JSON value without `reserved_tokens` in its texts."""
        if isinstance(value, str):
            return remove_tokens(value, self.reserved_tokens)
        if isinstance(value, list):
            return [self._clean_value(each) for each in value]
        if isinstance(value, dict):
            return {name: self._clean_value(each) for name, each in value.items()}
        return value

    def _find_reserved_tokens(self) -> set[str]:
        """Return the special tokens that the template writes around turns and media, and those that
        tokenizer and processor name, such as `eos_token` and `image_token`.
        """
        from jinja2 import TemplateError

        parts = [*({"type": kind} for kind in self._kinds), {"type": "text", "text": "x"}]
        turns = [{"role": role, "content": parts} for role in ("user", "assistant", "user")]
        turns[1] = turns[1] | {"content": parts[-1:]}
        rendered = ""
        for system in ([{"role": "system", "content": parts[-1:]}], []):
            with suppress(TemplateError, RowError):  # some take no system
                rendered += self.render(system + turns)
        added = self._tokenizer.added_tokens_decoder.values()
        in_template = {each.content for each in added if each.special and each.content in rendered}
        named = chain(self._tokenizer.special_tokens_map.items(), vars(self._processor).items())
        return in_template | {
            value for name, value in named if name.endswith("_token") and isinstance(value, str)
        }

    def render(self, conversation: list[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation of `clean`. Raises RowError."""
        return self._render_marked(conversation, add_generation_prompt)[0]

    def render_prompt(self, conversation: list[Message]) -> str:
        """Return the text of a conversation up to where the model answers. Raises RowError."""
        text = self.render(conversation, add_generation_prompt=True)
        self._check_rendered(conversation, text)
        return text

    def _render_marked(
        self, conversation: list[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the character spans that the template marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [
            {name: message[name] for name in message if name not in _FIELDS_OF_ROWS}
            for message in conversation
        ]
        try:
            rendered: Any = render_jinja_template(
                conversations=[turns],
                tools=conversation[0].get("tools") if conversation else None,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=self._has_marks,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError("messages", f"the chat template cannot render it: {error}") from None
        texts, spans = rendered
        return texts[0], [(first, last) for first, last in spans[0]] if self._has_marks else []

    def target_spans(self, conversation: list[Message], targets: Targets) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and its spans of targets, without media.

        Raises:
            RowError: There is no target, or the template does not render a part.
            UsageError: The template does not determine which tokens are the assistant's.
        """
        text, marked = self._render_marked(conversation)
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
                    len(self._render_marked(conversation[:end])[1]) for end in (index, index + 1)
                )
                turn = marked[first:stop]
            else:
                turn = [self._turn_span(conversation, index, text)]
            if turn and self.turn_end:
                # Marks may leave out the end, without which the model does not learn to stop.
                first, last = turn[-1]
                end = re.compile(rf"\s*{re.escape(self.turn_end)}").match(text, last)
                turn[-1] = (first, end.end() if end else last)
            for first, last in turn:
                if targets.without_reasoning:
                    first = _after_reasoning(conversation[index], text, first, last)
                spans.append((first, last, weight))
        if not spans:
            raise RowError("messages", "no message is the assistant's: there is nothing to learn")
        return text, self._without_media(text, spans)

    def _check_rendered(self, conversation: list[Message], text: str) -> None:
        """Raise RowError if the text of a conversation lacks a part of it.

        Templates may drop the reasoning of earlier answers, and write the result of a tool as JSON.
        """
        advice = f": correct chat_template.jinja of {self._weights}, or the rows"
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
            if self.render(without) == self.render(turns):
                raise RowError("messages", f"the chat template does not render `{name}`{advice}")

    def _turn_span(self, conversation: list[Message], index: int, text: str) -> tuple[int, int]:
        """Return the span of an answer in the text of a conversation, by the texts of its starts.

        It ends with the token at which the model stops; a line break after it is the template's.
        """
        before = self.render(conversation[:index], add_generation_prompt=True)
        after = self.render(conversation[: index + 1])
        if text.startswith(after) and after.startswith(before):
            return len(before), len(after.rstrip())
        # Templates omit the reasoning of earlier turns, and may start that of the next answer: find
        # the answer by its header, which no text contains.
        start = before.removeprefix(self.render(conversation[:index]))
        header, tag, rest = start.partition("<think>")
        headers = [found.end() for found in re.finditer(re.escape(header), text)]
        roles = [message["role"] for message in conversation]
        eos = self._tokenizer.eos_token
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
    def turn_end(self) -> str:
        """The special token that the chat template writes at the end of an answer; "": none."""
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in (("user", "a"), ("assistant", "\ue000"))
        ]
        after = ""
        with suppress(RowError):  # no template of such conversations
            after = self.render(turns).rpartition("\ue000")[2].lstrip()
        return next((token for token in self.reserved_tokens if after.startswith(token)), "")

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
                    "\ue000" in self.render([question, answer, *rest]) for rest in ([], [question])
                )
                if last and not earlier:
                    omitted.append(name)
        return tuple(omitted)

    @cached_property
    def _keeps_starts(self) -> bool:
        """Whether the text of a plain answer starts with that of its prompt."""
        text = [{"type": "text", "text": "a"}]
        turns = [{"role": role, "content": text} for role in ("user", "assistant")]
        prompt = self.render(turns[:1], add_generation_prompt=True)
        return self.render(turns).startswith(prompt)

    def _without_media(self, text: str, spans: list[Span]) -> list[Span]:
        """Return the parts of spans of a rendered text that are no placeholders of media."""
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
        for kind in self._kinds:
            first, last = ({"type": "text", "text": each} for each in "\ue000\ue001")
            content = [first, {"type": kind}, last]
            text = self.render([{"role": "user", "content": content}])
            placeholder = getattr(self._processor, f"{kind}_token")
            between = re.search(f"\ue000(.*{re.escape(placeholder)}.*)\ue001", text, re.DOTALL)
            alternatives.append(re.escape(between[1] if between else placeholder))
        return re.compile("|".join(alternatives))


def _after_reasoning(message: Message, text: str, first: int, last: int) -> int:
    """Return where the answer starts in the span of a turn, after its reasoning."""
    for end in ("</think>", message.get("reasoning_content") or "</think>"):
        start = text.rfind(end, first, last)
        if start >= 0:
            rest = text[start + len(end) : last]
            return last - len(rest.lstrip())
    return first


def weights_of_spans(
    spans: Sequence[Span], offsets: object, replacements: list[dict[str, Any]]
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
        for replaced in replacements:
            if replaced["span"][1] <= first:
                shift = replaced["new_span"][1] - replaced["span"][1]
        weights[is_text & (start < last + shift) & (stop > first + shift)] = weight
    return weights
