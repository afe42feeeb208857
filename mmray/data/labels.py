"""Labels of rows: whether they are numbers or names of classes, and how classes are numbered.

Labels are numbers if all are integers, also as texts; otherwise texts are names. Shards have the
numbers that classes had when they were packed, and the table of shards has the current ones.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypedDict

from mmray.data.rows import BadRow, to_utf8
from mmray.data.store.row_columns import is_integer
from mmray.errors import DataError

MAX_CLASSES = 100_000
_MAX_DIGITS = 20  # of a number of 64 bits
_INTEGER = re.compile(r"-?[0-9]{1,19}")


class Labels(TypedDict):
    """The labels of a chunk.

    Attributes:
        texts: Different ones, at most MAX_CLASSES + 1.
        has_numbers: Whether one is no text.
    """

    texts: list[str]
    has_numbers: bool


def summarize_labels(labels: Iterable[Any]) -> Labels:
    """Return what decides whether labels are names, without those that are no class: blank texts
    and lists.
    """
    texts: set[str] = set()
    for label in labels:
        if not isinstance(label, str):
            return Labels(texts=sorted(texts), has_numbers=True)
        text = label.strip()
        is_list = text.startswith("[") and text.endswith("]")
        if text and not is_list and len(texts) <= MAX_CLASSES:
            texts.add(label)
    return Labels(texts=sorted(texts), has_numbers=False)


def find_names(labels: Iterable[Labels], source: str) -> tuple[str, ...]:
    """Return the names of the classes 0, 1, ... of the labels of all chunks; () if they are
    numbers.

    Args:
        source: What has these labels, for the error.

    Raises:
        DataError: There are more than MAX_CLASSES (100,000), so they are no classes.
    """
    summaries = list(labels)
    texts = set(chain.from_iterable(each["texts"] for each in summaries))
    # Next to numbers, names are bad rows, because their numbers would be the labels of others.
    has_numbers = any(each["has_numbers"] for each in summaries)
    if has_numbers or None not in map(label_number, texts):
        return ()
    if len(texts) > MAX_CLASSES:
        raise DataError(
            f"{source}: the column label has over {MAX_CLASSES:,} different texts, so they are no "
            "classes: rename it"
        )
    return order_classes(texts)


def order_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the classes 0, 1, ... in the order that they have in every format: by
    value if all are integers, otherwise as texts.
    """
    texts = {label.strip() for label in labels}
    if all(_INTEGER.fullmatch(each) for each in texts):
        ordered = sorted(texts, key=lambda each: (int(each), each))
    else:
        ordered = sorted(texts)
    return tuple(dict.fromkeys(map(class_name, ordered)))


def class_name(label: str) -> str:
    """Return the name of a class for captions: the label with spaces instead of underscores, in
    composed Unicode (NFC), with lone surrogates escaped.
    """
    return to_utf8(unicodedata.normalize("NFC", label.strip().replace("_", " ")))


def label_number(label: str) -> int | None:
    """Return the number that a text label is, also if pandas wrote it as `3.0`; None for the name
    of a class, such as `03` and `3.7`.
    """
    number = label.strip().removesuffix(".0")
    return int(number) if is_integer(number) and len(number) < _MAX_DIGITS else None


def number_label(label: Any, class_names: Sequence[str]) -> Any:
    """Return the number of a label, which may be the name of a class; None for a blank one, and
    other values as they are, for `parse_label`.

    Raises:
        BadRow: A text is none of the classes, if they have names, and no number.
    """
    if isinstance(label, bool):
        return int(label)
    if not isinstance(label, str):
        return label
    if not label.strip():
        return None
    if not class_names:
        return label
    name = class_name(label)
    if name in class_names:
        return class_names.index(name)
    number = label_number(label)
    if number is None:
        shown = ", ".join(class_names)[:200]
        raise BadRow("columns", "label", f"label {label[:40]!r} is none of the classes {shown}")
    return number


def parse_label(label: object) -> int | None:
    """Return the number of a class, which may be a text. Raises BadRow."""
    if label is None:
        return None
    number = label_number(label) if isinstance(label, str) else label
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**63:
        return number
    hint = "label must be an integer, unless all labels are names; number your classes, or name all"
    if isinstance(label, (list, dict)) or (isinstance(label, str) and label.startswith("[")):
        hint = "a row has one label: write a row for each class, or the classes into its text"
    raise BadRow("columns", "label", f"{hint} (got {str(label)[:40]!r})")


@lru_cache
def renumber(earlier: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the number that each of the earlier classes of a set has now; () if all are the same.
    None: labels are names now and were numbers, or the other way, or a class is gone.
    """
    if bool(earlier) != bool(names) or not set(earlier) <= set(names):
        return None
    if earlier == names[: len(earlier)]:
        return ()
    number_of = {name: number for number, name in enumerate(names)}
    return tuple(number_of[name] for name in earlier)
