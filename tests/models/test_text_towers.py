"""Text towers: layers, pooling, saved and missing weights, language tokens, and errors that name
the setting.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from mmray.builtin import HF_TEXT_TYPES
from mmray.config import TextTower
from mmray.errors import UsageError
from mmray.models.encoders.text import POSITIONS_AFTER_PAD, HfTextTower, build_text_tower
from mmray.models.protocol import saved_layers

IDS = torch.randint(0, 30, (3, 8), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(8) < torch.tensor([[8], [5], [2]])).long()
TORCH_NAMES = {  # of TransformerLayer -> of nn.TransformerEncoderLayer
    "attention_norm.": "norm1.",
    "mlp_norm.": "norm2.",
    "qkv.": "self_attn.in_proj_",
    "project.": "self_attn.out_proj.",
    "mlp.0.": "linear1.",
    "mlp.2.": "linear2.",
}


def mean_over_tokens(hidden: torch.Tensor) -> torch.Tensor:
    return torch.stack([row[: mask.sum()].mean(0) for row, mask in zip(hidden, MASK, strict=True)])


def test_layers_without_weights_equal_those_of_torch() -> None:
    tower: Any = build_text_tower(TextTower(width=24, depth=2, heads=3), 30, 12).double()
    hidden = tower.norm(tower.tokens(IDS) + tower.positions(torch.arange(8)))
    for layer in tower.layers:
        theirs = nn.TransformerEncoderLayer(24, 3, 96, 0.0, "gelu", batch_first=True).double()
        state = layer.state_dict()
        for own, name in TORCH_NAMES.items():
            state = {key.replace(own, name): value for key, value in state.items()}
        theirs.load_state_dict(state)
        hidden = theirs(hidden, src_key_padding_mask=~MASK.bool())
    ours = mean_over_tokens(tower(IDS, MASK)[0])
    torch.testing.assert_close(ours, mean_over_tokens(hidden), rtol=0, atol=1e-9)
    dropping = build_text_tower(TextTower(width=24, heads=3, dropout=0.5), 30, 12).train()
    assert not torch.equal(dropping(IDS, MASK)[0], dropping(IDS, MASK)[0])


def test_random_bert_of_an_earlier_version_is_rebuilt() -> None:
    config = BertConfig(
        vocab_size=30, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, type_vocab_size=1
    )
    saved = saved_layers({"text": json.loads(json.dumps(config.to_dict()))})
    tower = build_text_tower(TextTower(width=24, depth=1), 30, 12, saved)
    assert isinstance(tower, HfTextTower) and tower.width == 24


@pytest.mark.parametrize("family", HF_TEXT_TYPES)
def test_saved_encoder_of_every_family(family: str, tmp_path: Path) -> None:
    """Equal to transformers with its own mask; the padding id does not matter; language tokens get
    new rows.
    """
    own = (
        {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 48} if family == "distilbert" else {}
    )
    own = own or {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 48,
    }
    config = AutoConfig.for_model(family, vocab_size=30, max_position_embeddings=16, **own)
    torch.manual_seed(1)
    theirs = AutoModel.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.where(MASK.bool(), IDS.clamp(min=4), config.pad_token_id)
    expected = mean_over_tokens(theirs(input_ids=ids, attention_mask=MASK).last_hidden_state)
    spec = TextTower(weights=str(tmp_path), width=999)
    tower = build_text_tower(spec, 30, 12).eval()
    assert tower.width == 24
    torch.testing.assert_close(mean_over_tokens(tower(ids, MASK)[0]), expected)
    padded = torch.where(MASK.bool(), ids, 9)
    torch.testing.assert_close(mean_over_tokens(tower(padded, MASK)[0]), expected)
    tower(ids, MASK)[0].sum().backward()
    assert not [name for name, weight in tower.named_parameters() if weight.grad is None]
    dropping = build_text_tower(spec.model_copy(update={"dropout": 0.5}), 30, 12).train()
    assert not torch.equal(dropping(ids, MASK)[0], dropping(ids, MASK)[0])
    positions = 14 if family in POSITIONS_AFTER_PAD else 16
    tower(torch.full((1, positions), 9), torch.ones(1, positions, dtype=torch.long))
    with pytest.raises(UsageError, match=f"{positions + 1} exceeds the {positions} positions"):
        build_text_tower(spec, 30, positions + 1)

    saved = saved_layers({"text": json.loads(json.dumps(tower.net.config.to_dict()))})
    again = build_text_tower(TextTower(weights="/no/such/place"), 30, 12, saved).eval()
    again.load_state_dict(tower.state_dict())
    assert torch.equal(again(ids, MASK)[0], tower(ids, MASK)[0])
    with pytest.raises(UsageError, match="30 embedding rows, too few"):
        build_text_tower(spec, 32, 12)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"123", r"cannot load `.*`: Error while deserializing"),
        (
            "config.json",
            b'{"model_type": "gpt2"}',
            r"holds a model of type 'gpt2'; supported are bert, ",
        ),
    ],
)
def test_damaged_or_unsupported_directory_is_named(
    tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    config = BertConfig(
        vocab_size=30,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=48,
    )
    BertModel(config).save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UsageError, match=rf"model\.text\.weights: .*{message}"):
        build_text_tower(TextTower(weights=str(tmp_path)), 30, 64)


def test_offline_hub_error_suggests_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def offline(name: str, **settings: Any) -> None:
        calls.append(settings.get("local_files_only", False))
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(
        UsageError, match=r"`bert-none`.*couldn't connect.*hf download bert-none --local-dir DIR"
    ):
        build_text_tower(TextTower(weights="bert-none"), 30, 12)
    assert calls == [True, False]
