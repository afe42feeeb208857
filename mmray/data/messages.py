"""Convert the conversations of common datasets to messages with content parts.

Recognized by shape: {role, content} with a text or with parts (OpenAI, TRL, transformers), and
{from, value} of LLaVA and ShareGPT. In a row without parts, each `<image>`, `<video>` and `<audio>`
in a text that is not the assistant's is the place of a medium, as long as the row has media left.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mmray.data.message_fields import (
    OPTIONS,
    REJECTED,
    TEMPLATE_FIELDS,
    Message,
    field_notices,
    parse_calls,
    parse_fields,
    to_json,
)

Part = dict[str, str | None]

MAX_MESSAGE_BYTES = 64 * 1024  # limit of the text of a message, the same as of a caption
# A message of these is a call, or several, as JSON.
_CALL_ROLES = ("function_call", "tool_call")
_ROLES = {"system": "system", "developer": "developer", "user": "user", "human": "user"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", *_CALL_ROLES), "assistant")
_ROLES |= dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool")
# Control characters but tab, line feed and carriage return, and the byte order mark
_REMOVED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufeff]")
_MARKS = re.compile(r"<(image|video|audio)>|<img>([^<>\n]+)</img>")  # <img>PATH</img>: Qwen-VL
# Marks of other projects: <|image_1|>, <image_00>, <|image_pad|>, <ImageHere>, [IMG]
_OTHER_MARKS = re.compile(
    r"<\|?(image|img|video|audio)[ _-]?(\d+|pad|token|soft_token|placeholder|here)\|?>|\[IMG\]",
    re.IGNORECASE,
)
_JSON_PARTS = re.compile(r'\s*\[\s*\{\s*"(type|text|image)":')  # a content as JSON
# Kinds of media by the type of their part.
_KINDS = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_image": "image",  # of OpenAI, as the next one
    "input_audio": "audio",
}
_TEXT_TYPES = ("text", "input_text", "output_text")
# Names under which a part has a medium of its own; `source` is Anthropic's.
MEDIA_FIELDS = (*_KINDS, "url", "path", "source")
_PART_FIELDS = {"type", "text", "index", *MEDIA_FIELDS}
# Of an object with a URL or data, as OpenAI's and Anthropic's.
_OBJECT_FIELDS = {"type", "url", "data", "media_type", "format"}


class PartMedium(NamedTuple):
    """The image, video or audio of a content part of a message.

    Args:
        kind: `image`, `video` or `audio`.
        value: A path relative to the folder of the source, URL, data URI, encoded bytes, or a dict
            {"path", "bytes"}. None if the part has none of its own, so that it takes the next
            medium of this kind from the columns of the row.
    """

    kind: str
    value: object = None


class Conversation(NamedTuple):
    """A conversation of a source row, with parts of media in place of marks.

    Args:
        messages: {"role": "system" | "user" | "assistant", "content": parts}, where parts is a list
            of {"type": "text", "text": "..."} and {"type": "image" | "video" | "audio", "text":
            None}.
        media: A PartMedium for each part of a medium, in order.
        notices: What was not used as it may be meant, see `SourceRow.notices`.
    """

    messages: Sequence[Message] = ()
    media: Sequence[PartMedium] = ()
    notices: Sequence[str] = ()


def parse_messages(value: object, num_media: Mapping[str, int]) -> Conversation:
    """Convert the conversation of a source row to messages with content parts.

    Args:
        value: The value of the column: a list of {"role", "content"} or {"from", "value"}. The role
            is `system`, `user` or `human`, or `assistant`, `gpt`, `chatgpt`, `model` or `bot`, also
            in capitals. The content is a text, or a list of parts: {"type": "text", "text": "..."}
            (or `input_text`, `output_text`), or a medium of type `image`, `image_url`, `video`,
            `video_url`, `audio`, `audio_url`, `input_image` or `input_audio`, such as {"type":
            "image", "image": PATH}, also under `url`, `path` or Anthropic's `source`; of the types
            `image`, `video` and `audio` it may be missing. Values of keys may be None, as in an
            Arrow struct.
        num_media: Number of media in the columns of the row by kind, such as {"image": 2}. Each
            takes the next place: a part without a medium of its own, or `<image>`, `<video>` or
            `<audio>` in a text that is not the assistant's, which count only in a row without parts
            and only as long as media are left. If there are fewer places, the first media go before
            the first user's text.

    Raises:
        ValueError: It is not a conversation from which an assistant can learn: it has no text of
            the assistant, no message of the user or an empty one, one of over 64 KiB, or one of
            another form.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list of {{role, content}} (got {str(value)[:80]!r})")
    places = _Places(num_media, any(isinstance(_content(item), list) for item in value))
    messages = [_parse_message(item, places) for item in value]
    roles = [message["role"] for message in messages]
    if not {"system", "developer"}.isdisjoint(roles[1:]):
        raise ValueError("only the first message may be of the system")
    if not any(map(_is_target, messages)):
        raise ValueError(
            "no message of the assistant has a text, or a call, and a weight over 0: there is "
            "nothing to learn"
        )
    if "user" not in roles:
        raise ValueError("no message is the user's: there is nothing to answer")
    unplaced = places.unplaced()
    messages = insert_media(messages, unplaced)
    places.add_mark_notices()
    notices = sorted(places.notices) + _check_rejected(messages)
    for message in messages:
        # A user's turn may consist of media only, and a tool may return nothing.
        is_empty = _has_only_text(message) and not message_text(message).strip()
        if is_empty and message["role"] == "user":
            raise ValueError("a message of the user is empty")
        if (
            is_empty
            and message["role"] == "assistant"
            and TEMPLATE_FIELDS.keys().isdisjoint(message)
        ):
            notices.append("an empty message of the assistant is a target")
        if "tool_calls" not in message:  # templates write a separator between a text and calls
            message["content"] = message["content"] or [_text_part("")]
    before = [part for each in messages[: roles.index("user")] for part in each["content"]]
    first = sum(part["type"] != "text" for part in before)
    media = [*places.media[:first], *map(PartMedium, unplaced), *places.media[first:]]
    return Conversation(messages, media, notices + field_notices(value, messages))


