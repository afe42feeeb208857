"""Exports for open_clip: its own functions open them, with the same model, tokenizer and pixels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mmray
from mmray import cli
from mmray.config import recipes
from mmray.console.reporter import ConsoleReporter
from mmray.data.images.transform import resize_to_square
from mmray.data.text.tokenizer import TextEncoder, declared_pad_id
from mmray.data.text.tokenizer_files import CLIP_BPE, load_tokenizer
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.export import open_clip as open_clip_files
from mmray.models.export.export import export
from mmray.training.evaluate_export import export_model
from mmray.training.saved_model import SavedModel, pretrained_config
from tests.models.test_clip import INPUTS, SPECS, TEXTS, TOKENIZER, VOCAB, batch_of, model_of

open_clip = pytest.importorskip("open_clip")
timm = pytest.importorskip("timm")
pytestmark = pytest.mark.usefixtures("one_thread")
CAPTIONS = [*TEXTS, "A  red\nCIRCLE!", "red blue green " * 9]  # one is longer than max_tokens


def tiny_timm_vit(name: str, **options: Any) -> nn.Module:
    """The ViT of timm with the sizes of SPECS, instead of the smallest that timm has a name for."""
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return VisionTransformer(
        **sizes, class_token=False, global_pool="map", num_classes=0, act_layer="gelu_tanh"
    )


@pytest.fixture
def tiny_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "list_models", lambda _: ["vit_tiny_patch8_siglip_32"])
    monkeypatch.setattr(timm, "create_model", tiny_timm_vit)


def randomized(model: nn.Module) -> nn.Module:
    """The model with random values in all weights; zeros and ones would hide a wrong name."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


def exported(kind: str, folder: Path, tokenizer: str = TOKENIZER, **inputs: Any) -> nn.Module:
    """Export a model with random weights to open_clip, and return it."""
    rows = TextEncoder(tokenizer, 8).vocab_size
    spec = SPECS[kind].model_copy(update={"inputs": INPUTS.model_copy(update=inputs)})
    spec = spec.with_vocab(rows, declared_pad_id(tokenizer))
    torch.manual_seed(0)
    model = randomized(build(spec, rows).eval())
    export(model, spec.model_dump(mode="json"), tokenizer, folder, format="open_clip")
    return model


def opened(folder: Path) -> tuple[Any, Any, Any]:
    """Model, preprocessing and tokenizer of a folder, opened by open_clip."""
    model, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    return model.eval(), preprocess, open_clip.get_tokenizer(f"local-dir:{folder}")


def token_ids(tokenizer: str, texts: list[str], length: int) -> Tensor:
    """The ids that mmray gives the model, padded to a length."""
    encoder = TextEncoder(tokenizer, length)
    ids, _ = encoder.encode([encoder.format_caption(text) for text in texts])
    padded = np.full((len(texts), length), encoder.pad_id)
    padded[:, : ids.shape[1]] = ids
    return torch.from_numpy(padded)


def test_export_is_weights_of_evaluation_and_of_a_further_run(tmp_path: Path) -> None:
    model = exported("clip", tmp_path)
    spec = pretrained_config(str(tmp_path)).model
    again = build(spec.replace(weights=str(tmp_path)), spec.vocab_size)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.usefixtures("tiny_timm")
@pytest.mark.parametrize("kind", SPECS)
def test_open_clip_opens_an_export_with_equal_outputs(kind: str, tmp_path: Path) -> None:
    model = exported(kind, tmp_path / "m")
    theirs, _, tokenizer = opened(tmp_path / "m")
    tokens = tokenizer(CAPTIONS)
    assert torch.equal(tokens, token_ids(TOKENIZER, CAPTIONS, INPUTS.max_tokens))
    images = batch_of(len(CAPTIONS))["image"]
    pixels = model.image.tower.embeddings.normalize(images)
    loaded = mmray.load(tmp_path / "m")
    photos = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images]
    with torch.no_grad():
        text = theirs.encode_text(tokens, normalize=True)
        image = theirs.encode_image(pixels, normalize=True)
        logits, _ = theirs.get_logits(pixels, tokens)
        outputs = model.scalar_outputs()
    expected_image, expected_text = loaded.embed_images(photos), loaded.embed_texts(CAPTIONS)
    expected = outputs["logit_scale"] * expected_image @ expected_text.T
    expected = expected + outputs.get("logit_bias", 0.0)
    torch.testing.assert_close(text, expected_text, rtol=0, atol=1e-6)
    torch.testing.assert_close(image, expected_image, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    state = model.state_dict()
    assert all(torch.equal(state[name], each) for name, each in loaded.model.state_dict().items())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("fit", "levels"), [("crop", 8), ("squash", 2), ("pad", 2)])
def test_open_clip_preprocesses_images_as_training_did(
    fit: Any, levels: int, interpolation: Any, tmp_path: Path
) -> None:
    """Up to rounding; a crop moves by half a pixel, which is 6 levels in this image."""
    model = exported("clip", tmp_path / "m", fit=fit, interpolation=interpolation)
    _, preprocess, _ = opened(tmp_path / "m")
    y, x = np.mgrid[:50, :70]
    rgb = np.stack([x * 255 / 70, y * 255 / 50, 128 + 100 * np.sin((x + y) / 9)], axis=-1)
    rgb = rgb.astype(np.uint8)
    ours = torch.from_numpy(resize_to_square(rgb, 32, fit, interpolation))
    expected = model.image.tower.embeddings.normalize(ours[None])[0]
    difference = (preprocess(Image.fromarray(rgb)) - expected).abs()
    difference *= 255 * torch.tensor(INPUTS.std)[:, None, None]
    assert difference.max() <= levels + 0.01


