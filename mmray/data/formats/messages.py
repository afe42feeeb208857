"""Conversations of any source to a list of messages: who says what. Strict, as rows.py is."""

from __future__ import annotations

from typing import Any

from mmray.data.formats.bad_row import BadRow

MAX_BYTES = 64 * 1024  # of one message, as of a caption
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_IMAGE = "<image>"  # how many sets mark the image's place; where it stands, the model's own settings say


def messages_of(value: Any) -> tuple[dict[str, str], ...]:
    """Messages {role, content} of a row; roles are system (first only), user, assistant. Raises BadRow.

    Taken are {role, content}, its content text or a list of parts of type `text` and `image`, and LLaVA's
    {from: human | gpt, value}. An `<image>` in the text is left out.
    """
    if not isinstance(value, list) or not value:
        raise _bad(f"must be a list of {{role, content}}, is {str(value)[:80]!r}")
    messages = tuple(_message(item) for item in value)
    if (images := sum(_text(_said(item)).count(_IMAGE) for item in value)) > 1:
        raise _bad(f"the conversation is about {images} images, and a model here looks at one")
    if any(message["role"] == "system" for message in messages[1:]):
        raise _bad("only the first message may be that of the system")
    if not any(message["role"] == "assistant" for message in messages):
        raise _bad("no message is the assistant's: there is nothing to learn")
    return messages


def _message(item: Any) -> dict[str, str]:
    if not isinstance(item, dict):
        raise _bad(f"a message must be {{role, content}}, is {str(item)[:80]!r}")
    said = item.get("role") or item.get("from")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise _bad(f"the role of a message must be one of {', '.join(_ROLES)}, is {str(said)[:40]!r}")
    content = _text(_said(item)).replace(_IMAGE, "").strip()
    try:
        num_bytes = len(content.encode())
    except UnicodeEncodeError as error:
        raise _bad(f"character {error.start} of a message is half a surrogate pair") from None
    if num_bytes > MAX_BYTES:
        raise _bad(f"a message of {num_bytes} bytes is over {MAX_BYTES}")
    content = "".join(character for character in content if character >= " " or character in "\t\n")
    if not content and role != "user":  # a user may show the image and say nothing
        raise _bad(f"a message of the {role} is empty")
    return {"role": role, "content": content}


def _said(item: dict[str, Any]) -> Any:
    """What a message says; a column of Arrow has both names, and nothing under the other one."""
    content = item.get("content")
    return item.get("value") if content is None else content


def _text(content: Any) -> str:
    """The text of a content, or of its parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = [part.get("type") for part in content]
        if set(kinds) <= {"text", "image"} and kinds.count("image") <= 1:
            texts = [part.get("text") for part in content if part["type"] == "text"]
            if all(isinstance(text, str) for text in texts):
                return "\n".join(map(str, texts))
    raise _bad(f"content must be text, or a list of texts and at most one image, is {str(content)[:80]!r}")


def _bad(detail: str) -> BadRow:
    return BadRow("columns", "messages", detail)