def _is_target(message: Message) -> bool:
    """Return whether a message has something to learn."""
    has_content = bool(message_text(message).strip()) or "tool_calls" in message
    return message["role"] == "assistant" and has_content and message.get("weight", 1) > 0


def message_text(message: Message) -> str:
    """Return the text parts of a message, joined by line breaks."""
    return "\n".join(part["text"] for part in message["content"] if part["type"] == "text")


def answer_question(question: str, answer: str, kinds: Sequence[str]) -> list[Message]:
    """Return a conversation of one question, after a part for each medium, and its answer."""
    asked: Message = {"role": "user", "content": [_text_part(question)]}
    return insert_media([asked, {"role": "assistant", "content": [_text_part(answer)]}], kinds)


def insert_media(messages: list[Message], kinds: Sequence[str]) -> list[Message]:
    """Return a conversation with parts for media before the content of the first user message."""
    first = next(number for number, each in enumerate(messages) if each["role"] == "user")
    content = [_media_part(kind) for kind in kinds] + messages[first]["content"]
    return [*messages[:first], messages[first] | {"content": content}, *messages[first + 1 :]]


class _Places:
    """The places of media in a conversation, which its messages add in order.

    Args:
        num_media: Number of media in the columns of the row by kind.
        has_parts: Whether a content of the row is a list of parts.

    Attributes:
        media: A PartMedium for each place so far.
        notices: What is not used as it may be meant, see `SourceRow.notices`.
    """

    def __init__(self, num_media: Mapping[str, int], has_parts: bool) -> None:
        self.media: list[PartMedium] = []
        self._num_media = num_media
        self._has_parts = has_parts
        self.notices: set[str] = set()
        self._unused_marks: set[tuple[str, bool]] = set()  # kind, and whether of an answer
        self._has_other_marks = False

    def split_marks(self, text: str, role: str) -> list[Part]:
        """Return the parts of a text, in which marks that are places become parts of media.

        A line break next to such a mark separates it from the text and is not a part of the text.
        """
        parts: list[Part] = []
        text, num_removed = _REMOVED.subn("", text)
        if num_removed:
            self.notices.add("control characters or byte order marks of a message are removed")
        if _JSON_PARTS.match(text):
            self.notices.add("a content that looks like JSON of parts is text")
        start = 0
        self._has_other_marks |= role != "assistant" and _OTHER_MARKS.search(text) is not None
        for mark in _MARKS.finditer(text):
            kind = mark[1] or "image"
            if self._has_parts or role == "assistant" or not self._takes(mark):
                if mark[1]:
                    self._unused_marks.add((kind, role == "assistant"))
                continue
            parts += [_text_part(text[start : mark.start()].removesuffix("\n")), _media_part(kind)]
            self.media.append(PartMedium(kind, mark[2]))
            start = mark.end() + text.startswith("\n", mark.end())
        return [*parts, _text_part(text[start:])]

    def add_unused(self, values: Mapping[str, object], used: Collection[str]) -> None:
        """Add the notices of the fields of a part that are not used."""
        names = {str(name) for name, value in values.items() if value is not None}
        for name in names.difference(used):
            self.notices.add(f"`{name[:40]}` of a content part is not used")

    def _takes(self, mark: re.Match[str]) -> bool:
        return mark[2] is not None or self._num_left(mark[1]) > 0

    def _num_left(self, kind: str) -> int:
        return self._num_media.get(kind, 0) - self.media.count(PartMedium(kind))

    def unplaced(self) -> list[str]:
        """Return the kind of each medium of the columns without a place; none of a kind of which a
        place has its own medium, because that of the column may be the same.
        """
        own = {medium.kind for medium in self.media if medium.value is not None}
        return [
            kind for kind in self._num_media if kind not in own for _ in range(self._num_left(kind))
        ]

    def add_mark_notices(self) -> None:
        """Add the notices of marks and media, once all messages have added their places."""
        unplaced = set(self.unplaced())
        placed = {medium.kind for medium in self.media}
        texts = {
            kind for kind, is_answer in self._unused_marks if not is_answer or kind in unplaced
        }
        for kind in texts:
            self.notices.add(f"`<{kind}>` in a message is text, not the place of a medium")
        for kind in unplaced & placed:
            self.notices.add(f"{kind} without a mark, put before the first user's text")
        if unplaced and self._has_other_marks:
            self.notices.add("a mark of other projects, such as `<|image_1|>`, is text")


