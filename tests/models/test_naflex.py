"""NaFlex: images as patches in their own aspect ratio, equal to transformers' Siglip2Model and
Siglip2ImageProcessor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import mmray
from mmray.config import Augment, CaptionDecoder, ClipText, Naflex, NaflexImage, NaflexInputs
from mmray.data.images.patches import patch_grid, pixel_shape
from mmray.data.images.transform import NUM_UNIFORMS, transform
from mmray.engine.collectives import Group
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.export.export import export, to_hf_state
from mmray.models.synthetic import synthetic_batch
from mmray.objectives.contrastive import Sigmoid
from mmray.training.saved_model import pretrained_config
from tests.engine import recipe_models, toy
from tests.models.test_clip import TEXTS, TOKENIZER, VOCAB, model_of

pytestmark = pytest.mark.usefixtures("one_thread")
INPUTS = NaflexInputs(patch=8, max_patches=20, max_tokens=10, mean=(0.5, 0.4, 0.3))
SPEC = Naflex(
    inputs=INPUTS,
    image=NaflexImage(width=32, depth=2, heads=2),
    text=ClipText(width=24, depth=2, heads=3),
    vocab_size=VOCAB,
)
SIZES = ((640, 480), (480, 640), (200, 50), (31, 300), (9, 7), (64, 64))  # width, height


def photo(size: tuple[int, int]) -> Image.Image:
    """A smooth image with noise."""
    noise = np.random.default_rng(sum(size)).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def siglip2_of(model: Any) -> Any:
    """transformers' model with the weights of a model."""
    from transformers import Siglip2Config, Siglip2Model

    theirs = Siglip2Model(Siglip2Config.from_dict(model.architecture()["config"]))
    theirs.load_state_dict(to_hf_state(model))
    return theirs.eval()


def their_images(model: Any, image: Tensor) -> list[dict[str, Tensor]]:
    """The inputs of Siglip2Model for each image, without padding."""
    inputs = []
    for each in image:
        grid = each[0, :2].long()
        patches = each[1 : 1 + int(grid.prod())].unflatten(1, (-1, 3, 1, 1))
        pixels = model.image.tower.embeddings.normalize(patches).flatten(1)[None]
        mask = torch.ones(pixels.shape[:2], dtype=torch.long)
        inputs.append(
            {
                "pixel_values": pixels,
                "pixel_attention_mask": mask,
                "spatial_shapes": grid[None],
            }
        )
    return inputs


def test_logits_and_gradients_equal_transformers_one_image_at_a_time() -> None:
    """Their positions are float32, so gradients agree to its precision."""
    model = model_of(SPEC).double()
    theirs = siglip2_of(model).double()
    batch = synthetic_batch(INPUTS, VOCAB, 7, "cpu")
    outputs = model(batch)
    images = [
        theirs.get_image_features(**each).pooler_output
        for each in their_images(model, batch["image"])
    ]
    texts = theirs.get_text_features(input_ids=batch["input_ids"]).pooler_output
    products = F.normalize(texts) @ F.normalize(torch.cat(images)).T
    expected = products * theirs.logit_scale.exp() + theirs.logit_bias
    logits = outputs["logit_scale"] * outputs["text_embed"] @ outputs["image_embed"].T
    logits = logits + outputs["logit_bias"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)

    signs = 2 * torch.eye(7, dtype=torch.float64) - 1
    (-F.logsigmoid(signs * expected).sum()).backward()
    loss, _, _ = Sigmoid().compute_loss(outputs, batch)
    loss.backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    model.load_state_dict({name: weight.grad for name, weight in model.named_parameters()})
    for name, own in to_hf_state(model).items():
        torch.testing.assert_close(own, gradients[name], rtol=1e-5, atol=1e-5, msg=name)


def test_accumulated_step_equals_the_whole_batch() -> None:
    whole = recipe_models.train_kind("naflex", Group(), "single", micro=8)
    start = recipe_models.train_kind("naflex", Group(), "single", steps=0)
    parts = recipe_models.train_kind("naflex", Group(), "single", micro=3)
    toy.assert_equal_weights(parts, whole)
    assert (whole - start).abs().max() > 1e-4


def test_padding_and_rows_without_an_image_have_no_effect() -> None:
    model = model_of(SPEC)
    image = synthetic_batch(INPUTS, VOCAB, 4, "cpu")["image"]
    blank = torch.zeros_like(image[:1])  # of a row that cannot be read
    other = image.clone()
    for each in other:
        each[1 + int(each[0, :2].prod()) :] = 7
    expected = model.embed_image(torch.cat([image, blank]))
    assert expected.isfinite().all() and not torch.equal(image, other)
    assert torch.equal(model.embed_image(other), expected[:4])


@pytest.mark.parametrize(("patch", "max_patches"), [(8, 20), (16, 256), (14, 729)])
def test_pixels_are_those_of_siglip2_image_processor(patch: int, max_patches: int) -> None:
    from transformers import Siglip2ImageProcessor

    inputs = NaflexInputs(patch=patch, max_patches=max_patches)
    processor = Siglip2ImageProcessor(patch_size=patch, max_num_patches=max_patches)
    photos = [photo(size) for size in SIZES]
    theirs = processor(photos, return_tensors="pt")
    own = np.stack([transform(np.asarray(each), inputs) for each in photos])
    assert own.shape[1:] == pixel_shape(inputs)
    assert own[:, 0, :2].tolist() == theirs["spatial_shapes"].tolist()
    mask = theirs["pixel_attention_mask"].bool().numpy()
    levels = (theirs["pixel_values"].numpy() + 1) * 127.5
    assert np.abs(own[:, 1:].astype(float) - levels)[mask].max() <= 2
    assert not own[:, 1:][~mask].any()
    # of common aspect ratios
    assert mask[:2].mean() > 0.94


