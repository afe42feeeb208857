"""Language tokens (`model.inputs.language_token`): a special token before each caption of a known
language, such as `[de]`.

Models without the setting use TextEncoder and tokenizers without such tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mmray.data.text.tokenizer import (
    RESERVED_TOKENS,
    TextEncoder,
    add_special_tokens,
    remove_tokens,
)
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.data.store.stored_row import Row

MAX_LANGUAGES = 1000  # a column with more values is not a language column


def build_encoder(tokenizer_json: str, inputs: Inputs) -> TextEncoder:
    """Build the encoder that converts captions to token ids for a model.

    Returns:
        A LanguageTextEncoder if `language_token` is set, otherwise a TextEncoder.
    """
    if inputs.language_token:
        return LanguageTextEncoder(tokenizer_json, inputs.max_tokens, inputs.language_token)
    return TextEncoder(tokenizer_json, inputs.max_tokens)


class LanguageTextEncoder(TextEncoder):
    """Encodes captions as token ids, each with the token of its language before it.

    The special tokens of the tokenizer that match a pattern are the languages. Their tokens are put
    into the text before it is encoded: `format_caption(text, language)` and, with the language of a
    stored row, `format_texts(row)` return texts such as `[de]ein Hund`. `encode` then takes such
    texts and returns ids int32 [N, T], right-padded, and the number of tokens of each, int32 [N]. A
    row whose language is missing or has no token gets none; `format_caption` raises UsageError for
    a language without a token.

    Args:
        tokenizer_json: Content of a tokenizer.json file with a special token for each language.
        max_tokens: Maximum number of tokens of a text, the language token included.
        language_token: Pattern of these tokens, such as `[{}]`; `{}` is the language.

    Attributes:
        languages: Sorted names of the languages, such as `de`.
    """

    def __init__(self, tokenizer_json: str, max_tokens: int, language_token: str) -> None:
        super().__init__(tokenizer_json, max_tokens)
        pattern = re.compile(re.escape(language_token).replace(r"\{\}", "(.+)"))
        names = [token for token in self.special_tokens if token not in RESERVED_TOKENS]
        matches = [pattern.fullmatch(token) for token in names]
        self._language_tokens = {match[1]: match[0] for match in matches if match}
        self.languages = tuple(sorted(self._language_tokens))

    def format_texts(self, row: Row) -> list[str]:
        language = row.language if row.language in self._language_tokens else None
        return [self.format_caption(text, language) for text in row.texts]

    def format_caption(self, text: str, language: str | None = None) -> str:
        if language is not None and language not in self._language_tokens:
            raise UsageError(
                f"the model has no token for language {language!r}; its language tokens are "
                f"{', '.join(self.languages) or 'none'}"
            )
        token = self._language_tokens.get(language or "", "")
        return token + remove_tokens(super().format_caption(text), self._language_tokens.values())


def add_language_tokens(tokenizer_json: str, pattern: str, languages: Iterable[str]) -> str:
    """Add a special token for each language to a tokenizer.

    Args:
        pattern: Form of a token with `{}` for the language: `[{}]` gives `[de]`.
        languages: Languages of the rows of the training set; added in sorted order.

    Returns:
        Content of the extended tokenizer.json.

    Raises:
        UsageError: There is no language, or there are more than MAX_LANGUAGES (1000).
    """
    tokens = [pattern.replace("{}", language) for language in sorted(languages)]
    if not tokens:
        raise UsageError(
            f"model.inputs.language_token is {pattern!r}, but no row of the training set has a "
            "`language`: prepare it with that column, or leave the setting empty"
        )
    if len(tokens) > MAX_LANGUAGES:
        raise UsageError(
            f"model.inputs.language_token: the training set has {len(tokens):,} languages, the "
            f"first {tokens[0]!r}; a column of languages has at most {MAX_LANGUAGES:,}: leave the "
            "setting empty, or fix the source"
        )
    return add_special_tokens(tokenizer_json, tokens)
