"""Validate the values of a source row: a SourceRow, or a BadRow with stage and reason."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmray.data.labels import parse_label
from mmray.data.message_fields import parse_tools
from mmray.data.messages import Conversation, PartMedium, message_text, parse_messages
from mmray.data.rows import (
    FOLDER,
    HELD_OUT_SPLITS,
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    MEDIA_COLUMNS,
    MEDIA_KINDS,
    MESSAGE_COLUMNS,
    NOTICES,
    SPAN_COLUMNS,
    TEXT_COLUMN,
    TEXT_COLUMNS,
    BadRow,
    ImageRef,
    Values,
    has_any,
    is_valid_name,
    parse_image,
    to_utf8,
)
from mmray.data.store.stored_row import Row

# Names of start and end in the segments of a text, as mmray and as Whisper write them.
_SPAN_FIELDS = (SPAN_COLUMNS, ("start", "end"))
MAX_TIME_S = 1e6
_TEXT_FIELDS = {"text", "timestamp", TEXT_COLUMN, *SPAN_COLUMNS, "start", "end"}
_MEDIUM_FIELDS = {"bytes", "path", "url"}
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass
class SourceRow(Row):
    """A validated row of a source, from `parse_row`, which becomes a stored row once its media are
    read.

    Until then `media` is empty, and `texts` are not cleaned (of a conversation without captions
    they are the assistant's messages). The other attributes are those of Row.

    Attributes:
        images: Its images in order, then its audio and its video; without `messages` at least one.
            With `messages` in the order of their parts.
        columns: Value by name of each column that `prepare.keep` names, such as {"width": 640}.
        notices: What the row has and the set does not, such as "`weight` of a message is not
            used". Prepare and runs log each with its number of rows, so it names no value.
    """

    images: list[ImageRef] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def parse_row(values: Values | BadRow, location: str) -> SourceRow:
    """Validate the values of a source row, and convert them to a SourceRow.

    Args:
        values: Values by mmray's column names: `id` or `key` (text or int), `image`, `images` or
            `image_path` (one or a list of what `parse_image` takes), `text` or `texts` (a text or
            {"text", "t0_s", "t1_s"}, or a list), `label` (int), `split` (a word),
            `messages` or
            `conversations` (what `parse_messages` takes), `tools` (JSON schemas), `audio` or
            `audios`, `video` or `videos` (as images), `t0_s` and `t1_s` (start and end of the texts
            in seconds); and `kept columns`, a dict of those of `prepare.keep`. Others are ignored.
            None is the same as a missing column. A BadRow is raised.
        location: Location of the row, such as `captions.jsonl:12`; also its key if it has none.

    Returns:
        A SourceRow; what the row lacks is None or empty.

    Raises:
        BadRow: With stage `columns` (`decode` for an image format that is not read) and a reason.
    """
    if isinstance(values, BadRow):
        raise values
    values = {name: value for name, value in values.items() if value is not None}
    key = values.get("id", values.get("key", location))
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise BadRow("columns", "key", f"id must be text or an integer (got {type(key).__name__})")
    key = str(key)
    if not key.strip() or len(key) > 1024 or not is_valid_name(key):
        raise BadRow(
            "columns", "key", f"id must be 1 to 1024 characters without controls (got {key[:40]!r})"
        )
    kept = values.pop(KEPT_COLUMNS, {})
    notices = values.pop(NOTICES, [])
    folder = values.pop(FOLDER, "")
    try:
        row = _parse_columns(key, values)
    except BadRow as bad:
        bad.key = key
        raise
    row.source = to_utf8(location)
    row.columns = kept
    if folder:
        row.images = [_move(image, folder) for image in row.images]
    row.notices += notices
    return row


def _parse_columns(key: str, values: Values) -> SourceRow:
    (messages, media, notices), images = _parse_conversation(values)
    answers = [message_text(each) for each in messages if each["role"] == "assistant"]
    texts: Sequence[Any] = [answer for answer in answers if answer.strip()]
    # Audio and video of one row are a pair without a text.
    has_pair = all(has_any(values, names) for names in MEDIA_KINDS.values())
    if has_any(values, TEXT_COLUMNS) or not (messages or has_pair):
        texts = _single_column(values, TEXT_COLUMNS, "no-text")
    text_columns = [item.get(TEXT_COLUMN) for item in texts if isinstance(item, dict)]
    plain, spans = _split_spans(values, texts)
    fields = {name for item in texts if isinstance(item, dict) for name in item}
    fields -= {"text", TEXT_COLUMN} if messages else _TEXT_FIELDS
    notices = [*notices, *(f"`{name}` of a text is not used" for name in sorted(fields))]
    items = [each.value for each in media]
    for name in (*IMAGE_COLUMNS, *MEDIA_COLUMNS):
        items += _as_items(values.get(name))
    fields = {
        name for item in items if isinstance(item, dict) for name in item if item[name] is not None
    }
    fields -= _MEDIUM_FIELDS
    notices += [f"`{name}` of an image, audio or video is not used" for name in sorted(fields)]
    if spans and all(image.kind == "image" for image in images):
        raise BadRow("columns", "span", "a text has a span, and the row has no audio or video")
    label = parse_label(values.get("label"))
    split = _parse_split(values.get("split"))
    if split is not None and split.lower() in ("train", *HELD_OUT_SPLITS):
        split = split.lower()  # `Test` is no training split
    return SourceRow(
        key=key,
        media=[],
        images=images,
        texts=plain,
        label=label,
        split=split,
        messages=list(messages) or None,
        spans=spans,
        text_columns=[*map(str, text_columns)] if any(text_columns) else None,
        notices=list(notices),
    )


def _parse_split(split: object) -> str | None:
    """Return a short plain word, because it becomes a part of file names. Raises BadRow."""
    if split is None or (isinstance(split, str) and _WORD.fullmatch(split)):
        return split
    detail = f"split must be a word of letters, digits, . _ - (got {str(split)[:40]!r})"
    raise BadRow("columns", "split", detail)


def _split_spans(
    values: Values, texts: Sequence[Any]
) -> tuple[list[Any], list[list[float] | None] | None]:
    """Return the texts of a row, and the span of each in seconds; None if none has one.

    A text is a string, or {"text", "t0_s", "t1_s"}. The columns `t0_s` and `t1_s` are the span of
    the other texts of the row. Raises BadRow.
    """
    of_row = _parse_span(values, SPAN_COLUMNS)
    plain = []
    spans: list[list[float] | None] = []
    for text in texts:
        span = of_row
        if isinstance(text, dict) and "text" in text:
            if isinstance(text.get("timestamp"), list):  # as pipelines of transformers write it
                start, end = (*text["timestamp"], None, None)[:2]
                # Whisper does not write the end of a last text that is cut.
                end = math.inf if end is None and start is not None else end
                text = text | dict(zip(SPAN_COLUMNS, (start, end), strict=True))
            names = next((each for each in _SPAN_FIELDS if each[0] in text), SPAN_COLUMNS)
            if not has_any(values, MESSAGE_COLUMNS):  # their span is that of the row
                span = _parse_span(text, names) or of_row
            text = text["text"]
        plain.append(text)
        spans.append(span and [*span])
    return plain, spans if any(spans) else None


def _parse_span(values: Values, names: tuple[str, str]) -> list[float] | None:
    """Return start and end of a text, None if it has none. Raises BadRow."""
    bounds = [values.get(name) for name in names]
    if bounds == [None, None]:
        return None
    start, end = map(_as_seconds, bounds)
    if bounds[1] == math.inf:
        end = math.inf  # until `check_spans`
    if start is None or end is None or start >= end:
        raise BadRow(
            "columns",
            "span",
            f"{names[0]} and {names[1]} must be seconds, the first before the second (got "
            f"{str(bounds[0])[:40]} and {str(bounds[1])[:40]})",
        )
    return [start, end]


def _as_seconds(value: object) -> float | None:
    """Return a time in seconds, in CSV a text; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if abs(seconds) < MAX_TIME_S else None


def _parse_conversation(values: Values) -> tuple[Conversation, list[ImageRef]]:
    """Return the messages of a row, if it has any, and its media in the order of their parts.

    Without messages, audio and video follow the images. Raises BadRow.
    """
    kinds = [kind for kind, names in MEDIA_KINDS.items() if has_any(values, names)]
    has_images = has_any(values, IMAGE_COLUMNS)
    if not has_any(values, MESSAGE_COLUMNS):
        images: tuple[Any, ...] = ()
        if has_images or not kinds:
            images = _single_column(values, IMAGE_COLUMNS, "no-image")
        media = [_parse_only_medium(values, kind) for kind in kinds]
        return Conversation(), [parse_image(image) for image in images] + media
    in_columns = {"image": _as_items(_single_value(values, IMAGE_COLUMNS)) if has_images else ()}
    in_columns |= {kind: _as_items(_single_value(values, MEDIA_KINDS[kind])) for kind in kinds}
    num_given = {kind: len(items) for kind, items in in_columns.items()}
    try:
        conversation = parse_messages(_single_value(values, MESSAGE_COLUMNS), num_given)
        if tools := parse_tools(values.get("tools") or []):
            first = conversation.messages[0] | {"tools": tools}
            conversation = conversation._replace(messages=[first, *conversation.messages[1:]])
    except ValueError as error:
        if isinstance(error, BadRow):
            raise
        raise BadRow("columns", "messages", str(error)) from None
    for kind in ("image", *MEDIA_KINDS):
        num_places = conversation.media.count(PartMedium(kind))
        if num_places != num_given.get(kind, 0):
            raise BadRow(
                "columns",
                f"{kind}-count",
                f"the messages have {num_places} parts of type {kind} without a medium of their "
                f"own, and the row has {num_given.get(kind, 0)} for them"
                + "".join(f"; {each}" for each in conversation.notices),
            )
    rest = {kind: iter(items) for kind, items in in_columns.items()}
    return conversation, [
        parse_image(next(rest[kind]) if value is None else value, kind)
        for kind, value in conversation.media
    ]


def _move(image: ImageRef, folder: str) -> ImageRef:
    """Return a reference with its path relative to the source instead of a folder in it."""
    if image.file is None or image.file.startswith("/") or "://" in image.file:
        return image
    path = f"{folder}/{image.file}"
    return replace(image, name=path, file=path)


def _parse_only_medium(values: Values, kind: str) -> ImageRef:
    """Return the audio or video of a row without messages. Raises BadRow if it has several."""
    items = _single_column(values, MEDIA_KINDS[kind], f"no-{kind}")
    if isinstance(items[0], (int, float, list)):  # samples or frames, which are refused
        return parse_image(list(items), kind)
    if len(items) > 1:
        raise BadRow(
            "columns",
            f"{kind}-count",
            f"the row has {len(items)} of {kind}; a row without messages has at most one",
        )
    return parse_image(items[0], kind)


def _single_column(values: Values, columns: tuple[str, ...], missing: str) -> tuple[Any, ...]:
    """Return the value of the only present column of these, as a tuple of at least one item."""
    if not has_any(values, columns):
        has = ", ".join(sorted(map(str, values))[:10]) or "nothing"
        hint = ""
        if missing == "no-text" and "label" in values:
            hint = "; a label gives a caption only if it is the name of a class"
        raise BadRow(
            "columns",
            missing,
            f"none of the columns {', '.join(columns)} (the row has {has}{hint})",
        )
    items = _as_items(_single_value(values, columns))
    if not items:
        column = next(column for column in columns if column in values)
        raise BadRow("columns", missing, f"{column} is an empty list")
    return items


def _single_value(values: Values, columns: tuple[str, ...]) -> Any:
    """Return the value of the only present column of these; at least one must be present."""
    present_columns = [column for column in columns if column in values]
    if len(present_columns) > 1:
        raise BadRow(
            "columns",
            "ambiguous",
            f"both {present_columns[0]} and {present_columns[1]}: choose one, for example "
            f"--columns {present_columns[-1].removesuffix('s')}={present_columns[-1]}",
        )
    return values[present_columns[0]]


def _as_items(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)
