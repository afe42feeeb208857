"""What of a row becomes tokens: its captions, or, where the model writes, its conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmray.data.chat import ChatEncoder, with_marks
from mmray.data.text import TextEncoder

if TYPE_CHECKING:
    from mmray.config import Inputs


def encoder_of(tokenizer_json: str, inputs: Inputs) -> Any:
    """The encoder that the inputs of a model ask for: both have words_of, columns, nothing, pad_id and vocab_size."""
    chat = getattr(inputs, "chat", None)
    if chat is None:
        return TextEncoder(tokenizer_json, inputs.max_tokens)
    return ChatEncoder(tokenizer_json, chat, inputs.max_tokens)


def fitted(tokenizer_json: str, inputs: Inputs) -> str:
    """The tokenizer with the tokens that the inputs of a model need."""
    chat = getattr(inputs, "chat", None)
    return tokenizer_json if chat is None else with_marks(tokenizer_json, chat)
