"""Generative model: outputs and tokens equal transformers' classes, for weights from every source.

The loss is also independent of the number of micro-batches, with different numbers of target tokens
in each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mmray
from mmray.config import Chat, ChatInputs, ClipImage, ClipText, Generative
from mmray.data.stream.collate import lm_columns
from mmray.data.text.chat import ChatEncoder, extend_tokenizer
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.export.export import export

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [
    "a red circle",
    "a blue square on a green ground",
    "what is this?",
    "user: assistant: describe the image.",
]
CHAT = Chat(question="what is this?")
TOKENIZER = extend_tokenizer(train_tokenizer(TEXTS, 90), ChatInputs(chat=CHAT))
ENCODER = ChatEncoder(TOKENIZER, CHAT, 40)
INPUTS = ChatInputs(
    image_side=32,
    max_tokens=40,
    fit="squash",
    mean=(0.5, 0.4, 0.3),
    std=(0.25, 0.2, 0.1),
    chat=CHAT,
)
SPEC = Generative(
    inputs=INPUTS,
    image=ClipImage(width=16, depth=2, heads=2, patch=8),
    text=ClipText(width=24, depth=2, heads=2),
    vocab_size=ENCODER.vocab_size,
)
CONVERSATIONS = (
    [
        {"role": "system", "content": "a red"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a"},
    ],
    ENCODER.as_conversation("a blue square on a green ground"),
    [*ENCODER.as_conversation("a red circle"), *ENCODER.as_conversation("a circle")],
)


def model_of(spec: Generative = SPEC, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = build(spec, ENCODER.vocab_size)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model.eval()


def photo(seed: int = 0) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    )


def batch_of(conversations: list, seed: int = 0) -> dict[str, Tensor]:
    columns = ENCODER.encode_batch(conversations)
    ids = torch.from_numpy(columns["input_ids"].astype(np.int64))
    pixels = [np.asarray(photo(seed + number)).transpose(2, 0, 1) for number in range(len(ids))]
    return lm_columns(columns, ids.shape[1]) | {
        "image": torch.from_numpy(np.stack(pixels)),
        "input_ids": ids,
        "attention_mask": (
            torch.arange(ids.shape[1]) < torch.from_numpy(columns["num_tokens"])[:, None]
        ).long(),
        "key": torch.arange(len(ids)),
        "valid": torch.ones(len(ids), dtype=torch.bool),
        "pos": torch.arange(len(ids)),
    }


def exported(model: nn.Module, folder: Path, spec: Generative = SPEC) -> Path:
    return export(model, spec.model_dump(mode="json"), TOKENIZER, folder)


@torch.no_grad()
def test_export_loads_as_hf_llava_with_equal_outputs(tmp_path: Path) -> None:
    """HF's processor gives the same ids and pixels; its model gives the same logits and the same
    generated text.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = model_of()
    out = exported(model, tmp_path / "m")
    processor, theirs = (
        AutoProcessor.from_pretrained(out),
        AutoModelForImageTextToText.from_pretrained(out).eval(),
    )
    for number, conversation in enumerate(CONVERSATIONS):
        text, _ = ENCODER.render(conversation)
        given = processor(images=[photo(number)], text=[text], return_tensors="pt")
        expected = theirs(**given).logits[0]
        batch = batch_of([conversation], number)
        mine = model(batch)["logits"][0]
        is_image = given["input_ids"][0] == ENCODER.image_id
        assert is_image.sum() == 16
        # the logits of the last image token
        compared = (~is_image) | (torch.cumsum(is_image, 0) == 16)
        torch.testing.assert_close(mine, expected[compared], rtol=1e-4, atol=1e-4)
    as_conversation = ENCODER.render(ENCODER.as_conversation("")[:1])[0] + "ASSISTANT:"
    given = processor(images=[photo()], text=[as_conversation], return_tensors="pt")
    cut = given["input_ids"].shape[1] - 1  # without the closing token of the tokenizer
    given = {name: value[:, :cut] if value.ndim == 2 else value for name, value in given.items()}
    written = theirs.generate(**given, max_new_tokens=12, do_sample=False)[0, cut:].tolist()
    ended = written.index(ENCODER.eos_id) if ENCODER.eos_id in written else len(written)
    assert mmray.load(out).answer([photo()], max_new_tokens=12) == [
        ENCODER.tokenizer.decode(written[:ended]).strip()
    ]


@torch.no_grad()
def test_rows_are_independent_of_each_other_and_padding() -> None:
    model = model_of()
    together = model(batch_of(list(CONVERSATIONS)))["logits"]
    for number, conversation in enumerate(CONVERSATIONS):
        alone = model(batch_of([conversation], number))["logits"][0]
        torch.testing.assert_close(together[number, : len(alone)], alone, rtol=1e-5, atol=1e-5)


def test_weights_load_from_a_directory(tmp_path: Path) -> None:
    from transformers import BertConfig

    model = model_of()
    saved = SPEC.model_copy(update={"weights": str(exported(model, tmp_path / "m"))})
    again = build(saved, ENCODER.vocab_size)
    torch.testing.assert_close(model.state_dict(), again.state_dict(), rtol=0, atol=0)
    frozen = {name for name, weight in again.named_parameters() if not weight.requires_grad}
    assert frozen == {"image.tower.post_layernorm.weight", "image.tower.post_layernorm.bias"}
    BertConfig().save_pretrained(tmp_path / "m")
    with pytest.raises(UsageError, match="holds a model of type 'bert'; supported are llava"):
        build(saved, ENCODER.vocab_size)


@torch.no_grad()
def test_language_model_without_hidden_act_loads(tmp_path: Path) -> None:
    """Gemma 2 names its activation differently, and alternates sliding windows with full
    attention.
    """
    from transformers import Gemma2Config, LlavaForConditionalGeneration

    config = model_of()._hf_config
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    values = sizes | ends | {"intermediate_size": 32, "head_dim": 12, "sliding_window": 4}
    config.text_config = Gemma2Config(vocab_size=SPEC.vocab_size, **values)
    theirs = LlavaForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    model = build(SPEC.model_copy(update={"weights": str(tmp_path)}), SPEC.vocab_size).eval()
    batch = batch_of([CONVERSATIONS[1]])
    at = int(batch["image_pos"])
    ids = batch["input_ids"][0]
    repeated = torch.cat([ids[:at], ids[at].repeat(16), ids[at + 1 :]])[None]
    theirs.config.image_token_index = theirs.config.image_token_id = ENCODER.image_id
    logits = theirs(
        input_ids=repeated, pixel_values=model.image.tower.embeddings.normalize(batch["image"])
    ).logits[0]
    torch.testing.assert_close(
        model(batch)["logits"][0, at:], logits[at + 15 :], rtol=1e-4, atol=1e-4
    )


def test_untrained_language_model_has_positions_for_long_texts() -> None:
    model = build(
        SPEC.model_copy(update={"inputs": INPUTS.model_copy(update={"max_tokens": 2045})}), 20
    )
    assert model.text.tower.config.max_position_embeddings == 2045 + model.image.num_tokens > 2048


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weights": "/nowhere"}, "cannot load `/nowhere` from a directory"),
        ({"image": ClipImage(width=16, depth=1, heads=2, patch=7)}, "do not tile"),
        ({"text": ClipText(width=24, depth=1, heads=5)}, "5 heads do not divide the width"),
    ],
)
def test_invalid_setting_raises(change: dict, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        build(SPEC.model_copy(update=change), ENCODER.vocab_size)
