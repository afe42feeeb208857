"""Built-in recipes: their descriptions are true, and their models take a step."""

import pytest
import torch

from mmray.bench.step import Bench, build_bench
from mmray.cli.train import train
from mmray.config import Augment, Batch, Config, Train, recipes, to_yaml
from mmray.config.search_space import override_settings
from mmray.engine.batch import BatchShape, resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.engine.optimizer import build_optimizer
from mmray.engine.parallel.device_defaults import device_defaults
from mmray.errors import UsageError
from mmray.models.build import build


def test_sample_model_has_at_most_a_million_parameters():
    config = recipes.sample()
    model = build(config.model, config.prepare.vocab_size)
    assert 100_000 < sum(weight.numel() for weight in model.parameters()) <= 1_000_000


def test_resnet50_bert_takes_a_step(monkeypatch):
    """Random weights instead of pretrained ones, small images, and two of BERT's twelve layers."""
    recipe = recipes.resnet50_bert()
    inputs = recipe.model.inputs.model_copy(update={"image_side": 64})
    text = recipe.model.text.model_copy(update={"depth": 2})
    model = recipe.model.model_copy(update={"inputs": inputs, "text": text})
    monkeypatch.setattr(Bench, "copy_of_model", lambda bench, shape: bench.model)
    bench = build_bench(recipe.model_copy(update={"model": model}), Group(), micro=2)
    before = {name: value.clone() for name, value in bench.model.state_dict().items()}
    _, loss = bench.loop_window(1)
    after = bench.model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    for branch in ("image", "text"):
        learning = {
            name for name, _ in bench.model.named_parameters() if name.startswith(f"{branch}.")
        }
        assert len(learning & changed) > 0.9 * len(learning), branch
    # batch_norm: frozen
    assert not any("running_" in name or "num_batches" in name for name in changed)
    assert all(bool(value.isfinite().all()) for value in after.values()) and loss == pytest.approx(
        0.69, abs=0.2
    )


def test_clip_scratch_has_the_numbers_of_openai_and_open_clip():
    """Defaults of open_clip_train 3.3.0 for a ViT, and the sizes of ViT-B-32.json."""
    config = recipes.clip_scratch()
    model = config.model
    assert (model.weights, model.activation, model.embed_dim) == ("none", "gelu", 512)
    assert (model.temperature, model.patch_dropout) == (0.07, 0.0)
    assert model.image.model_dump() == {"width": 768, "depth": 12, "heads": 12, "patch": 32}
    assert model.text.model_dump() == {"width": 512, "depth": 12, "heads": 8}
    inputs = model.inputs
    assert (inputs.image_side, inputs.max_tokens, inputs.interpolation) == (224, 77, "bicubic")
    # crops of the original images
    assert config.prepare.image_side == 0
    assert config.augment == Augment(crop_scale=(0.9, 1.0), flip=0, color_jitter=(0, 0, 0, 0))
    adam = config.optimizer
    assert (adam.kind, adam.lr, adam.betas, adam.settings) == ("adamw", 5e-4, (0.9, 0.98), {})
    assert build_optimizer(torch.nn.Linear(1, 1), adam).defaults["eps"] == 1e-6
    assert (adam.weight_decay, adam.clip_norm) == (0.2, 0)
    assert (adam.warmup_steps, adam.schedule, adam.final_lr_fraction) == (10_000, "cosine", 0)
    assert config.train.epochs == 32
    # bf16 on GPUs that have it
    assert (config.train.precision, device_defaults((9, 0)).precision) == ("auto", "bf16")


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_full_recipe_yaml_round_trip_is_equal(name, tmp_path):
    """Also for changes back to a default that no recipe has."""
    changed = recipes.load(name).model_copy(
        update={"train": Train(steps=3), "batch": Batch(micro=2, accumulation=3)}
    )
    other_kind = recipes.load(name).with_model_kind("clip" if name == "fusion" else "towers")
    for config in (
        recipes.load(name),
        changed,
        other_kind,
        Config(recipe=name),
        Config(recipe="mine"),
    ):
        (tmp_path / "whole.yaml").write_text(to_yaml(config))
        assert recipes.load(str(tmp_path / "whole.yaml")) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch: {micro: 8, global: 64}", {"batch.micro": 8, "batch.global": 64}),
        (
            "model: {image: {depth: 2}, weights: none}",
            {"model.image.depth": 2, "model.weights": "none"},
        ),
        ("train: {steps: 9}", {"train.steps": 9, "train.epochs": None}),
        ("train: {steps: null}", {}),
        (
            "batch: {micro: 8, accumulation: 4}",
            {"batch.micro": 8, "batch.accumulation": 4, "batch.global": None},
        ),
    ],
)
def test_short_yaml_overrides_the_named_recipe(text, expected, tmp_path):
    (tmp_path / "short.yaml").write_text(f"recipe: clip\n{text}\n")
    assert recipes.load(str(tmp_path / "short.yaml")) == override_settings(recipes.clip(), expected)


def test_accumulation_replaces_the_automatic_micro_batch_of_a_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("recipe: clip\nbatch: {accumulation: 4}\n")
    for config in (
        recipes.load(str(tmp_path / "mine.yaml")),
        train.parse(["clip", "--batch.accumulation", "4"])["settings"],
    ):
        assert resolve_batch_shape(config.batch, 2) == BatchShape(1024, 128, 2)


def test_short_yaml_may_change_model_kind(tmp_path):
    (tmp_path / "short.yaml").write_text("recipe: clip\nmodel: {kind: siglip, logit_bias: -5}\n")
    model = recipes.clip().with_model_kind("siglip").model.model_copy(update={"logit_bias": -5.0})
    assert recipes.load(str(tmp_path / "short.yaml")) == recipes.clip().model_copy(
        update={"model": model}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [  # without the recipe, another model would be trained from random weights
        (
            "recipe: clipp\nbatch: {micro: 8}\n",
            r"short.yaml: recipe: unknown recipe `clipp`; use one of sample, .*clip",
        ),
        (
            "recipe: clip\nbatch: {micr: 8}\n",
            r"short.yaml: batch.micr: unknown setting; did you mean `micro`",
        ),
    ],
)
def test_invalid_short_yaml_is_refused_with_its_name(tmp_path, text, message):
    (tmp_path / "short.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        recipes.load(str(tmp_path / "short.yaml"))
