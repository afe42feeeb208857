"""Text towers: pooling, saved and missing weights, and errors that name the setting."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from mmray.config import TextTower
from mmray.errors import UsageError
from mmray.models.encoders.text import FAMILIES, POSITIONS_AFTER_PAD, build_text_tower

SMALL = TextTower(width=16, depth=1, heads=2)
IDS = torch.randint(0, 30, (3, 8), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(8) < torch.tensor([[8], [5], [2]])).long()


@pytest.fixture
def saved(tmp_path):
    """A directory with a small BERT saved by transformers, and the network."""
    torch.manual_seed(1)
    config = BertConfig(vocab_size=30, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    bert = BertModel(config)
    bert.save_pretrained(tmp_path)
    return tmp_path, bert


def test_features_are_the_mean_over_real_tokens_of_plain_bert():
    tower = build_text_tower(SMALL, 30, 12).eval()
    tower.net.set_attn_implementation("eager")
    hidden = tower.net(input_ids=IDS, attention_mask=MASK).last_hidden_state
    naive = torch.stack([row[: mask.sum()].mean(0) for row, mask in zip(hidden, MASK, strict=True)])
    tower.net.set_attn_implementation("sdpa")
    torch.testing.assert_close(tower(IDS, MASK), naive)


def test_attention_is_sdpa_and_every_parameter_gets_a_gradient():
    tower = build_text_tower(SMALL, 30, 12)
    assert tower.net.config._attn_implementation == "sdpa"
    assert tower.net.pooler is None
    assert tower.net.config.vocab_size == 30
    assert tower.net.config.max_position_embeddings == 12


def test_dropout_follows_the_setting():
    torch.manual_seed(0)
    still = build_text_tower(SMALL, 30, 12).train()
    assert torch.equal(still(IDS, MASK), still(IDS, MASK))
    dropping = build_text_tower(SMALL.model_copy(update={"dropout": 0.5}), 30, 12).train()
    assert not torch.equal(dropping(IDS, MASK), dropping(IDS, MASK))


def test_text_weights_load_from_a_directory(saved):
    folder, bert = saved
    tower = build_text_tower(TextTower(weights=str(folder), width=999, dropout=0.25), 30, 64)
    assert tower.width == 24
    assert tower.net.config.hidden_dropout_prob == tower.net.config.attention_probs_dropout_prob == 0.25
    expected = bert.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state.mean(1)
    torch.testing.assert_close(tower.eval()(IDS, torch.ones_like(IDS)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_returns_the_mean_over_tokens(family, tmp_path):
    """Equal to transformers with its own mask; the padding id does not matter."""
    own = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 48} if family == "distilbert" else {}
    own = own or {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = AutoConfig.for_model(family, vocab_size=30, max_position_embeddings=16, **own)
    torch.manual_seed(1)
    theirs = AutoModel.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.where(MASK.bool(), IDS.clamp(min=4), config.pad_token_id)
    hidden = theirs(input_ids=ids, attention_mask=MASK).last_hidden_state
    expected = torch.stack([row[: mask.sum()].mean(0) for row, mask in zip(hidden, MASK, strict=True)])
    tower = build_text_tower(TextTower(weights=str(tmp_path)), 30, 12).eval()
    torch.testing.assert_close(tower(ids, MASK), expected)
    torch.testing.assert_close(tower(torch.where(MASK.bool(), ids, 9), MASK), expected)
    tower(ids, MASK).sum().backward()
    assert not [name for name, weight in tower.named_parameters() if weight.grad is None]
    again = build_text_tower(TextTower(), 30, 12, json.loads(json.dumps(tower.net.config.to_dict()))).eval()
    again.load_state_dict(tower.state_dict())
    assert torch.equal(again(ids, MASK), tower(ids, MASK))
    dropping = build_text_tower(TextTower(weights=str(tmp_path), dropout=0.5), 30, 12).train()
    assert not torch.equal(dropping(ids, MASK), dropping(ids, MASK))
    positions = 14 if family in POSITIONS_AFTER_PAD else 16
    tower(torch.full((1, positions), 9), torch.ones(1, positions, dtype=torch.long))
    with pytest.raises(UsageError, match=f"{positions + 1} exceeds the {positions} positions"):
        build_text_tower(TextTower(weights=str(tmp_path)), 30, positions + 1)


def test_tower_rebuilds_from_its_config(saved):
    folder, _ = saved
    tower = build_text_tower(TextTower(weights=str(folder)), 30, 64).eval()
    shape = json.loads(json.dumps(tower.net.config.to_dict()))
    (folder / "config.json").unlink()
    again = build_text_tower(TextTower(weights=str(folder)), 30, 64, shape).eval()
    again.load_state_dict(tower.state_dict())
    assert torch.equal(again(IDS, MASK), tower(IDS, MASK))


@pytest.mark.parametrize(
    ("spec", "vocab_size", "max_tokens", "message"),
    [
        (TextTower(width=20, heads=3), 30, 12, r"model\.text\.heads: 3 heads do not divide the width of 20"),
        (TextTower(weights="/no/such/place"), 30, 12, r"model\.text\.weights: no directory /no/such/place"),
    ],
)
def test_invalid_text_setting_is_named(spec, vocab_size, max_tokens, message):
    with pytest.raises(UsageError, match=message):
        build_text_tower(spec, vocab_size, max_tokens)


def test_weights_incompatible_with_the_data_raise(saved):
    spec = TextTower(weights=str(saved[0]))
    with pytest.raises(UsageError, match=r"30 embedding rows, too few for a tokenizer of 31 tokens"):
        build_text_tower(spec, 31, 64)
    with pytest.raises(UsageError, match=r"model\.inputs\.max_tokens: 600 exceeds the 512 positions"):
        build_text_tower(spec, 30, 600)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"123", r"cannot read a saved model"),
        ("config.json", b"{", r"cannot read a saved model"),
        ("config.json", b'{"model_type": "gpt2"}', r"holds a model of type 'gpt2'; supported are bert, "),
    ],
)
def test_damaged_or_unsupported_directory_is_named(saved, file, content, message):
    (saved[0] / file).write_bytes(content)
    with pytest.raises(UsageError, match=rf"model\.text\.weights: .*{message}"):
        build_text_tower(TextTower(weights=str(saved[0])), 30, 64)


def test_directory_without_weights_is_named(saved):
    (saved[0] / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model\.text\.weights: .*cannot read a saved model"):
        build_text_tower(TextTower(weights=str(saved[0])), 30, 64)


def test_missing_weights_raise(saved):
    folder, bert = saved
    state = {name: value for name, value in bert.state_dict().items() if "layer.1." not in name}
    bert.save_pretrained(folder, state_dict=state)
    with pytest.raises(UsageError, match=r"lacks 16 weights of a bert, first encoder\.layer\.1\."):
        build_text_tower(TextTower(weights=str(folder)), 30, 64)


def test_offline_hub_error_suggests_a_fix(monkeypatch):
    calls = []

    def offline(name, **settings):
        calls.append(settings.get("local_files_only", False))
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(UsageError, match=r"`bert-none`.*couldn't connect.*hf download bert-none --local-dir DIR"):
        build_text_tower(TextTower(weights="bert-none"), 30, 12)
    assert calls == [True, False]