def _has_only_text(message: Message) -> bool:
    return all(part["type"] == "text" for part in message["content"])


def _content(item: object) -> Any:
    """Return the content of a message in any notation."""
    if not isinstance(item, dict):
        return None
    return item.get("value") if item.get("content") is None else item["content"]


def _parse_message(item: object, places: _Places) -> Message:
    """Return a message, and add the places of its media. Raises ValueError."""
    if not isinstance(item, dict):
        raise ValueError(f"a message must be {{role, content}} (got {str(item)[:80]!r})")
    role = role_of(item)
    name = item.get("role") or item.get("from")
    if role is None:
        raise ValueError(
            f"the role of a message must be one of {', '.join(_ROLES)} (got {str(name)[:40]!r})"
        )
    lower = str(name).lower()
    fields = parse_fields(item, role)
    if item.get(REJECTED) is not None:
        fields[REJECTED] = _parse_rejected(item[REJECTED], role)
    if item.get(OPTIONS) is not None:
        fields[OPTIONS] = item[OPTIONS]
    content = _content(item)
    if lower in _CALL_ROLES:
        fields["tool_calls"] = parse_calls(content)
        content = None
    if isinstance(content, str):
        parts = places.split_marks(content, role)
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = _parse_parts(content, role, places)
    elif content is None and "tool_calls" in fields:
        parts = []
    else:
        raise ValueError(
            f"content must be text or a list of parts {{type, ...}} (got {str(content)[:80]!r})"
        )
    parts = [part for part in parts if part["type"] != "text" or part["text"]]
    # A lone surrogate raises a ValueError.
    num_bytes = sum(len((part["text"] or "").encode()) for part in parts)
    if fields:
        num_bytes += len(to_json(fields))
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes is over {MAX_MESSAGE_BYTES}")
    message = {"role": role, "content": parts} | fields
    if OPTIONS in fields:
        _check_options(message)
    return message


def _check_options(message: Message) -> None:
    """Raise ValueError unless the options of a message differ and one is its own text."""
    options = message[OPTIONS]
    if (
        not isinstance(options, list)
        or len(options) < 2
        or not all(isinstance(option, str) and option.strip() for option in options)
        or len(set(options)) < len(options)
    ):
        raise ValueError(
            f"options must be different texts, at least two (got {str(options)[:80]!r})"
        )
    if message["role"] != "assistant" or message_text(message) not in options:
        raise ValueError("options must be of an answer of the assistant that is one of them")


def role_of(item: dict[str, Any]) -> str | None:
    """Return the role of a message of a source, such as `assistant` for `gpt`; None: unknown."""
    name = item.get("role") or item.get("from")
    return _ROLES.get(name.lower()) if isinstance(name, str) else None


