"""Convert the conversations of common datasets to messages with content parts.

Recognized by shape: {role, content} with a text or with parts (OpenAI, TRL, transformers), and
{from, value} of LLaVA and ShareGPT. In a text, each `<image>` marks the place of an image; if the
row has video or audio, `<video>` and `<audio>` mark their places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

# {"role": "system" | "user" | "assistant", "content": [part, ...]}; a part is {"type": "text",
# "text": ...}, or {"type": "image", "text": None}, which is the next image of the row; `video` and
# `audio` alike.
Message = dict[str, Any]
Part = dict[str, str | None]

MAX_MESSAGE_BYTES = 64 * 1024  # limit of the text of a message, the same as of a caption
_ROLES = {"system": "system", "user": "user", "human": "user"} | dict.fromkeys(
    ("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"
)
_BYTE_ORDER_MARK = "\ufeff"
# Kinds of media by the type of their part.
_KINDS = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
}
# Names under which a part has a medium of its own.
_MEDIA_FIELDS = (*_KINDS, "url", "path")


class PartMedium(NamedTuple):
    """The image, video or audio of a content part of a message.

    Args:
        kind: `image`, `video` or `audio`.
        value: A path relative to the folder of the source, URL, data URI, encoded bytes, or a dict
            {"path", "bytes"}. None if the part has none of its own, so that it takes the next
            medium of this kind from the columns of the row.
    """

    kind: str
    value: Any = None


def parse_messages(
    value: Any, kinds: Sequence[str] = ("image",)
) -> tuple[list[Message], list[PartMedium]]:
    """Convert the conversation of a source row to messages with content parts.

    Args:
        value: The value of the column: a list of {"role", "content"} or {"from", "value"}. The role
            is `system`, `user` or `human`, or `assistant`, `gpt`, `chatgpt`, `model` or `bot`. The
            content is a text, in which each `<image>` or `<img>PATH</img>` marks an image, or a
            list of parts: {"type": "text", "text": "..."}, or a medium of type `image`,
            `image_url`, `video`, `video_url`, `audio` or `audio_url`, such as {"type": "image",
            "image": PATH}, also under `url` or `path`; without a URL type it may be missing. Values
            of keys may be None, as in an Arrow struct.
        kinds: Kinds whose marks count in a text: `image` (`<image>`), `video` (`<video>`) and
            `audio` (`<audio>`).

    Returns:
        The messages {"role": "system" | "user" | "assistant", "content": parts}, where parts is a
        list of {"type": "text", "text": "..."} and {"type": "image" | "video" | "audio", "text":
        None}. And in order a PartMedium for each part of a medium: `kind`, and `value` (such as its
        path; None if it has none of its own).

    Raises:
        ValueError: It is not a conversation from which an assistant can learn: it has no message of
            the assistant, does not start with the user (after a message of the system), or has an
            empty message, one of over 64 KiB, or one of another form.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list of {{role, content}} (got {str(value)[:80]!r})")
    # <image>, or <img>PATH</img> of Qwen-VL. A line break next to a mark separates it from the text
    # and is not a part of the text.
    marks = re.compile(rf"\n?(?:<({'|'.join(kinds)})>|<img>([^<>\n]+)</img>)\n?")
    media: list[PartMedium] = []
    messages = [_parse_message(item, media, marks) for item in value]
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise ValueError("only the first message may be of the system")
    if "assistant" not in roles:
        raise ValueError("no message is the assistant's: there is nothing to learn")
    if roles[roles[0] == "system"] != "user":
        raise ValueError("the conversation begins with the assistant; it must begin with the user")
    for message in messages:
        # A user's turn may consist of media only.
        if not message["content"] or (message["role"] != "user" and not message_text(message)):
            raise ValueError(f"a message of the {message['role']} is empty")
    return messages, media


def message_text(message: Message) -> str:
    """Return the text parts of a message, joined by line breaks.

    Args:
        message: {"role": ..., "content": parts}, where parts is a list of {"type": "text", "text":
            "..."} and of parts of media, which are left out.
    """
    return "\n".join(part["text"] for part in message["content"] if part["type"] == "text")


