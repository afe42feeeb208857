"""Convert the conversations of common datasets to messages with content parts.

Recognized by shape: {role, content} with a text or with parts (OpenAI, TRL, transformers), and
{from, value} of LLaVA and ShareGPT. In a text, each `<image>` marks the place of an image.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

# {"role": "system" | "user" | "assistant", "content": [part, ...]}; a part is {"type": "text",
# "text": ...}, or {"type": "image", "text": None}, which is the next image of the row.
Message = dict[str, Any]
Part = dict[str, str | None]

MAX_MESSAGE_BYTES = 64 * 1024  # limit of the text of a message, the same as of a caption
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
IMAGE_MARK = "<image>"
# A line break next to a mark separates it from the text and is not a part of the text.
_MARK = re.compile(rf"\n?{IMAGE_MARK}\n?")
_IMAGE_TYPES = ("image", "image_url")
# Names under which a part of type `image` or `image_url` has an image of its own.
_IMAGE_FIELDS = ("image", "image_url", "url", "path")


def parse_messages(value: Any) -> tuple[list[Message], list[Any]]:
    """Convert the conversation of a source row to messages with content parts.

    Args:
        value: A list of {"role", "content"} or {"from", "value"}. The content is a text, in which
            each `<image>` marks an image, or a list of parts such as {"type": "text", "text":
            "..."} and {"type": "image"}. The keys of an Arrow struct that a message lacks are None.

    Returns:
        The messages {"role": "system" | "user" | "assistant", "content": parts}, and the image of
        each image part in order: a path, URL, data URI, bytes or struct, as in a column. None if
        the part or mark has no image of its own, so that it takes the next image of the row.

    Raises:
        ValueError: It is not a conversation from which an assistant can learn.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"must be a list of {{role, content}} (got {str(value)[:80]!r})")
    images: list[Any] = []
    messages = [_parse_message(item, images) for item in value]
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise ValueError("only the first message may be that of the system")
    if "assistant" not in roles:
        raise ValueError("no message is the assistant's: there is nothing to learn")
    if roles[roles[0] == "system"] != "user":
        raise ValueError("the conversation begins with the assistant; it must begin with the user")
    for message in messages:
        # A user's turn may consist of images only.
        if not message["content"] or (message["role"] != "user" and not message_text(message)):
            raise ValueError(f"a message of the {message['role']} is empty")
    return messages, images


def message_text(message: Message) -> str:
    """Return the text parts of a message, joined by line breaks."""
    return "\n".join(part["text"] for part in message["content"] if part["type"] == "text")


class RowTexts(Protocol):
    """A row with captions or a conversation, such as a stored `Row`.

    Attributes:
        messages: A conversation: messages {"role", "content"}, with content parts; None: the row
            has captions.
        texts: Its captions.
        media: Its images.
    """

    messages: list[Message] | None
    texts: list[str]
    media: list[Any]


def conversations_of(row: RowTexts, question: str) -> list[list[Message]]:
    """Return the conversations of a row, as a vision-language model is trained on them.

    Args:
        row: A row with `messages`, or with captions in `texts`.
        question: User message for a row without `messages`, such as `Describe the image.`

    Returns:
        The one conversation of `messages`. Otherwise one conversation per caption: the question,
        after an image part for each image of the row, and the caption as the answer.
    """
    if row.messages:
        return [row.messages]
    asked: Message = {"role": "user", "content": [_text_part(question)]}
    return [
        insert_images(
            [asked, {"role": "assistant", "content": [_text_part(caption)]}], len(row.media)
        )
        for caption in row.texts
    ]


def insert_images(messages: list[Message], count: int) -> list[Message]:
    """Insert image parts before the content of the first user message.

    Args:
        messages: A conversation with at least one user message; not changed.
        count: Number of image parts to insert.

    Returns:
        A new list; messages other than the first user message are shared with the argument.
    """
    first = next(number for number, each in enumerate(messages) if each["role"] == "user")
    content = [_image_part() for _ in range(count)] + messages[first]["content"]
    return [*messages[:first], messages[first] | {"content": content}, *messages[first + 1 :]]


def _parse_message(item: Any, images: list[Any]) -> Message:
    """Return a message, and append the images of its parts. Raises ValueError."""
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
        parts = _split_marks(content, images)
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = _parse_parts(content, images)
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


def _split_marks(text: str, images: list[Any]) -> list[Part]:
    """Return the parts of a text with marks, and append None for each mark."""
    first, *rest = _MARK.split(text)
    parts = [_text_part(first)]
    for piece in rest:
        parts += [_image_part(), _text_part(piece)]
        images.append(None)
    return parts


def _parse_parts(content: list[dict[str, Any]], images: list[Any]) -> list[Part]:
    """Return the parts of a message; marks in its texts count only if it has no image part.

    Raises ValueError.
    """
    has_image_part = any(part.get("type") in _IMAGE_TYPES for part in content)
    parts: list[Part] = []
    for part in content:
        if part.get("type") in _IMAGE_TYPES:
            values = [part[name] for name in _IMAGE_FIELDS if part.get(name) is not None]
            image = values[0] if values else None
            if isinstance(image, dict) and image.get("url") is not None:
                image = image["url"]
            if image is None and part["type"] == "image_url":
                raise ValueError("a part of type image_url has no url")
            images.append(image)
            parts.append(_image_part())
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            text = part["text"]
            if has_image_part:
                parts.append(_text_part(_MARK.sub("", text)))
            else:
                parts += _split_marks(text, images)
        else:
            raise ValueError(
                "the parts of a content must be of type text, image or image_url (got "
                f"{str(part)[:80]!r})"
            )
    return parts


def _image_part() -> Part:
    return {"type": "image", "text": None}


def _text_part(text: str) -> Part:
    kept = (character for character in text if character >= " " or character in "\t\n")
    return {"type": "text", "text": "".join(kept)}