@pytest.mark.usefixtures("tiny_timm")
@pytest.mark.parametrize("kind", SPECS)
def test_checkpoint_of_open_clip_is_exported_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Also with the same config, and a tokenizer with the same ids."""
    exported(kind, tmp_path / "first")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "open_clip_config.json"):
        shutil.copy(tmp_path / "first" / name, theirs)
    config = json.loads((theirs / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["tokenizer_kwargs"] = {"clean": "canonicalize"}
    (theirs / "open_clip_config.json").write_text(json.dumps(config))
    source, _ = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path / 'first'}")
    file = theirs / "open_clip_model.safetensors"
    save_file(randomized(source).state_dict(), file)

    out = tmp_path / "out"
    argv = ["export", "--weights", str(file), str(out), "--format", "open_clip"]
    assert cli.run(argv, ConsoleReporter()) == 0
    given, written = load_file(file), load_file(out / file.name)
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], written[name]) for name in given)
    again = json.loads((out / "open_clip_config.json").read_text())
    del config["model_cfg"]["text_cfg"]["tokenizer_kwargs"]  # it is in tokenizer.json
    assert again == config
    assert torch.equal(opened(out)[2](CAPTIONS), opened(theirs)[2](CAPTIONS))


@pytest.mark.usefixtures("tiny_timm")
@pytest.mark.parametrize("pad", ["!", "<|endoftext|>"])  # ids 0 and 49407
@pytest.mark.parametrize("kind", SPECS)
def test_tokenizer_of_clip_has_equal_ids_in_open_clip(kind: str, pad: str, tmp_path: Path) -> None:
    """A SigLIP attends to its padding, so that must be the same."""
    (tmp_path / "bpe").mkdir()
    shutil.copy(Path(open_clip.__file__).with_name(CLIP_BPE), tmp_path / "bpe")
    (tmp_path / "bpe" / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    bpe = load_tokenizer(str(tmp_path / "bpe"), None)
    model = exported(kind, tmp_path / "m", bpe)
    theirs, _, tokenizer = opened(tmp_path / "m")
    captions = [*CAPTIONS, "caf\u00c3\u00a9 &amp;amp; \u201ccat\u201d"]
    with torch.no_grad():
        text = theirs.encode_text(tokenizer(captions), normalize=True)
    expected = mmray.load(tmp_path / "m").embed_texts(captions)
    torch.testing.assert_close(text, expected, rtol=0, atol=1e-6)
    own = "hf_tokenizer_name" not in theirs_config(tmp_path / "m")["text_cfg"]
    assert own == (kind == "clip" or model.padding_length_and_id[1] == 0)


def theirs_config(folder: Path) -> Any:
    return json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]


def test_mlp_has_the_width_of_the_weights(tmp_path: Path) -> None:
    """56 * (488 / 56) is below 488 in floating point, and open_clip rounds it down."""
    from transformers import CLIPConfig, CLIPModel

    values = model_of(SPECS["clip"]).architecture()["config"]
    for part in ("text_config", "vision_config"):
        heads = {"num_attention_heads": 2}
        values[part] |= {"hidden_size": 56, "intermediate_size": 488} | heads
    CLIPModel(CLIPConfig.from_dict(values)).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(TOKENIZER)
    export_model(pretrained_config(str(tmp_path / "hf")), tmp_path / "m", format="open_clip")
    theirs, _, _ = opened(tmp_path / "m")
    assert theirs.visual.transformer.resblocks[0].mlp.c_fc.out_features == 488
    assert theirs.transformer.resblocks[0].mlp.c_fc.out_features == 488


def test_models_that_open_clip_lacks_are_not_exported_to_it(tmp_path: Path) -> None:
    spec, model = SPECS["siglip"], model_of(SPECS["siglip"])
    values = spec.model_copy(update={"vocab_size": VOCAB}).model_dump(mode="json")
    with pytest.raises(UsageError, match=r"timm has no SigLIP image encoder with .* patches of 8"):
        export(model, values, TOKENIZER, tmp_path / "m", format="open_clip")
    with pytest.raises(UsageError, match=r"open_clip has no model like this one of kind towers"):
        export(model, values | {"kind": "towers"}, TOKENIZER, tmp_path / "m", format="open_clip")
    assert not list(tmp_path.iterdir())


def test_vision_language_model_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipes.RECIPES["vlm"]()
    monkeypatch.setattr(
        "mmray.training.evaluate_export.open_model",
        lambda source, step, log: SavedModel(source, "", None),
    )
    with pytest.raises(UsageError, match=r"kind vlm; only `clip` .* and `siglip` .* be exported"):
        export_model(config, tmp_path / "m", format="open_clip")


def test_quick_gelu_of_siglip_texts_is_in_the_config_of_open_clip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_clip_files, "_timm_name", lambda _: "vit")
    model = model_of(SPECS["siglip"])
    hf = model.export_hf_config(None, 0)
    values = SPECS["siglip"].model_dump(mode="json")
    hf["text_config"]["hidden_act"] = "quick_gelu"
    config = open_clip_files.model_config(values, hf, TOKENIZER)
    assert config["model_cfg"]["quick_gelu"]
    hf["text_config"]["hidden_act"] = "relu"
    with pytest.raises(UsageError, match="gelu_pytorch_tanh of images and relu of texts"):
        open_clip_files.model_config(values, hf, TOKENIZER)
