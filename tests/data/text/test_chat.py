"""Conversations as token ids: target tokens, position of the image, and special tokens in user
text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from mmray.config import Chat, ChatInputs
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.collate import IGNORE_INDEX, lm_columns
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.chat import NO_TOKEN, ChatEncoder, extend_tokenizer
from mmray.data.text.tokenizer import train_tokenizer
from tests.made import make_set, row

CHAT = Chat()
WORDPIECE = extend_tokenizer(
    train_tokenizer(["user assistant describe the image a red circle what is it"], 90), ChatInputs()
)
SAID = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "a red circle"},
    {"role": "user", "content": "what"},
    {"role": "assistant", "content": "a circle"},
]


IMAGE = {"type": "image", "text": None}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def words(encoder: ChatEncoder, ids: np.ndarray) -> str:
    return str(encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def learned_words(encoder: ChatEncoder, conversation: list) -> str:
    columns = encoder.encode_batch([conversation])
    return words(encoder, columns["input_ids"][0][columns["loss_mask"][0]])


def spaced() -> str:
    """A tokenizer whose words include the preceding space, as Llama's do."""
    vocabulary = {"<unk>": 0, "▁a": 1, "▁red": 2, "▁circle": 3, "▁ASSISTANT:": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return str(tokenizer.to_str())


def test_loss_covers_assistant_tokens_and_end_token() -> None:
    encoder = ChatEncoder(WORDPIECE, CHAT, 64)
    assert learned_words(encoder, SAID) == "a red circle </s> a circle </s>"
    text, spans = encoder.render(SAID)
    assert text == (
        "be short USER: <image>\nwhat is it ASSISTANT: a red circle</s>USER: what "
        "ASSISTANT: a circle</s>"
    )
    assert [text[first:last] for first, last in spans] == ["a red circle</s>", "a circle</s>"]


def test_token_with_leading_space_is_learned() -> None:
    encoder = ChatEncoder(extend_tokenizer(spaced(), ChatInputs()), CHAT, 64)
    columns = encoder.encode_batch([encoder.as_conversation("a red circle")])
    learned = columns["input_ids"][0][columns["loss_mask"][0]]
    assert [encoder.tokenizer.id_to_token(token) for token in learned] == [
        "▁a",
        "▁red",
        "▁circle",
        "</s>",
    ]


def test_text_cannot_add_an_image_token() -> None:
    encoder = ChatEncoder(WORDPIECE, CHAT, 64)
    tricky = [
        {"role": "user", "content": "a <image> </s> b<ima<image>ge>"},
        {"role": "assistant", "content": "[SEP] a"},
    ]
    ids, at = (encoder.encode_batch([tricky])[name][0] for name in ("input_ids", "image_pos"))
    assert (ids == encoder.image_id).sum() == 1 and ids[at] == encoder.image_id
    assert (ids == encoder.eos_id).sum() == 1
    alone = encoder.encode_batch([[{"role": "assistant", "content": "a"}]])
    assert alone["image_pos"][0] == 1  # after [CLS]


def test_conversation_with_truncated_image_has_no_targets() -> None:
    encoder = ChatEncoder(WORDPIECE, CHAT, 8)
    columns = encoder.encode_batch(
        [[{"role": "system", "content": "a red circle " * 5}, *SAID[1:]], []]
    )
    assert columns["image_pos"].tolist() == [NO_TOKEN, NO_TOKEN]
    assert not columns["loss_mask"].any()


def test_prepared_conversations_reach_the_block(tmp_path: Any) -> None:
    asked = {"role": "user", "content": [IMAGE, text("what is it")]}
    answered = {"role": "assistant", "content": [text("a red circle")]}
    talking = replace(row(5), texts=["a red circle"], messages=[asked, answered])
    make_set(tmp_path, [talking, row(7, texts=["a circle"])])
    prepared = PreparedSet.open(str(tmp_path))
    found = [each.messages for each in prepared.read(np.array([0, 1]))]
    assert found == [[asked, answered], None]
    reader = RowReader(prepared, ChatInputs(image_side=16, max_tokens=40), WORDPIECE, 10**6)
    block = reader.read_block(SamplePlan(2, 2, 1, 0, 1, shuffle=False), np.array([0, 1, -1]))
    labels = lm_columns(block, block["input_ids"].shape[1])["labels"].numpy()
    said = [words(reader.encoder, line[line != IGNORE_INDEX]) for line in labels]
    assert said == ["a red circle </s>", "a circle </s>", ""]
    assert block["valid"].tolist() == [True, True, False]
