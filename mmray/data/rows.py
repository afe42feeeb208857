"""Parse and validate source rows: a SourceRow, or a BadRow with stage and reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from mmray.storage.address import is_url, redact_url, rejection_reason

HELD_OUT_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")  # not trained on
MAX_MESSAGE_BYTES = 64 * 1024  # limit of a message, the same as of a caption
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
# common image placeholder in datasets; the chat settings of the model define the actual position
_IMAGE = "<image>"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadRow(ValueError):
    """A row to quarantine: stage, reason (a short word) and detail (a sentence)."""

    def __init__(self, stage: str, reason: str, detail: str, key: str | None = None) -> None:
        super().__init__(f"{stage} {reason}: {detail}")
        self.stage = stage
        self.reason = reason
        self.detail = detail
        self.key = key


@dataclass(frozen=True)
class ImageRef:
    """Reference to an image: a file of the source folder, a byte range of one, inline bytes, or an
    allowed URL.

    `file` is None for inline bytes and for a URL. `length` is None for a complete file. `url` may
    contain a secret (a signature); `name` never does.
    """

    name: str
    file: str | None = None
    offset: int = 0
    length: int | None = None
    data: bytes | None = None
    url: str | None = None


@dataclass(frozen=True)
class SourceRow:
    """A validated source row; boxes are (x, y, width, height) in pixels of the image."""

    key: str
    image: ImageRef
    texts: tuple[Any, ...]
    label: int | None
    split: str | None
    language: str | None
    boxes: tuple[tuple[float, ...], ...] = ()
    box_labels: tuple[int, ...] = ()
    messages: tuple[dict[str, str], ...] = ()


def parse_row(values: dict[str, Any], location: str, hosts: tuple[str, ...] = ()) -> SourceRow:
    """Validate the values of a row.

    Args:
        values: Values by our column names; None is the same as a missing column.
        location: Key of a row without one, such as `file:line`.
        hosts: Hosts of allowed image URLs.

    Raises:
        BadRow: With the stage `columns` and a reason.
    """
    values = {name: value for name, value in values.items() if value is not None}
    key = values.get("id", values.get("key", location))
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise BadRow("columns", "key", f"id must be text or an integer (got {type(key).__name__})")
    key = str(key)
    if not key.strip() or len(key) > 1024 or not is_valid_name(key):
        raise BadRow(
            "columns", "key", f"id must be 1 to 1024 characters without controls (got {key[:40]!r})"
        )
    try:
        return _parse_columns(key, values, hosts)
    except BadRow as bad:
        bad.key = key
        raise


def _parse_columns(key: str, values: dict[str, Any], hosts: tuple[str, ...]) -> SourceRow:
    boxes = values.get("boxes", [])
    box_labels = values.get("box_labels", [])
    label = values.get("label")
    if not isinstance(boxes, list) or not all(map(_is_box, boxes)):
        raise BadRow(
            "columns",
            "boxes",
            f"boxes must be a list of [x, y, width, height] (got {str(boxes)[:80]})",
        )
    labels_ok = isinstance(box_labels, list) and all(map(_is_label, box_labels))
    if not labels_ok or len(box_labels) not in (0, len(boxes)):
        raise BadRow(
            "columns", "boxes", f"box_labels must be an integer for each of {len(boxes)} boxes"
        )
    messages = parse_messages(values["messages"]) if "messages" in values else ()
    images = _single_column(values, ("image_path", "image", "images"), "no-image")
    if len(images) > 1:
        detail = f"the row has {len(images)} images, models take one: write one row per image"
        raise BadRow("columns", "multiple-images", detail)
    texts: tuple[Any, ...] = tuple(
        turn["content"] for turn in messages if turn["role"] == "assistant"
    )
    if not messages or {"text", "texts"} & values.keys():
        texts = _single_column(values, ("text", "texts"), "no-text")
    if label is not None and not _is_label(label):
        raise BadRow(
            "columns",
            "label",
            f"label must be an integer; number your classes (got {str(label)[:40]!r})",
        )
    # short plain words, because they become parts of file names
    for column in ("split", "language"):
        word = values.get(column)
        if word is not None and not (isinstance(word, str) and _WORD.fullmatch(word)):
            detail = f"{column} must be a word of letters, digits, . _ - (got {str(word)[:40]!r})"
            raise BadRow("columns", column, detail)
    return SourceRow(
        key=key,
        image=_parse_image(images[0], hosts),
        texts=texts,
        label=label,
        split=values.get("split"),
        language=values.get("language"),
        boxes=tuple(tuple(map(float, box)) for box in boxes),
        box_labels=tuple(box_labels),
        messages=messages,
    )


def rename_columns(values: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Rename source columns to our names; `columns` maps ours to theirs."""
    theirs = {their: value for their, value in values.items() if their in columns.values()}
    rest = {
        name: value for name, value in values.items() if name not in theirs and name not in columns
    }
    return rest | {our: theirs[their] for our, their in columns.items() if their in theirs}


def is_safe_path(name: str) -> bool:
    """Return whether a name is a plain relative path inside its folder."""
    path = PurePosixPath(name)
    return not (
        path.is_absolute() or ".." in path.parts or "://" in name or not is_valid_name(name)
    )


