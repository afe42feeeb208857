"""Conversations as token ids with a loss mask over the assistant turns and their end token, for
generative models.

A conversation is rendered with the template model.inputs.chat and tokenized as one text, as
processors of transformers do. The mask is computed from character offsets. The image is one token,
which the model replaces by image features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from mmray.data.messages import message_text
from mmray.data.text.languages import LanguageTextEncoder, add_language_tokens
from mmray.data.text.tokenizer import TextEncoder, add_special_tokens, remove_tokens

if TYPE_CHECKING:
    from mmray.config import Chat, Inputs
    from mmray.data.store.prepared_set import Row

Message = dict[str, str]
NO_TOKEN = -1


class ChatEncoder:
    """Encodes conversations as token ids, right-padded to the longest of the call and truncated to
    `max_tokens`.
    """

    EMPTY_TEXT: list[Message] = []  # noqa: RUF012 - text of a row without captions; never modified

    def __init__(self, tokenizer_json: str, chat: Chat, max_tokens: int) -> None:
        encoder = TextEncoder(tokenizer_json, max_tokens)
        self.pad_id = encoder.pad_id
        self.vocab_size = encoder.vocab_size
        self._chat = chat
        self.tokenizer = encoder.tokenizer
        ids = (self.tokenizer.token_to_id(token) for token in (chat.image, chat.end))
        self.image_id, self.eos_id = (NO_TOKEN if index is None else index for index in ids)
        self._special_tokens = sorted(encoder.special_tokens, key=len, reverse=True)

    def format_texts(self, row: Row) -> list[list[Message]]:
        """Return the conversation of a row, or for each caption one with it as the answer to
        `chat.question`.
        """
        if row.messages:
            return [
                [
                    {"role": message["role"], "content": message_text(message)}
                    for message in row.messages
                ]
            ]
        return [self.as_conversation(text) for text in row.texts]

    def as_conversation(self, caption: str) -> list[Message]:
        return [
            {"role": "user", "content": self._chat.question},
            {"role": "assistant", "content": caption},
        ]

    def encode_batch(self, conversations: list[list[Message]]) -> dict[str, np.ndarray]:
        """Return input_ids int32 [N, T], num_tokens int32 [N], loss_mask bool [N, T], image_pos
        int32 [N].

        `loss_mask` marks the tokens of assistant turns and their end tokens; it is empty for a row
        whose image token was truncated. A token may start with the space before a turn, because the
        model generates it with the word.
        """
        rendered = [self.render(conversation) for conversation in conversations]
        rows = self.tokenizer.encode_batch([text for text, _ in rendered])
        num_tokens = np.array([len(row.ids) for row in rows], np.int32)
        shape = len(rows), max(1, num_tokens.max(initial=0))
        ids = np.full(shape, self.pad_id, np.int32)
        loss_mask = np.zeros(shape, bool)
        image_pos = np.full(len(rows), NO_TOKEN, np.int32)
        for number, (row, (_, spans)) in enumerate(zip(rows, rendered, strict=True)):
            ids[number, : len(row.ids)] = row.ids
            images = np.flatnonzero(ids[number] == self.image_id)
            if not images.size or not spans:
                continue
            image_pos[number] = images[0]
            start, stop = np.array(row.offsets, np.int64).reshape(-1, 2).T
            is_text = (stop > start) & (np.array(row.special_tokens_mask) == 0)
            for first, last in spans:
                loss_mask[number, : len(row.ids)] |= is_text & (start < last) & (stop > first)
        return {
            "input_ids": ids,
            "num_tokens": num_tokens,
            "loss_mask": loss_mask,
            "image_pos": image_pos,
        }

    def prompt_and_references(self, conversations: list[list[Message]]) -> tuple[str, list[str]]:
        """Return the question about the image of a row and the reference answers (first turns)."""
        question = next(
            (message["content"] for message in conversations[0] if message["role"] == "user"), ""
        )
        answers = [
            next(m["content"] for m in turns if m["role"] == "assistant") for turns in conversations
        ]
        return question, answers

    def render(self, conversation: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and the character spans that contribute to the loss."""
        chat = self._chat
        text = ""
        spans = []
        image = f"{chat.image}\n"
        if not any(message["role"] == "user" for message in conversation):
            text = image
            image = ""
        for message in conversation:
            before, _, after = getattr(chat, message["role"]).partition("{}")
            content = remove_tokens(message["content"], self._special_tokens)
            if message["role"] == "user":
                content = image + content
                image = ""
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
        last = max(
            index for index, is_special in enumerate(row.special_tokens_mask) if not is_special
        )
        ids = row.ids[: last + 1]  # without the special tokens that the tokenizer appends
        return np.array([ids], np.int32), np.array([ids.index(self.image_id)], np.int32)


def build_encoder(tokenizer_json: str, inputs: Inputs) -> Any:
    """Return the encoder of the texts of a model: a ChatEncoder for conversations, otherwise a
    TextEncoder, which has `languages` if the model has language tokens.
    """
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        return ChatEncoder(tokenizer_json, chat, inputs.max_tokens)
    if inputs.language_token:
        return LanguageTextEncoder(tokenizer_json, inputs.max_tokens, inputs.language_token)
    return TextEncoder(tokenizer_json, inputs.max_tokens)


def extend_tokenizer(tokenizer_json: str, inputs: Inputs, languages: Iterable[str] = ()) -> str:
    """Return the tokenizer with the special tokens that the inputs of a model need.

    Args:
        tokenizer_json: Text of a tokenizer.json.
        inputs: The `model.inputs` section.
        languages: Languages of the rows.

    Raises:
        UsageError: The rows do not have the languages that `model.inputs.language_token` needs.
    """
    chat = getattr(inputs, "chat", None)
    if chat is not None:
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokens = [token for token in (chat.image, chat.end) if token]
        missing = [token for token in tokens if tokenizer.token_to_id(token) is None]
        return add_special_tokens(tokenizer_json, missing) if missing else tokenizer_json
    if inputs.language_token:
        return add_language_tokens(tokenizer_json, inputs.language_token, languages)
    return tokenizer_json
