"""Weights saved without language tokens: each language gets an embedding row, and the others stay unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from mmray.config import Model, TextTower
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.encoders.text import FAMILIES, build_text_tower
from tests.models.test_clip import SPECS, VOCAB, OpenClip, model_of
from tests.models.test_text_towers import IDS, MASK

LANGUAGES = 2


@pytest.mark.parametrize("family", FAMILIES)
def test_text_tower_adds_language_rows(family: str, tmp_path: Path) -> None:
    own = {"dim": 24, "n_layers": 1, "n_heads": 3, "hidden_dim": 48} if family == "distilbert" else {}
    own = own or {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 48}
    AutoModel.from_config(AutoConfig.for_model(family, vocab_size=30, **own)).save_pretrained(tmp_path)
    spec = TextTower(weights=str(tmp_path))
    plain = build_text_tower(spec, 30, 12).eval()
    tower = build_text_tower(spec, 30 + LANGUAGES, 12, language_token="[{}]").eval()
    assert tower.net.get_input_embeddings().weight.shape[0] == tower.net.config.vocab_size == 30 + LANGUAGES
    ids = IDS.clamp(min=4)
    assert torch.equal(tower(ids, MASK), plain(ids, MASK))
    assert not torch.allclose(tower(ids.clamp(min=31), MASK), plain(ids, MASK))
    again = build_text_tower(TextTower(), 32, 12, json.loads(json.dumps(tower.net.config.to_dict())), "[{}]").eval()
    again.load_state_dict(tower.state_dict())
    assert torch.equal(again(ids, MASK), tower(ids, MASK))
    for rows, token in ((30 + LANGUAGES, ""), (3000, "[{}]")):  # another tokenizer is still refused
        with pytest.raises(UsageError, match="30 embedding rows, too few"):
            build_text_tower(spec, rows, 12, language_token=token)


@pytest.mark.parametrize("kind", [*SPECS, "open_clip"])
def test_clip_and_siglip_add_language_rows(kind: str, tmp_path: Path) -> None:
    drawn: Any = OpenClip() if kind == "open_clip" else model_of(SPECS[kind])
    place = tmp_path / "open_clip.pt" if kind == "open_clip" else tmp_path
    if kind == "open_clip":
        torch.save(drawn.state_dict(), place)
        known = drawn.token_embedding.weight
    else:
        theirs = AutoModel.from_config(AutoConfig.for_model(**drawn.architecture()["config"]))
        theirs.save_pretrained(tmp_path)
        known = theirs.text_model.embeddings.token_embedding.weight
    spec: Model = SPECS["clip" if kind == "open_clip" else kind].model_copy(update={"weights": str(place)})
    speaking = spec.model_copy(update={"inputs": spec.inputs.model_copy(update={"language_token": "[{}]"})})
    model: Any = build(speaking, VOCAB + LANGUAGES)
    rows = model.text.tower.embeddings.token_embedding.weight
    assert torch.equal(rows[:VOCAB], known) and len(rows) == VOCAB + LANGUAGES and rows[VOCAB:].std() > 0
    again = build(speaking, VOCAB + LANGUAGES, json.loads(json.dumps(model.architecture())))
    again.load_state_dict(model.state_dict())
    with pytest.raises(UsageError, match=r"too few|size mismatch"):
        build(spec, VOCAB + LANGUAGES)
