"""A token for the language of a caption, in front of its words: what `model.inputs.language_token` asks for.

Beside text.py, and used through words.py. Each language of the training sets becomes a special token of the tokenizer
(`[de]` of the pattern `[{}]`), so that the tokenizer.json of a run, of its evaluation and of its export says which
languages a model knows. A row without a language, or with one that is not known, has no such token: as a prompt or a
label has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer

from mmray.data.text.tokenizer import SPECIAL, TextEncoder
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.data.store.prepared_set import Row

MOST_LANGUAGES = 1000  # a column with more holds something else
_TAKEN = {*SPECIAL, "<s>", "</s>", "<pad>", "<unk>", "<mask>", "<|pad|>", "<|startoftext|>", "<|endoftext|>"}


class LanguageEncoder(TextEncoder):
    """Captions to token ids as TextEncoder does it, those of a known language with its token before the words."""

    def __init__(self, tokenizer_json: str, pattern: str, max_tokens: int) -> None:
        super().__init__(tokenizer_json, max_tokens)
        before, _, after = pattern.partition("{}")
        found = (token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special)
        self._marks = {
            mark[len(before) : len(mark) - len(after)]: mark
            for mark in found
            if mark.startswith(before) and mark.endswith(after) and len(mark) > len(pattern) - 2 and mark not in _TAKEN
        }

    @property
    def languages(self) -> tuple[str, ...]:
        """Those that have a token."""
        return tuple(sorted(self._marks))

    def words_of(self, row: Row) -> list[str]:
        """What a row has to say: its captions, each behind the token of the row's language where that is known."""
        return [self._marks.get(row.language or "", "") + self._plain(text) for text in row.texts]

    def said(self, text: str, language: str | None = None) -> str:
        """A text as a caption of that language. Raises UsageError for one that has no token."""
        if language is not None and language not in self._marks:
            raise UsageError(f"the model has no token for language {language!r}; it knows {', '.join(self.languages)}")
        return self._marks.get(language or "", "") + self._plain(text)

    def _plain(self, text: str) -> str:
        """The words alone: what a person writes is never taken for the token of a language."""
        while (found := next((mark for mark in self._marks.values() if mark in text), None)) is not None:
            text = text.replace(found, "")  # what is left may close up to another: look again
        return text


def with_languages(tokenizer_json: str, pattern: str, languages: Iterable[str]) -> str:
    """The tokenizer with a special token for each language; one that it has keeps its id. Raises UsageError."""
    marks = [pattern.replace("{}", language) for language in sorted(languages)]
    if not marks:
        raise UsageError(
            f"model.inputs.language_token is {pattern!r}, but no row of the training set has a `language`: prepare it "
            "with that column (again, into another folder, where mmray did not count languages yet), or leave it empty"
        )
    if len(marks) > MOST_LANGUAGES:
        raise UsageError(
            f"model.inputs.language_token: the training set has {len(marks):,} languages, the first {marks[0]!r}; a "
            f"column of languages has at most {MOST_LANGUAGES:,}: leave the setting empty, or mend the source"
        )
    if taken := sorted(_TAKEN.intersection(marks)):
        raise UsageError(
            f"model.inputs.language_token: {taken[0]!r} would be the token of a language, and has another meaning; "
            "take another pattern, such as `<lang:{}>`"
        )
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return str(tokenizer.to_str())