def test_grids_are_those_of_siglip2_image_processor() -> None:
    from transformers.models.siglip2 import image_processing_siglip2 as theirs

    draw = np.random.default_rng(0)
    for height, width in draw.integers(1, 2000, (200, 2)).tolist():
        inputs = INPUTS.replace(max_patches=int(draw.choice([4, 64, 256, 1024])))
        size = theirs.get_image_size_for_max_num_patches(height, width, 8, inputs.max_patches)
        grid = patch_grid(height, width, inputs)
        assert (8 * grid[0], 8 * grid[1]) == size
    # a byte stores their number
    assert patch_grid(1, 5000, INPUTS.replace(max_patches=1000)) == (3, 255)


def test_augmented_image_keeps_the_aspect_ratio_of_its_crop() -> None:
    augment = Augment(crop_scale=(0.2, 0.5), flip=1.0, color_jitter=(0.4, 0.4, 0.4, 0.1))
    uniforms = np.random.default_rng(3).random(NUM_UNIFORMS)
    vars(augment)["function"] = None
    rgb = np.asarray(photo((300, 200)))
    image = transform(rgb, INPUTS, augment, uniforms)
    rows, columns = image[0, :2].tolist()
    assert rows * columns <= 20 and 3 / 4 - 0.3 < columns / rows < 4 / 3 + 0.3
    assert not np.array_equal(image, transform(rgb, INPUTS))


def test_export_opens_as_siglip2_model_and_as_weights(tmp_path: Path) -> None:
    """transformers' model, image processor and tokenizer alone give the embeddings, and the export
    continues as `model.weights` with the settings of its files.
    """
    from transformers import AutoImageProcessor, PreTrainedTokenizerFast, Siglip2Model

    model = model_of(SPEC)
    out = export(model, SPEC.model_dump(mode="json"), TOKENIZER, tmp_path / "out")
    theirs, report = Siglip2Model.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    photos = [photo(size) for size in SIZES]
    image = torch.from_numpy(np.stack([transform(np.asarray(each), INPUTS) for each in photos]))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    tokens = tokenizer(TEXTS, padding="max_length", return_tensors="pt")
    assert set(tokens) == {"input_ids"}
    with torch.no_grad():
        embedded = [
            theirs.get_image_features(**each).pooler_output for each in their_images(model, image)
        ]
        texts = theirs.get_text_features(**tokens).pooler_output
        processed = AutoImageProcessor.from_pretrained(out)(photos, return_tensors="pt")
        alone = theirs.get_image_features(**processed).pooler_output
    loaded = mmray.load(out)
    expected = F.normalize(torch.cat(embedded))
    torch.testing.assert_close(loaded.embed_images(photos), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(loaded.embed_texts(TEXTS), F.normalize(texts), rtol=0, atol=1e-6)
    # their resize rounds pixels differently
    assert F.cosine_similarity(alone, expected).min() > 0.999

    theirs.save_pretrained(tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / "saved" / name).write_text((out / name).read_text())
    for folder in (out, tmp_path / "saved"):
        config = pretrained_config(str(folder))
        assert config.model.kind == "naflex"
        inputs = INPUTS.replace(tokenizer=config.model.inputs.tokenizer)
        assert config.model.inputs == inputs
        again = build(config.model, VOCAB).eval()
        assert torch.equal(again.embed_image(image), model.embed_image(image))


def test_calls_of_the_model_card_give_the_scores_of_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(model_of(SPEC), SPEC.model_dump(mode="json"), TOKENIZER, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    photo((40, 32)).save("photo.jpg", quality=95)
    blocks = (tmp_path / "model" / "README.md").read_text().split("```python\n")[1:]
    values: list[dict[str, Any]] = [{}, {}]
    for names, block in zip(values, blocks, strict=True):
        exec(block.split("```")[0], names)
    expected = torch.as_tensor(values[0]["scores"])
    torch.testing.assert_close(values[1]["scores"].detach(), expected, atol=1e-3, rtol=0)


def test_unusable_settings_and_weights_are_named(tmp_path: Path) -> None:
    siglip2_of(model_of(SPEC)).save_pretrained(tmp_path / "saved")
    torch.save({"visual.proj": torch.zeros(3, 3)}, tmp_path / "file.pt")
    at = str(tmp_path / "saved")
    other_patch = INPUTS.replace(patch=16)
    for spec, message in (
        (SPEC.replace(weights=at, inputs=other_patch), r"has patches of 8 pixels, not 16; set it"),
        (SPEC.replace(weights=str(tmp_path / "file.pt")), r"is a clip checkpoint, not naflex"),
        (SPEC.replace(patch_dropout=0.5), r"model\.patch_dropout: .*max_patches lower"),
        (SPEC.replace(decoder=CaptionDecoder(depth=1)), r"model\.decoder: .*attend to the padding"),
        (SPEC.replace(image=SPEC.image.replace(heads=5)), r"model\.image\.heads: 5 heads"),
    ):
        with pytest.raises(UsageError, match=message):
            build(spec, VOCAB)
    with pytest.raises(UsageError, match=r"model\.inputs\.max_patches: .* 4"):
        INPUTS.replace(max_patches=3)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["vision_config"]["num_patches"] == 16
