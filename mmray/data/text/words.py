"""What of a row becomes tokens: its captions, or, where the model writes, its conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mmray.data.text.chat import ChatEncoder, with_marks
from mmray.data.text.language import LanguageEncoder, with_languages
from mmray.data.text.tokenizer import TextEncoder

if TYPE_CHECKING:
    from mmray.config import Inputs


def encoder_of(tokenizer_json: str, inputs: Inputs) -> Any:
    """The encoder that the inputs of a model ask for: all have words_of, columns, nothing, pad_id and vocab_size."""
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        return ChatEncoder(tokenizer_json, chat, inputs.max_tokens)
    if pattern := language_token_of(inputs):
        return LanguageEncoder(tokenizer_json, pattern, inputs.max_tokens)
    return TextEncoder(tokenizer_json, inputs.max_tokens)


def fitted(tokenizer_json: str, inputs: Inputs, languages: Iterable[str] = ()) -> str:
    """The tokenizer with the tokens that the inputs of a model need; `languages`: of the rows. Raises UsageError."""
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        return with_marks(tokenizer_json, chat)
    pattern = language_token_of(inputs)
    return with_languages(tokenizer_json, pattern, languages) if pattern else tokenizer_json


def language_token_of(inputs: Inputs) -> str:
    """The pattern of the tokens of languages; empty where there are none (an older export says nothing of them)."""
    return getattr(inputs, "language_token", "")