def _parse_rejected(value: object, role: str) -> list[Message]:
    """Return the messages of a rejected answer. Raises ValueError."""
    if role != "assistant" or not isinstance(value, list):
        raise ValueError("a rejected answer must be in place of a message of the assistant")
    if not value:
        raise ValueError("the rejected answer is empty, or equal to the chosen one")
    places = _Places({}, has_parts=True)
    messages = [_parse_message(item, places) for item in value]
    if places.media:
        raise ValueError("a rejected answer has media: put them into the prompt")
    if messages[0]["role"] != "assistant" or not any(map(_is_target, messages)):
        raise ValueError("a rejected answer needs a text of the assistant, and starts with it")
    return messages


def _check_rejected(messages: list[Message]) -> list[str]:
    """Return the notice of a row with a rejected answer. Raises ValueError."""
    having = [number for number, message in enumerate(messages) if REJECTED in message]
    if not having:
        return []
    [first, *others] = having
    chosen = [
        {name: value for name, value in message.items() if name != REJECTED}
        for message in messages[first:]
    ]
    if others:
        raise ValueError("the row has several rejected answers: write a row for each")
    if chosen == messages[first][REJECTED]:
        raise ValueError("the chosen and the rejected answer are equal: there is nothing to learn")
    if not any(map(_is_target, chosen)):
        raise ValueError("the chosen answer has no text of the assistant")
    if "user" not in [message["role"] for message in messages[:first]]:
        raise ValueError("no message before the answers is the user's")
    if not all(map(_has_only_text, chosen)):
        raise ValueError("a chosen answer has media: put them into the prompt")
    return ["a rejected answer, which only objective dpo uses"]


def split_rejected(messages: Sequence[Message]) -> tuple[list[Message], list[Message]] | None:
    """Return the conversation with the chosen and the one with the rejected answer, without weights
    of the messages before the answers, which are no targets; None for a row without both.
    """
    first = next((number for number, each in enumerate(messages) if REJECTED in each), None)
    if first is None:
        return None
    prompt = _without_targets(messages[:first])
    return [*prompt, *messages[first:]], [*prompt, *messages[first][REJECTED]]


def split_options(messages: Sequence[Message]) -> tuple[list[list[Message]], int] | None:
    """Return a conversation for each option of the last message with options, which it ends with,
    and the index of the right one; None for a row without options.
    """
    numbers = [number for number, each in enumerate(messages) if OPTIONS in each]
    if not numbers:
        return None
    prompt = _without_targets(messages[: numbers[-1]])
    answer = messages[numbers[-1]]
    options = answer[OPTIONS]
    conversations = [
        [*prompt, answer | {"content": [_text_part(option)], "weight": 1.0}] for option in options
    ]
    return conversations, options.index(message_text(answer))


def _without_targets(messages: Sequence[Message]) -> list[Message]:
    return [
        message | {"weight": 0.0} if message["role"] == "assistant" else message
        for message in messages
    ]


def _parse_parts(content: list[dict[str, Any]], role: str, places: _Places) -> list[Part]:
    """Return the parts of a message, and add the places of its media. Raises ValueError."""
    parts: list[Part] = []
    for part in content:
        places.add_unused(part, _PART_FIELDS)
        fields = ("text", *_KINDS)  # Qwen-VL's parts have no type
        part_type = part.get("type") or next((name for name in fields if part.get(name)), None)
        kind = _KINDS.get(part_type) if isinstance(part_type, str) else None
        if kind is not None:
            values = [part[name] for name in MEDIA_FIELDS if part.get(name) is not None]
            if len({value for value in values if isinstance(value, str)}) > 1:
                places.notices.add("a content part names several media: the first one is used")
            value = _own_medium(values[0], kind, places) if values else None
            if value is None and part_type != kind:
                raise ValueError(f"a part of type {part_type} has no url")
            places.media.append(PartMedium(kind, value))
            parts.append(_media_part(kind))
        elif part_type in _TEXT_TYPES and isinstance(part.get("text"), str):
            parts += places.split_marks(part["text"], role)
        else:
            raise ValueError(
                f"the parts of a content must be of type text, {', '.join(_KINDS)} (got "
                f"{str(part)[:80]!r})"
            )
    return parts


def _own_medium(value: object, kind: str, places: _Places) -> Any:
    """Return the medium of a part as a column has it, of OpenAI's and Anthropic's objects too."""
    if not isinstance(value, dict):
        return value
    url = value.get("url")
    if url is None and isinstance(value.get("data"), str):
        url = f"data:{value.get('media_type') or kind};base64,{value['data']}"
    if url is None:
        return value
    places.add_unused(value, _OBJECT_FIELDS)
    return url


def _media_part(kind: str) -> Part:
    return {"type": kind, "text": None}


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}
