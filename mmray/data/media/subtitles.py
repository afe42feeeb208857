"""Read subtitles in the formats SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

import re
from typing import Any

from mmray.data.rows import BadRow

_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{2})[,.](\d{1,3})"
_TIMES = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}(?:\s.*)?")
# <i>, <c.yellow>, <00:01.500> and {\an8} set the style or the time of a word.
_MARKUP = re.compile(r"</?[^<>\n]*>|\{\\[^{}\n]*\}")
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&nbsp;": " ", "&lrm;": "", "&rlm;": ""}


def parse_subtitles(data: bytes, name: str) -> list[dict[str, Any]]:
    """Return the texts of a subtitle file with their spans.

    Blocks without times, such as comments and styles of WebVTT, and texts without characters are
    left out. The lines of a text are joined by spaces, and its markup is removed.

    Args:
        data: The file, UTF-8.
        name: Name of the file, for messages.

    Returns:
        Values {"text", "t0_s", "t1_s"} in the order of the file; times in seconds.

    Raises:
        BadRow: It is not UTF-8, has no text with times, or a text ends before it starts.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRow("parse", "encoding", f"{name} is not UTF-8 at byte {error.start}") from None
    texts: list[dict[str, Any]] = []
    for block in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n").replace("\r", "\n")):
        lines = block.strip("\n").split("\n")
        # The first line may be the number or the name of the text.
        number = next((n for n, line in enumerate(lines[:2]) if _TIMES.fullmatch(line)), None)
        if number is None:
            continue
        match = _TIMES.fullmatch(lines[number])
        assert match is not None
        words = _MARKUP.sub("", " ".join(lines[number + 1 :]))
        for entity, character in _ENTITIES.items():
            words = words.replace(entity, character)
        if not words.strip():
            continue
        start = _seconds(match.groups()[:4])
        end = _seconds(match.groups()[4:])
        if end <= start:
            raise BadRow(
                "parse", "span", f"{name}: the text {words.strip()[:40]!r} ends before it starts"
            )
        texts.append({"text": words.strip(), "t0_s": start, "t1_s": end})
    if not texts:
        raise BadRow("columns", "no-text", f"{name} has no text with times (HH:MM:SS.mmm --> ...)")
    return texts


def _seconds(groups: tuple[str | None, ...]) -> float:
    hours, minutes, seconds, fraction = groups
    whole = int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
    return whole + int((fraction or "0").ljust(3, "0")) / 1000
