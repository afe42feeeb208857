"""Conversations as token ids with a loss mask over the assistant's words and their end token.

Beside text.py, for models that write (model.kind generative). A conversation is laid out by the model's own words for
its parts (model.inputs.chat), tokenised as one text, as a processor of transformers would, and marked by the places of
the letters. The image has one token in the ids; the model puts its features there.
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
    """Conversations to ids, right-padded to the longest of the call and cut at `max_tokens`."""

    empty: list[Message] = []  # noqa: RUF012 - stands for a row without words, and is never changed

    def __init__(self, tokenizer_json: str, chat: Chat, max_tokens: int) -> None:
        encoder = TextEncoder(tokenizer_json, max_tokens)
        self.pad_id, self.vocab_size = encoder.pad_id, encoder.vocab_size
        self._chat, self.tokenizer = chat, encoder.tokenizer
        found = (self.tokenizer.token_to_id(mark) for mark in (chat.image, chat.end))
        self.image_id, self.end_id = (NO_IMAGE if mark is None else mark for mark in found)  # `with_marks` gives both
        added: dict[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        self._marks = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)

    def texts_of(self, row: Row) -> list[list[Message]]:
        """What a row has to say: its conversation, or each of its captions as the answer to one question."""
        return [row.messages] if row.messages else [self.as_conversation(text) for text in row.texts]

    def as_conversation(self, caption: str) -> list[Message]:
        return [{"role": "user", "content": self._chat.question}, {"role": "assistant", "content": caption}]

    def columns(self, conversations: list[list[Message]]) -> dict[str, np.ndarray]:
        """input_ids int32 [N, T], num_tokens int32 [N], learned bool [N, T], image_pos int32 [N].

        `learned`: tokens of the assistant's words and of their end. A row whose image was cut off learns nothing.
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
        """What is asked about a row's image, and what may be answered: by `words_of`, the first turns of each."""
        as_conversation = next((message["content"] for message in conversations[0] if message["role"] == "user"), "")
        answers = [
            next(message["content"] for message in conversation if message["role"] == "assistant")
            for conversation in conversations
        ]
        return as_conversation, answers

    def render(self, conversation: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the character spans that the loss covers."""
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
        """ids int32 [1, T] after which the model is to answer, and the place of the image int32 [1]."""
        text, _ = self.render([{"role": "user", "content": question}])
        row = self.tokenizer.encode(text + self._chat.assistant.partition("{}")[0].rstrip())
        last = max(place for place, added in enumerate(row.special_tokens_mask) if not added)
        ids = row.ids[: last + 1]  # without what the tokenizer closes a text with
        return np.array([ids], np.int32), np.array([ids.index(self.image_id)], np.int32)

    def _plain(self, content: str) -> str:
        """The text without special tokens, which a user's text must not contain."""
        while (found := next((mark for mark in self._marks if mark in content), None)) is not None:
            content = content.replace(found, "")  # the rest may form another one
        return content


def add_special_tokens(tokenizer_json: str, chat: Chat) -> str:
    """The tokenizer, with a token of its own for the image and for the end of an answer where it has none."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    missing = [mark for mark in (chat.image, chat.end) if mark and tokenizer.token_to_id(mark) is None]
    if not missing:
        return tokenizer_json
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in missing])
    return str(tokenizer.to_str())


def _tokens_in_spans(offsets: list[tuple[int, int]], added: list[int], spans: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens have letters in a span, bool [T]; those that the tokenizer adds around a text have none.

    A token may begin with the space before a span: the model that answers writes that space with its first word.
    """
    start, stop = np.array(offsets, np.int64).reshape(-1, 2).T
    inside = np.zeros(len(start), bool)
    for first, last in spans:
        inside |= (start < last) & (stop > first) & (stop > start)
    return inside & (np.array(added) == 0)


# What of a row becomes tokens: its captions, or, where the model writes, its conversation.
def build_encoder(tokenizer_json: str, inputs: Inputs) -> Any:
    """The encoder that the inputs of a model ask for: all have words_of, columns, nothing, pad_id and vocab_size."""
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        return ChatEncoder(tokenizer_json, chat, inputs.max_tokens)
    if pattern := language_token_pattern(inputs):
        return LanguageEncoder(tokenizer_json, pattern, inputs.max_tokens)
    return TextEncoder(tokenizer_json, inputs.max_tokens)


def extend_tokenizer(tokenizer_json: str, inputs: Inputs, languages: Iterable[str] = ()) -> str:
    """The tokenizer with the tokens that the inputs of a model need; `languages`: of the rows. Raises UsageError."""
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        return add_special_tokens(tokenizer_json, chat)
    pattern = language_token_pattern(inputs)
    return add_language_tokens(tokenizer_json, pattern, languages) if pattern else tokenizer_json


def language_token_pattern(inputs: Inputs) -> str:
    """The pattern of the tokens of languages; empty where there are none (an older export says nothing of them)."""
    return getattr(inputs, "language_token", "")