def answer_question(question: str, answer: str, kinds: Sequence[str]) -> list[Message]:
    """Return a conversation of one question about media, and its answer.

    Args:
        question: Text of the user.
        answer: Text of the assistant.
        kinds: The type of each medium (`image`, `video` or `audio`), whose parts come before the
            question.

    Returns:
        Two messages. The first is {"role": "user", "content": parts}: a part {"type": kind, "text":
        None} for each medium, then {"type": "text", "text": question}. The second is {"role":
        "assistant", "content": [{"type": "text", "text": answer}]}.
    """
    asked: Message = {"role": "user", "content": [_text_part(question)]}
    return insert_media([asked, {"role": "assistant", "content": [_text_part(answer)]}], kinds)


def insert_media(messages: list[Message], kinds: Sequence[str]) -> list[Message]:
    """Insert parts for media before the content of the first user message.

    Args:
        messages: A conversation, a list of {"role", "content"} whose contents are lists of parts,
            with at least one user message; not changed.
        kinds: The type of each part to insert: `image`, `video` or `audio`. The parts are {"type":
            kind, "text": None}.

    Returns:
        A new list; messages other than the first user message are shared with the argument.
    """
    first = next(number for number, each in enumerate(messages) if each["role"] == "user")
    content = [_media_part(kind) for kind in kinds] + messages[first]["content"]
    return [*messages[:first], messages[first] | {"content": content}, *messages[first + 1 :]]


def _parse_message(item: Any, media: list[PartMedium], marks: re.Pattern[str]) -> Message:
    """Return a message, and append the media of its parts. Raises ValueError."""
    if not isinstance(item, dict):
        raise ValueError(f"a message must be {{role, content}} (got {str(item)[:80]!r})")
    name = item.get("role") or item.get("from")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(
            f"the role of a message must be one of {', '.join(_ROLES)} (got {str(name)[:40]!r})"
        )
    content = item.get("content")
    content = item.get("value") if content is None else content
    if isinstance(content, str):
        parts = _split_marks(content, media, marks)
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = _parse_parts(content, media, marks)
    else:
        raise ValueError(
            f"content must be text or a list of parts {{type, ...}} (got {str(content)[:80]!r})"
        )
    parts = [part for part in parts if part["type"] != "text" or (part["text"] or "").strip()]
    if parts and parts[0]["text"]:
        parts[0]["text"] = parts[0]["text"].lstrip()
    if parts and parts[-1]["text"]:
        parts[-1]["text"] = parts[-1]["text"].rstrip()
    # A lone surrogate raises a ValueError.
    num_bytes = sum(len((part["text"] or "").encode()) for part in parts)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes is over {MAX_MESSAGE_BYTES}")
    return {"role": role, "content": parts}


def _split_marks(text: str, media: list[PartMedium], marks: re.Pattern[str]) -> list[Part]:
    """Return the parts of a text with marks, and append the medium of each mark."""
    first, *rest = marks.split(text)
    parts = [_text_part(first)]
    for kind, path, piece in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        medium = PartMedium(kind or "image", path)
        parts += [_media_part(medium.kind), _text_part(piece)]
        media.append(medium)
    return parts


def _parse_parts(
    content: list[dict[str, Any]], media: list[PartMedium], marks: re.Pattern[str]
) -> list[Part]:
    """Return the parts of a message; marks in its texts count only if it has no part of a medium.

    Raises ValueError.
    """
    has_media_part = any(part.get("type") in _KINDS for part in content)
    parts: list[Part] = []
    for part in content:
        part_type = part.get("type")
        kind = _KINDS.get(part_type) if isinstance(part_type, str) else None
        if kind is not None:
            values = [part[name] for name in _MEDIA_FIELDS if part.get(name) is not None]
            value = values[0] if values else None
            if isinstance(value, dict) and value.get("url") is not None:
                value = value["url"]
            if value is None and part_type != kind:
                raise ValueError(f"a part of type {part_type} has no url")
            media.append(PartMedium(kind, value))
            parts.append(_media_part(kind))
        elif part_type == "text" and isinstance(part.get("text"), str):
            text = part["text"]
            if has_media_part:
                parts.append(_text_part(marks.sub("", text)))
            else:
                parts += _split_marks(text, media, marks)
        else:
            raise ValueError(
                f"the parts of a content must be of type text, {', '.join(_KINDS)} (got "
                f"{str(part)[:80]!r})"
            )
    return parts


def _media_part(kind: str) -> Part:
    return {"type": kind, "text": None}


def _text_part(text: str) -> Part:
    allowed_characters = (
        each for each in text if (each >= " " or each in "\t\n") and each != _BYTE_ORDER_MARK
    )
    return {"type": "text", "text": "".join(allowed_characters)}
