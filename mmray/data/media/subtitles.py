"""Read subtitles in the formats SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

import re
from html import unescape
from itertools import pairwise
from typing import Any

from mmray.data.rows import BadRow

_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{1,2})(?:[,.](\d+))?"
_TIMES = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}(?:\s.*)?")
_UNREAD_TIMES = re.compile(r"\s*[-+]?\d+:[\d:.,]*\s*-->")
# <i>, <c.yellow>, <00:01.500> and {\an8} set the style or the time of a word.
_MARKUP = re.compile(r"</?[A-Za-z][^<>\n]*>|<[\d:.]+>|\{\\[^{}\n]*\}")
_WORD_TIME = re.compile(r"<(?:\d+:)?\d{2}:\d{2}\.\d{3}>")
_MAX_GAP_S = 0.1  # between a text and the next one that repeats a line of it
_EMPTY_SPAN = "a subtitle that does not end after its start is left out"
_ENTITY = re.compile(r"&#?\w+;")
_SPACES = {"&nbsp;": " ", "&lrm;": "", "&rlm;": ""}


def parse_subtitles(text: str, name: str, notices: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the texts of a subtitle file with their spans.

    Comments and styles of WebVTT, and texts without characters, are left out. The lines of a text
    are joined by spaces, and its markup is removed. In rolling captions each text starts with the
    last lines of the one before: these are kept once. Captions roll if words have times, or if more
    than half of the texts of several lines, and two or more, do so; so a line sung twice is kept.

    Args:
        text: Content of the file.
        name: Name of the file, for messages.
        notices: Gets what is left out, see `SourceRow.notices`: texts that do not end after their
            start.

    Returns:
        Values {"text", "t0_s", "t1_s"} in the order of the file; times in seconds.

    Raises:
        BadRow: It has no text with times, or times that cannot be read.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    is_webvtt = lines[0].startswith("WEBVTT")
    cues = []
    for number, line in enumerate(lines):
        if match := _TIMES.fullmatch(line):
            cues.append((number, match))
        elif _UNREAD_TIMES.match(line):
            detail = f"{name}: the times of line {number + 1} cannot be read: {line[:40]!r}"
            raise BadRow("parse", "span", detail)
    stops = [*(number for number, _ in cues[1:]), len(lines)]
    shown: list[tuple[float, float, list[str]]] = []
    for (number, match), stop in zip(cues, stops, strict=False):
        # The number of the next text; a file may lack the empty line before it.
        is_numbered = stop < len(lines) and lines[stop - 1].strip().isdigit()
        words = _clean(lines[number + 1 : stop - is_numbered], is_webvtt)
        if not words:
            continue
        start = _seconds(match.groups()[:4])
        end = _seconds(match.groups()[4:])
        if end <= start:
            if notices is not None and _EMPTY_SPAN not in notices:
                notices.append(_EMPTY_SPAN)
            continue
        shown.append((start, end, words))
    repeated = [0, *(_num_repeated(*pair) for pair in pairwise(shown))]
    rolls = [
        0 < count < len(words)
        for count, (_, _, words) in zip(repeated, shown, strict=False)
        if len(words) > 1
    ]
    is_rolling = _WORD_TIME.search(text) is not None or sum(rolls) > max(1, len(rolls) / 2)
    texts: list[dict[str, Any]] = []
    for count, (start, end, words) in zip(repeated, shown, strict=False):
        if kept := words[count if is_rolling else 0 :]:
            texts.append({"text": " ".join(kept), "t0_s": start, "t1_s": end})
    if not texts:
        raise BadRow("columns", "no-text", f"{name} has no text with times (HH:MM:SS.mmm --> ...)")
    return texts


def _num_repeated(
    before: tuple[float, float, list[str]], after: tuple[float, float, list[str]]
) -> int:
    """Return how many lines at the start of a text (start, end, lines) are the last of another."""
    start, _, lines = after
    counts = range(min(len(before[2]), len(lines)), 0, -1)
    count = next((each for each in counts if before[2][-each:] == lines[:each]), 0)
    # A text without a new line is another one after a pause.
    return 0 if count == len(lines) and start - before[1] > _MAX_GAP_S else count


def _clean(lines: list[str], is_webvtt: bool) -> list[str]:
    """Return the lines of a text without markup, from those between two lines with times."""
    words = []
    for line in lines:
        if is_webvtt and not line:  # after it are comments and the name of the next text
            break
        line = _MARKUP.sub("", line)
        line = _ENTITY.sub(lambda match: _SPACES.get(match[0], unescape(match[0])), line)
        words.append(line.strip())
    return [line for line in words if line]


def _seconds(groups: tuple[str | None, ...]) -> float:
    hours, minutes, seconds, fraction = groups
    whole = int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
    return whole + float(f"0.{fraction or 0}")
