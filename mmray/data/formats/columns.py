"""Which columns of a source mmray reads, keeps, replaces by mapped ones, or does not use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmray.builtin import ANSWER_COLUMNS, CHAT_COLUMNS, CHOSEN_COLUMN, COLUMNS, KEEP_ALL
from mmray.data.rows import (
    FOLDER,
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    MEDIA_COLUMNS,
    MEDIA_KINDS,
    MESSAGE_COLUMNS,
    NOTICES,
    TEXT_COLUMN,
    TEXT_COLUMNS,
    Values,
    has_any,
    is_blank,
    split_names,
)
from mmray.errors import DataError, UsageError, suggest

# Columns of which a row has one.
_KINDS = (("id", "key"), IMAGE_COLUMNS, *MEDIA_KINDS.values(), TEXT_COLUMNS, MESSAGE_COLUMNS)
_CONVERSATIONS = (*MESSAGE_COLUMNS, *ANSWER_COLUMNS, CHOSEN_COLUMN)
# Common names of columns in public data sets, to suggest one in a message.
_COMMON_NAMES = {
    "image": "image img image_name img_path image_file file_name filename file filepath file_path "
    "path image_url url image_path image_bytes jpg png photo",
    "text": "text comment comments caption captions title sentence sentences description alt "
    "alt_text raw conversation prompt txt label transcription transcript",
}
_NUMBERING = "_0123456789"


class Columns:
    """Columns of a source.

    A mapped column replaces all columns of its kind: with text=title, a column `texts` is not used.

    Args:
        names: Names in the source by mmray's column names, such as {"text": "title"}, or several of
            texts ({"text": "alt,synthetic"}); a column without an entry has mmray's name.
        keep: Value of `prepare.keep`: names of columns of the source, or ("all",).

    Attributes:
        known: Names in the source of the columns that mmray reads, whether it has them or not.
    """

    def __init__(self, names: Mapping[str, str], keep: Sequence[str] = ()) -> None:
        self.names = names
        self.keep = keep
        self.known = {*self.of(*COLUMNS, *CHAT_COLUMNS), FOLDER, KEPT_COLUMNS, NOTICES}
        self.mapped = {*self.of(*names)}
        of_kinds = {name for kind in _KINDS if has_any(names, kind) for name in kind}
        self._replaced = of_kinds | names.keys()
        self._used = self.known - (self._replaced - self.mapped)

    def of(self, *ours: str) -> tuple[str, ...]:
        """Return the columns of the source for some of mmray's: one for each, or several of texts,
        such as (`alt`, `synthetic`).
        """
        theirs: list[str] = []
        for name in ours:
            mapped = self.names.get(name, name)
            theirs += split_names(mapped) if name in TEXT_COLUMNS else (mapped,)
        return tuple(theirs)

    def keeps(self, name: str) -> bool:
        """Return whether a column of the source is stored with the set, as a kept column: if `keep`
        names it, or is `all` and mmray does not read the column itself.
        """
        if self.keep == (KEEP_ALL,):
            return name not in self.known or name in CHAT_COLUMNS
        return name in self.keep

    def drops(self, name: str) -> bool:
        """Return whether a column of the source is neither read nor kept."""
        return name not in self._used and not self.keeps(name)

    def rename(self, values: Values) -> Values:
        """Return the values of a row by mmray's names. Columns without an entry keep their name.

        If several columns have texts, the value of `text` is a list of their texts as dicts
        {"text": "a dog", "column of the text": "alt"}, without missing and blank ones.
        """
        if not self.names:
            return values
        theirs = {}
        for ours, name in self.names.items():
            several = self.of(ours)
            if len(several) > 1 and (texts := _named_texts(values, several)):
                theirs[ours] = texts
            elif name in values:
                theirs[ours] = values[name]
        taken = self._replaced.union(self.names.values())
        return {name: value for name, value in values.items() if name not in taken} | theirs

    def check_named(self, names: Collection[str], file: str, is_complete: bool = False) -> None:
        """Raise UsageError if a column that the user named does not exist in the source.

        Args:
            names: Names of its columns.
            is_complete: Whether these are the names of all rows. False: only the columns of `keep`
                and those of several texts must be there.
        """
        flag_of = {name: "--keep" for name in self.keep if name != KEEP_ALL}
        for ours in self.names:
            theirs = self.of(ours)
            is_checked = is_complete or len(theirs) > 1
            flag_of |= dict.fromkeys(theirs if is_checked else (), f"--columns {ours}")
        for name, flag in flag_of.items():
            if name not in names:
                raise UsageError(f"{flag}: {file} has no column `{name}`; {suggest(name, names)}")

    def check_kinds(self, names: Sequence[str], file: str, no_match: str = "") -> None:
        """Raise DataError if no column of a source has images, audio or video, or none has texts.

        A column of conversations counts as both, one of labels as texts. A source with both audio
        and video needs no texts.

        Args:
            names: Names of all its columns.
            file: The file, for the message.
            no_match: Text that is added to the message if no column resembles one of images or
                texts.
        """

        def has(*ours: str) -> bool:
            return not set(names).isdisjoint(self.of(*ours))

        has_chat = has(*_CONVERSATIONS)  # whose images may be in its parts
        is_pair = all(has(*of_kind) for of_kind in MEDIA_KINDS.values())
        missing = []
        if not (has_chat or has(*IMAGE_COLUMNS, *MEDIA_COLUMNS)):
            missing.append("image")
        if not (has_chat or is_pair or has(*TEXT_COLUMNS, "label")):
            missing.append("text")
        if not missing:
            return
        for theirs in self.names.values():
            if theirs not in names:
                raise DataError(
                    f"{file} has no column `{theirs}`, which --columns names; "
                    f"{suggest(theirs, names)}"
                )
        guesses = []
        for kind in missing:
            common = _COMMON_NAMES[kind].split()
            # Names such as image_1 and Caption2 match, too.
            similar = (name for name in names if name.lower().rstrip(_NUMBERING) in common)
            guesses.append(f"{kind}={next(similar, 'NAME')}")
        # Names of columns do not show what kind of files they name.
        advice = " ".join(guesses) + " (audio=, video= for such files)" * ("image" in missing)
        if guesses == ["image=NAME", "text=NAME"]:
            advice += no_match
        raise DataError(
            f"{file} has the columns {', '.join(names)[:300]}: "
            f"{' and '.join(f'none is `{kind}`' for kind in missing)}; name "
            f"{'one' if len(missing) == 1 else 'them'} with --columns {advice}"
        )


def _named_texts(values: dict[str, Any], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the texts of several columns with their names, without missing and blank ones."""
    texts: list[dict[str, Any]] = []
    for name in names:
        value = values.get(name)
        for item in value if isinstance(value, list) else [value]:
            text = item if isinstance(item, dict) else {"text": item}
            if not is_blank(text.get("text")):
                texts.append(text | {TEXT_COLUMN: name})
    return texts
