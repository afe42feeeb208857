"""Conversations as token ids with a loss mask over the assistant turns and their end token.

Used by models with model.kind generative. A conversation is rendered with the template model.inputs.chat and tokenized
as one text, as processors of transformers do. The mask is computed from character offsets. The image is one token,
which the model replaces by image features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from mmray.data.text.tokenizer import LanguageEncoder, TextEncoder, add_language_tokens

if TYPE_CHECKING:
    from mmray.config import Chat, Inputs
    from mmray.data.store.prepared_set import Row


Message = dict[str, str]
NO_IMAGE = -1


class ChatEncoder:
    """Encodes conversations as token ids, right-padded to the longest of the call and truncated to `max_tokens`."""

    empty: list[Message] = []  # noqa: RUF012 - text of a row without captions; never modified

    def __init__(self, tokenizer_json: str, chat: Chat, max_tokens: int) -> None:
        encoder = TextEncoder(tokenizer_json, max_tokens)
        self.pad_id, self.vocab_size = encoder.pad_id, encoder.vocab_size
        self._chat, self.tokenizer = chat, encoder.tokenizer
        found = (self.tokenizer.token_to_id(mark) for mark in (chat.image, chat.end))
        self.image_id, self.end_id = (NO_IMAGE if mark is None else mark for mark in found)
        added: dict[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        self._marks = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)

    def texts_of(self, row: Row) -> list[list[Message]]:
        """Return the conversation of a row, or each of its captions as the answer to `chat.question`."""
        return [row.messages] if row.messages else [self.as_conversation(text) for text in row.texts]

    def as_conversation(self, caption: str) -> list[Message]:
        return [{"role": "user", "content": self._chat.question}, {"role": "assistant", "content": caption}]

    def columns(self, conversations: list[list[Message]]) -> dict[str, np.ndarray]:
        """Return input_ids int32 [N, T], num_tokens int32 [N], loss_mask bool [N, T], image_pos int32 [N].

        `loss_mask` marks the tokens of assistant turns and their end tokens. It is empty for a row whose image token
        was truncated.
        """
        render = [self.render(conversation) for conversation in conversations]
        rows = self.tokenizer.encode_batch([text for text, _ in render])
        num_tokens = np.array([len(row.ids) for row in rows], np.int32)
        shape = len(rows), max(1, num_tokens.max(initial=0))
        ids, learned = np.full(shape, self.pad_id, np.int32), np.zeros(shape, bool)
        image_pos = np.full(len(rows), NO_IMAGE, np.int32)
        for number, (row, (_, spans)) in enumerate(zip(rows, render, strict=True)):
            ids[number, : len(row.ids)] = row.ids
            places = np.flatnonzero(ids[number] == self.image_id)
            if places.size and spans:
                image_pos[number] = places[0]
                learned[number, : len(row.ids)] = _tokens_in_spans(row.offsets, row.special_tokens_mask, spans)
        return {"input_ids": ids, "num_tokens": num_tokens, "loss_mask": learned, "image_pos": image_pos}

    def prompt_and_references(self, conversations: list[list[Message]]) -> tuple[str, list[str]]:
        """Return the question about the image of a row and the reference answers (first turns)."""
        as_conversation = next((message["content"] for message in conversations[0] if message["role"] == "user"), "")
        answers = [
            next(message["content"] for message in conversation if message["role"] == "assistant")
            for conversation in conversations
        ]
        return as_conversation, answers

    def render(self, conversation: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and the character spans that contribute to the loss."""
        chat, text, spans = self._chat, "", []
        image = chat.image + chat.after_image
        if not any(message["role"] == "user" for message in conversation):
            text, image = image, ""
        for message in conversation:
            before, _, after = getattr(chat, message["role"]).partition("{}")
            content = self._plain(message["content"])
            if message["role"] == "user":
                content, image = image + content, ""
            text += before
            if message["role"] == "assistant":
                spans.append((len(text), len(text) + len(content) + len(chat.end)))
                content += chat.end
            text += content + after
        return text, spans

    def encode_prompt(self, question: str) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int32 [1, T] of the prompt, and the position of the image token int32 [1]."""
        text, _ = self.render([{"role": "user", "content": question}])
        row = self.tokenizer.encode(text + self._chat.assistant.partition("{}")[0].rstrip())
        last = max(place for place, added in enumerate(row.special_tokens_mask) if not added)
        ids = row.ids[: last + 1]  # without the special tokens that the tokenizer appends
        return np.array([ids], np.int32), np.array([ids.index(self.image_id)], np.int32)

    def _plain(self, content: str) -> str:
        """Remove special tokens from untrusted text."""
        while (found := next((mark for mark in self._marks if mark in content), None)) is not None:
            content = content.replace(found, "")  # the rest may form another token
        return content


def add_special_tokens(tokenizer_json: str, chat: Chat) -> str:
    """Add special tokens for the image and the end of an answer if the tokenizer has none."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    missing = [mark for mark in (chat.image, chat.end) if mark and tokenizer.token_to_id(mark) is None]
    if not missing:
        return tokenizer_json
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in missing])
    return str(tokenizer.to_str())


def _tokens_in_spans(offsets: list[tuple[int, int]], added: list[int], spans: list[tuple[int, int]]) -> np.ndarray:
    """Return which tokens overlap a span, bool [T]; special tokens do not.

    A token may start with the space before a span, because the model generates this space with the first word.
    """
    start, stop = np.array(offsets, np.int64).reshape(-1, 2).T
    inside = np.zeros(len(start), bool)
    for first, last in spans:
        inside |= (start < last) & (stop > first) & (stop > start)
    return inside & (np.array(added) == 0)


def build_encoder(tokenizer_json: str, inputs: Inputs) -> Any:
    """Return the encoder for the inputs of a model.

    All encoders have texts_of, columns, empty, pad_id and vocab_size.
    """
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        return ChatEncoder(tokenizer_json, chat, inputs.max_tokens)
    if pattern := language_token_pattern(inputs):
        return LanguageEncoder(tokenizer_json, pattern, inputs.max_tokens)
    return TextEncoder(tokenizer_json, inputs.max_tokens)


def extend_tokenizer(tokenizer_json: str, inputs: Inputs, languages: Iterable[str] = ()) -> str:
    """Add the tokens that the inputs of a model need; `languages` are those of the rows. Raises UsageError."""
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        return add_special_tokens(tokenizer_json, chat)
    pattern = language_token_pattern(inputs)
    return add_language_tokens(tokenizer_json, pattern, languages) if pattern else tokenizer_json


def language_token_pattern(inputs: Inputs) -> str:
    """Return the pattern of the language tokens; empty if there are none or the export is older than the setting."""
    return getattr(inputs, "language_token", "")