def is_valid_name(text: str) -> bool:
    """Return whether a name has no control characters and is valid UTF-8 (JSON can encode a lone
    surrogate).
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return _CONTROL.search(text) is None


def _parse_image(value: Any, hosts: tuple[str, ...]) -> ImageRef:
    """Parse a path, bytes, the {path, bytes} struct of Hugging Face, or a URL at one of `hosts`."""
    if isinstance(value, ImageRef):
        return value
    name = value
    data = value
    if isinstance(value, dict):
        name = value.get("path")
        data = value.get("bytes")
    if isinstance(data, bytes):
        return ImageRef(name if isinstance(name, str) and name else "the image", data=data)
    if not isinstance(name, str) or not name.strip():
        raise BadRow("columns", "image", f"an image must be a path (got {str(name)[:80]!r})")
    if hosts and is_url(name) and is_valid_name(name):
        if reason := rejection_reason(name, hosts):
            raise BadRow("columns", "url", f"{redact_url(name)}: {reason}")
        return ImageRef(redact_url(name), url=name)
    if not is_safe_path(name):
        shown = redact_url(name) if "://" in name else name[:200]
        hint = (
            (" (--allow-urls names the hosts that images are fetched from)") if is_url(name) else ""
        )
        raise BadRow(
            "columns", "path", f"{shown!r} is not a path inside the folder of the source{hint}"
        )
    return ImageRef(name, file=name)


def _single_column(
    values: dict[str, Any], columns: tuple[str, ...], missing: str
) -> tuple[Any, ...]:
    """Return the value of the only present column of these, as a tuple of at least one item."""
    given = [column for column in columns if column in values]
    if not given:
        has = ", ".join(sorted(map(str, values))[:10]) or "nothing"
        raise BadRow(
            "columns", missing, f"none of the columns {', '.join(columns)} (the row has {has})"
        )
    if len(given) > 1:
        raise BadRow("columns", "ambiguous", f"both {given[0]} and {given[1]}: give one")
    value = values[given[0]]
    items = tuple(value) if isinstance(value, list) else (value,)
    if not items:
        raise BadRow("columns", missing, f"{given[0]} is an empty list")
    return items


def _is_label(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_box(box: Any) -> bool:
    is_numbers = (
        isinstance(box, list)
        and len(box) == 4
        and all(isinstance(number, (int, float)) for number in box)
    )
    return is_numbers and all(abs(number) < 2**63 for number in box) and box[2] >= 0 and box[3] >= 0


def parse_messages(value: Any) -> tuple[dict[str, str], ...]:
    """Parse the messages {role, content} of a row; roles are system (first only), user, assistant.
    Raises BadRow.

    Accepts {role, content}, where content is a string or a list of parts of type `text` and
    `image`, and LLaVA's {from: human | gpt, value}. `<image>` is removed from the text.
    """
    try:
        if not isinstance(value, list) or not value:
            raise ValueError(f"must be a list of {{role, content}} (got {str(value)[:80]!r})")
        parsed = [_parse_message(item) for item in value]
        roles = [role for role, _ in parsed]
        num_images = sum(content.count(_IMAGE) for _, content in parsed)
        messages = tuple(
            {"role": role, "content": content.replace(_IMAGE, "").strip()}
            for role, content in parsed
        )
        if num_images > 1:
            raise ValueError(f"the conversation has {num_images} images, models take one")
        if "system" in roles[1:]:
            raise ValueError("only the first message may be that of the system")
        if "assistant" not in roles:
            raise ValueError("no message is the assistant's: there is nothing to learn")
        for message in messages:
            # a user turn may consist of the image only
            if not message["content"] and message["role"] != "user":
                raise ValueError(f"a message of the {message['role']} is empty")
    except ValueError as error:
        raise BadRow("columns", "messages", str(error)) from None
    return messages


def _parse_message(item: Any) -> tuple[str, str]:
    """Return role and text of a message. Raises ValueError."""
    if not isinstance(item, dict):
        raise ValueError(f"a message must be {{role, content}} (got {str(item)[:80]!r})")
    name = item.get("role") or item.get("from")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(
            f"the role of a message must be one of {', '.join(_ROLES)} (got {str(name)[:40]!r})"
        )
    content = item.get("content")  # an Arrow struct has both keys, one of them null
    content = _join_parts(item.get("value") if content is None else content)
    # a lone surrogate raises a ValueError
    if (num_bytes := len(content.encode())) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes is over {MAX_MESSAGE_BYTES}")
    return role, "".join(
        character for character in content if character >= " " or character in "\t\n"
    )


def _join_parts(content: Any) -> str:
    """Return the text of a content, or of its parts. Raises ValueError."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = [part.get("type") for part in content]
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if (
            set(kinds) <= {"text", "image"}
            and kinds.count("image") <= 1
            and all(isinstance(t, str) for t in texts)
        ):
            text = "\n".join(texts)  # an image part counts as the image placeholder
            return text if _IMAGE in text or "image" not in kinds else text + _IMAGE
    raise ValueError(
        "content must be text, or a list of texts and at most one image (got "
        f"{str(content)[:80]!r})"
    )
