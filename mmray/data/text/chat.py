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

    A conversation is a list of messages {"role": "system" | "user" | "assistant", "content": text}.

    Args:
        tokenizer_json: Content of a tokenizer.json file that has `chat.image` and `chat.end`.
        chat: The `model.inputs.chat` section, with the template of each role.
        max_tokens: Maximum number of tokens of a conversation.
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
        """Return the conversations of a stored row.

        Args:
            row: A row of a prepared set, with `messages` or with captions in `texts`.

        Returns:
            The one conversation of `messages`, with the text of each message. Otherwise one
            conversation per caption, in which the caption is the answer to `chat.question`.
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
        """Return a conversation in which a caption is the assistant's answer to `chat.question`."""
        return [
            {"role": "user", "content": self._chat.question},
            {"role": "assistant", "content": caption},
        ]

    def encode_batch(self, conversations: list[list[Message]]) -> dict[str, np.ndarray]:
        """Encode conversations as the token columns of a batch.

        A token may start with the space before a turn, because the model generates it with the
        word.

        Args:
            conversations: N conversations, as `format_texts` returns them.

        Returns:
            - `input_ids` int32 [N, T], padded on the right with `pad_id`; T is the number of tokens
              of the longest conversation, at most `max_tokens`.
            - `num_tokens` int32 [N], without padding.
            - `loss_mask` bool [N, T]: True for the tokens of assistant turns and their end tokens.
              All False for a conversation whose image token was truncated.
            - `image_pos` int32 [N]: index of the image token in its row of `input_ids`; -1 if it
              was truncated, or if there is no assistant turn.
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
        """Return the question of a row and its reference answers, to evaluate generated answers.

        Args:
            conversations: The conversations of one row, as `format_texts` returns them; at least
                one.

        Returns:
            The first user message of the first conversation ("" without one), and the first
            assistant message of each conversation.
        """
        question = next(
            (message["content"] for message in conversations[0] if message["role"] == "user"), ""
        )
        answers = [
            next(m["content"] for m in turns if m["role"] == "assistant") for turns in conversations
        ]
        return question, answers

    def render(self, conversation: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation with the chat template, without special tokens in its messages.

        The image token precedes the first user message, or the whole text if there is none.

        Returns:
            The text to tokenize, and the character spans (start, stop) in it that contribute to the
            loss: each assistant message with its end token.
        """
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
        """Encode a question about an image, up to where the model generates the answer.

        Args:
            question: The user message, without the image token, which is added.

        Returns:
            Token ids int32 [1, T] of the prompt, and the index of the image token in it, int32 [1].
        """
        text, _ = self.render([{"role": "user", "content": question}])
        row = self.tokenizer.encode(text + self._chat.assistant.partition("{}")[0].rstrip())
        last = max(
            index for index, is_special in enumerate(row.special_tokens_mask) if not is_special
        )
        ids = row.ids[: last + 1]  # without the special tokens that the tokenizer appends
        return np.array([ids], np.int32), np.array([ids.index(self.image_id)], np.int32)


def build_encoder(tokenizer_json: str, inputs: Inputs) -> Any:
    """Build the encoder that converts the texts of a row to token ids for a model.

    Args:
        tokenizer_json: Content of a tokenizer.json file.
        inputs: The `model.inputs` section, with `max_tokens`, `language_token` and, for a
            generative model, `chat`.

    Returns:
        A ChatEncoder for conversations if `inputs` has `chat`. Otherwise a LanguageTextEncoder if
        `language_token` is set, else a TextEncoder. All have `format_texts(row)`,
        `encode_batch(texts)`, `pad_id` and `vocab_size`.
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
        tokenizer_json: Content of a tokenizer.json file.
        inputs: The `model.inputs` section.
        languages: Languages of the rows of the training set, such as `de`; used only if
            `language_token` is set.

    Returns:
        Content of the tokenizer.json with the image and end tokens of `inputs.chat`, or with a
        token for each language. Unchanged if nothing is missing.

    Raises:
        UsageError: `language_token` is set, and there are no languages or more than MAX_LANGUAGES
            (1000).
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
