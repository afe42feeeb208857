"""Weights trained with other sizes: positions are interpolated when a model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import mmray
from mmray.cli.train import train
from mmray.config import (
    Clip,
    ClipImage,
    ClipText,
    ImageTower,
    Inputs,
    Model,
    Siglip,
    TwoTower,
)
from mmray.data.text.tokenizer import TextEncoder, train_tokenizer
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.encoders.positions import image_positions, text_positions
from mmray.models.export.export import export
from mmray.models.protocol import saved_layers

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ["a red circle", "a blue square on a green ground"]
LONG = ["a red circle on a green ground left of a blue square and a red square and a blue circle"]
TOKENIZER = train_tokenizer(SHORT + LONG, 80)
VOCAB = TextEncoder(TOKENIZER, 8).vocab_size
INPUTS = Inputs(image_side=32, max_tokens=10, fit="squash")
SIZES: dict[str, Any] = {
    "image": ClipImage(width=32, depth=2, heads=2, patch=8),
    "text": ClipText(width=24, depth=2, heads=3),
}
SPECS: dict[str, Model] = {
    "clip": Clip(inputs=INPUTS, embed_dim=16, **SIZES),
    "siglip": Siglip(inputs=INPUTS, **SIZES),
}


def exported(spec: Model, folder: Path) -> str:
    """Export a random model of the settings, or one from their weights."""
    torch.manual_seed(0)
    spec = spec.model_copy(update={"vocab_size": VOCAB})
    return str(export(build(spec, VOCAB), spec.model_dump(mode="json"), TOKENIZER, folder))


def larger(spec: Model, weights: str, **changes: Any) -> Model:
    """The model from these weights, for images of 48 instead of 32 pixels and 14 instead of 10
    tokens.
    """
    inputs = INPUTS.model_copy(update={"image_side": 48, "max_tokens": 14})
    return spec.model_copy(update={"weights": weights, "inputs": inputs, **changes})


@pytest.mark.parametrize("kind", SPECS)
def test_model_of_another_size_is_exported_and_opens_in_transformers(
    kind: str, tmp_path: Path
) -> None:
    """The export has the new sizes, so that neither transformers nor mmray interpolates again."""
    from transformers import AutoModel, AutoTokenizer

    first = exported(SPECS[kind], tmp_path / "first")
    spec = larger(SPECS[kind], first)
    model: Any = build(spec, VOCAB).eval()
    assert any("from 4 x 4 to 6 x 6 patches" in note for note in model.build_notes)
    assert any("from 10 to 14 tokens" in note for note in model.build_notes)
    out = exported(spec, tmp_path / "second")
    theirs = AutoModel.from_pretrained(out).eval()
    assert theirs.config.vision_config.image_size == 48
    assert theirs.config.text_config.max_position_embeddings == 14
    loaded = mmray.load(out)
    tokens = AutoTokenizer.from_pretrained(out)(
        LONG, padding="max_length", truncation=True, max_length=14, return_tensors="pt"
    )
    assert tokens["input_ids"].shape == (1, 14)
    photo = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    pixels = torch.from_numpy(photo).permute(2, 0, 1)[None]
    with torch.no_grad():
        normalized = model.image.tower.embeddings.normalize(pixels)
        given = theirs(input_ids=tokens["input_ids"], pixel_values=normalized)
    torch.testing.assert_close(loaded.embed_texts(LONG), given.text_embeds, rtol=0, atol=1e-5)
    image = loaded.embed_images([Image.fromarray(photo)])
    torch.testing.assert_close(image, given.image_embeds, rtol=0, atol=1e-5)


def test_short_texts_and_old_size_change_nothing(tmp_path: Path) -> None:
    """Fewer tokens than positions: the first positions are used, as before."""
    first = exported(SPECS["clip"], tmp_path)
    inputs = INPUTS.model_copy(update={"max_tokens": 6})
    model: Any = build(SPECS["clip"].model_copy(update={"weights": first, "inputs": inputs}), VOCAB)
    assert model.build_notes == ()
    assert len(model.text.tower.embeddings.position_embedding.weight) == 10


def test_first_text_positions_are_kept_on_request(tmp_path: Path) -> None:
    first = exported(SPECS["clip"], tmp_path)
    before = weights_of(build(SPECS["clip"].model_copy(update={"weights": first}), VOCAB))
    after = weights_of(build(larger(SPECS["clip"], first, kept_positions=4), VOCAB))
    torch.testing.assert_close(after[:4], before[:4], rtol=0, atol=0)
    assert after.shape == (14, 24)
    torch.testing.assert_close(after[4], before[4])  # ends of the interpolated part
    torch.testing.assert_close(after[-1], before[-1])


def weights_of(model: Any) -> Tensor:
    return model.text.tower.embeddings.position_embedding.weight.detach()


def test_vit_tower_takes_another_size_also_when_it_resumes(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    image = ImageTower(name="transformers", weights=str(tmp_path))
    inputs = INPUTS.model_copy(update={"image_side": 48})
    spec = TwoTower(inputs=inputs, image=image, embed_dim=16)
    model: Any = build(spec, VOCAB).eval()
    resumed: Any = build(spec, VOCAB, saved_layers(model.architecture())).eval()
    resumed.load_state_dict(model.state_dict())
    pixels = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    embedded = model.embed_image(pixels)
    assert embedded.shape == (2, 16)
    torch.testing.assert_close(resumed.embed_image(pixels), embedded, rtol=0, atol=0)


def test_patches_that_do_not_tile_the_image_are_refused(tmp_path: Path) -> None:
    first = exported(SPECS["clip"], tmp_path)
    inputs = INPUTS.model_copy(update={"image_side": 50})
    with pytest.raises(UsageError, match="patches of 8 pixels"):
        build(SPECS["clip"].model_copy(update={"weights": first, "inputs": inputs}), VOCAB)


def test_weights_on_the_command_line_define_inputs_that_are_not_given(tmp_path: Path) -> None:
    """In a recipe file too, where its own inputs win."""
    out = exported(SPECS["clip"], tmp_path / "first")
    flags = ["--model.weights", out]
    config = train.parse(["clip", *flags])["settings"]
    inputs = config.model.inputs
    assert (inputs.image_side, inputs.max_tokens, inputs.fit) == (32, 10, "squash")
    assert inputs.mean == INPUTS.mean and inputs.tokenizer == f"{out}/tokenizer.json"
    config = train.parse(["clip", *flags, "--model.inputs.image-side", "48"])["settings"]
    assert config.model.inputs.replace(image_side=32) == inputs
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"recipe: clip\nmodel: {{weights: {out}, inputs: {{max_tokens: 7}}}}\n")
    config = train.parse([str(recipe)])["settings"]
    assert config.model.inputs == inputs.replace(max_tokens=7)
    assert train.parse(["siglip", *flags])["settings"].model.inputs.image_side == 224


def test_smooth_positions_stay_smooth() -> None:
    """A ramp over the image stays a ramp, apart from its edges; the class token is kept."""
    axis = torch.arange(12, dtype=torch.float64)
    ramp = (axis[:, None] + 2 * axis).flatten()
    weight = torch.cat([torch.tensor([99.0], dtype=torch.float64), ramp])[:, None]
    resized = image_positions(weight, 24)
    assert resized[0, 0] == 99
    centers = (torch.arange(24, dtype=torch.float64) + 0.5) / 2 - 0.5
    expected = centers[:, None] + 2 * centers
    inner = slice(6, 18)
    got = resized[1:, 0].view(24, 24)
    torch.testing.assert_close(got[inner, inner], expected[inner, inner], rtol=0, atol=1e-5)
    texts = text_positions(ramp[:12, None], 24, 0)
    torch.testing.assert_close(texts[6:18, 0], 2 * centers[6:18], rtol=0, atol=1e-5)


@pytest.mark.parametrize("old_grid", [4, 9])
def test_positions_equal_open_clips(old_grid: int) -> None:
    """Of smaller and of larger images. Where open_clip is installed."""
    model = pytest.importorskip("open_clip.model")
    shape = {"image_size": 48, "patch_size": 8, "layers": 1, "width": 64}
    text = {"context_length": 14, "vocab_size": 90, "layers": 1, "width": 32, "heads": 2}
    net = model.CLIP(16, model.CLIPVisionCfg(**shape), model.CLIPTextCfg(**text))
    image = torch.randn(1 + old_grid**2, 64)
    tokens = torch.randn(10, 32)
    state = {"visual.positional_embedding": image, "positional_embedding": tokens}
    model.resize_pos_embed(state, net)
    model.resize_text_pos_embed(state, net)
    torch.testing.assert_close(image_positions(image, 6), state["visual.positional_embedding"])
    torch.testing.assert_close(text_positions(tokens, 14, 0), state["positional_embedding"])
