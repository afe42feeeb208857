"""Built-in recipes: what they say of themselves is true, and a step can be taken on a model of their own shape."""

import pytest
import torch

from mmray import recipes
from mmray.bench.step import Bench, prepared
from mmray.models.build import build
from mmray.train.group import Group


def test_the_samples_model_has_at_most_a_million_parameters():
    config = recipes.sample()
    model = build(config.model, config.prepare.vocab_size)
    assert 100_000 < sum(weight.numel() for weight in model.parameters()) <= 1_000_000


def test_resnet50_bert_takes_a_step(monkeypatch):
    """Its own config with drawn weights for the pretrained ones; small pictures and two layers of BERT's twelve."""
    recipe = recipes.resnet50_bert()
    inputs = recipe.model.inputs.model_copy(update={"image_side": 64})
    text = recipe.model.text.model_copy(update={"depth": 2})
    model = recipe.model.model_copy(update={"inputs": inputs, "text": text})
    monkeypatch.setattr(Bench, "_copy", lambda bench: bench.model)
    bench = prepared(recipe.model_copy(update={"model": model}), Group(), micro=2)
    before = {name: value.clone() for name, value in bench.model.state_dict().items()}
    _, loss = bench.loop_window(1)
    after = bench.model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    for branch in ("image", "text"):
        learning = {name for name, _ in bench.model.named_parameters() if name.startswith(f"{branch}.")}
        assert len(learning & changed) > 0.9 * len(learning), branch
    assert not any("running_" in name or "num_batches" in name for name in changed)  # batch_norm: frozen
    assert all(bool(value.isfinite().all()) for value in after.values()) and loss == pytest.approx(0.69, abs=0.2)
