"""CLIP and SigLIP: outputs equal transformers' classes, for weights from every source."""

from __future__ import annotations

import json
import logging
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, processors
from torch import Tensor, nn
from transformers import configuration_utils

import mmray
from mmray.config import Clip, ClipImage, ClipText, Inputs, Model, Siglip
from mmray.data.images.transform import resize_to_square
from mmray.data.text.tokenizer import TextEncoder, declared_pad_id, train_tokenizer
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.models.protocol import saved_layers
from mmray.models.synthetic import synthetic_batch

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["a red circle", "a blue square on a green ground", "Two TRIANGLES,  left of a circle"]
TOKENIZER = train_tokenizer(TEXTS, 80)
VOCAB = TextEncoder(TOKENIZER, 8).vocab_size
INPUTS = Inputs(
    image_side=32, max_tokens=10, fit="squash", mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1)
)
IMAGE, TEXT = ClipImage(width=32, depth=2, heads=2, patch=8), ClipText(width=24, depth=2, heads=3)
SPECS: dict[str, Model] = {
    "clip": Clip(inputs=INPUTS, image=IMAGE, text=TEXT, embed_dim=16),
    "siglip": Siglip(inputs=INPUTS, image=IMAGE, text=TEXT),
}


def model_of(spec: Model, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(spec, VOCAB).eval()


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    batch = synthetic_batch(INPUTS, VOCAB, rows, "cpu")
    num_tokens = torch.arange(rows) % 5 + 3
    batch["attention_mask"] = (torch.arange(INPUTS.max_tokens) < num_tokens[:, None]).long()
    return batch


def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", SPECS)
def test_export_loads_in_transformers_with_equal_outputs(kind: str, tmp_path: Path) -> None:
    """AutoModel, AutoTokenizer and AutoImageProcessor alone give the embeddings; so does
    mmray.load.
    """
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    spec, model = SPECS[kind], model_of(SPECS[kind])
    values = spec.model_copy(update={"vocab_size": VOCAB}).model_dump(mode="json")
    out = export(model, values, TOKENIZER, tmp_path / "m")
    loaded = mmray.load(out)
    theirs, report = AutoModel.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    processed = AutoImageProcessor.from_pretrained(out)(photo(), return_tensors="pt")
    tokens = AutoTokenizer.from_pretrained(out)(TEXTS, padding="max_length", return_tensors="pt")
    with torch.no_grad():
        given = theirs(input_ids=tokens["input_ids"], pixel_values=processed["pixel_values"])
        pixels = torch.from_numpy(resize_to_square(np.asarray(photo()), 32, "squash", "bicubic"))[
            None
        ]
        normalized = model.image.tower.embeddings.normalize(pixels)
        image = theirs(input_ids=tokens["input_ids"], pixel_values=normalized).image_embeds
    torch.testing.assert_close(loaded.embed_texts(TEXTS), given.text_embeds, rtol=0, atol=1e-6)
    torch.testing.assert_close(loaded.embed_images([photo()]), image, rtol=0, atol=1e-6)
    # their resize rounds pixels differently
    assert F.cosine_similarity(given.image_embeds, image).item() > 0.999
    assert theirs.logit_scale.exp().item() == pytest.approx(model.log_scale.exp().item())
    assert loaded.model.state_dict().keys() == model.state_dict().keys()


def tokenizer_adding(*added: str) -> str:
    """The tokenizer with this template around a caption (`$A`)."""
    tokenizer = Tokenizer.from_str(TOKENIZER)
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in {*added} - {"$A"}]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=list(added), special_tokens=marks
    )
    return str(tokenizer.to_str())


@pytest.mark.parametrize(
    "added", [("$A",), ("[CLS]", "$A"), ("[SEP]", "$A", "[SEP]"), ("$A", "[SEP]")]
)
@pytest.mark.parametrize("kind", SPECS)
def test_hf_export_pools_at_the_end_token_of_the_tokenizer(
    kind: str, added: tuple[str, ...], tmp_path: Path
) -> None:
    """HF CLIP pools at the first end token, so HF files are written only if this token occurs at
    the end alone.
    """
    from transformers import AutoModel, AutoTokenizer

    spec, tokenizer = SPECS[kind].model_copy(update={"vocab_size": VOCAB}), tokenizer_adding(*added)
    out = export(model_of(spec), spec.model_dump(mode="json"), tokenizer, tmp_path / "m")
    theirs = "model_type" in json.loads((out / "config.json").read_text())
    assert theirs == (kind == "siglip" or added == ("$A", "[SEP]"))
    embedded = mmray.load(out).embed_texts(TEXTS)
    assert torch.pdist(embedded).min() > 1e-3
    if theirs:
        tokens = AutoTokenizer.from_pretrained(out)(
            TEXTS, padding="max_length", return_tensors="pt"
        )
        model = AutoModel.from_pretrained(out)
        with torch.no_grad():
            given = model(
                input_ids=tokens["input_ids"], pixel_values=torch.zeros(1, 3, 32, 32)
            ).text_embeds
        torch.testing.assert_close(embedded, given, rtol=0, atol=1e-6)


def spec_with(kind: str, **changes: object) -> Model:
    return SPECS[kind].model_copy(update=changes)


@pytest.mark.parametrize("kind", SPECS)
def test_weights_load_from_a_saved_transformers_model(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(**model_of(SPECS[kind]).architecture()["config"])
    torch.manual_seed(5)
    config.text_config.eos_token_id = 3
    theirs = AutoModel.from_config(config).eval()
    with torch.no_grad():
        theirs.logit_scale.fill_(2.5)
    theirs.save_pretrained(tmp_path)
    spec = spec_with(kind, weights=str(tmp_path))
    ids = torch.cat(
        [torch.randint(5, VOCAB, (3, INPUTS.max_tokens - 1)), torch.full((3, 1), 3)], dim=1
    )
    pixels = batch_of(3)["image"]
    with pytest.raises(UsageError, match=r"too few|size mismatch"):
        build(spec, VOCAB + 2)
    model = model_of(spec)
    assert model.log_scale.item() == 2.5
    with torch.no_grad():
        features = theirs.text_model(input_ids=ids).pooler_output
        expected = theirs.text_projection(features) if kind == "clip" else features
        normalized = model.image.tower.embeddings.normalize(pixels)
        image = theirs.get_image_features(pixel_values=normalized).pooler_output
        text = model.embed_text(ids, torch.ones_like(ids))
        torch.testing.assert_close(text, F.normalize(expected), atol=1e-6, rtol=0)
        torch.testing.assert_close(model.embed_image(pixels), F.normalize(image), atol=1e-6, rtol=0)


def test_siglip_is_built_without_warnings_of_transformers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It formats configs for its log, which the tests otherwise leave out."""
    config_class = configuration_utils.PreTrainedConfig
    monkeypatch.setattr(config_class, "__repr__", config_class.to_json_string)
    logger = configuration_utils.logger
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # of transformers
    logger.addHandler(caplog.handler)
    saved = saved_layers(model_of(SPECS["siglip"]).architecture())
    build(SPECS["siglip"], VOCAB, saved)
    logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_siglip_pads_with_the_tokenizers_pad_id(tmp_path: Path) -> None:
    """Like SigLIP 2: config.json keeps the default pad id 1 of transformers, another token of its
    tokenizer.
    """
    from transformers import AutoModel, AutoTokenizer, SiglipConfig

    values = model_of(SPECS["siglip"]).architecture()["config"]
    del values["text_config"]["pad_token_id"]
    torch.manual_seed(6)
    theirs = AutoModel.from_config(SiglipConfig.from_dict(values)).eval()
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text(TOKENIZER)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[MASK]",
        "model_max_length": 10,
    }
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = AutoTokenizer.from_pretrained(tmp_path / "saved")(
        TEXTS, padding="max_length", return_tensors="pt"
    )
    assert tokens["input_ids"][0, -1] == 4 != theirs.config.text_config.pad_token_id == 1
    with torch.no_grad():
        expected = F.normalize(theirs.text_model(input_ids=tokens["input_ids"]).pooler_output)

    tokenizer = load_tokenizer(str(tmp_path / "saved"), None)
    unset = SPECS["siglip"].model_copy(update={"weights": str(tmp_path / "saved")})
    spec = unset.with_vocab(VOCAB, declared_pad_id(tokenizer))
    model = build(spec, VOCAB).eval()
    ids, num_tokens = TextEncoder(tokenizer, 10).encode(TEXTS)
    ids[np.arange(ids.shape[1]) >= num_tokens[:, None]] = 7  # padding ids have no effect
    mask = torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]
    with torch.no_grad():
        text = model.embed_text(torch.from_numpy(ids).long(), mask.long())
        torch.testing.assert_close(text, expected, rtol=0, atol=1e-6)
        other = build(unset.model_copy(update={"pad_id": 1}), VOCAB).eval()
        wrong = other.embed_text(torch.from_numpy(ids).long(), mask.long())
        assert (wrong - expected).abs().max() > 1e-3  # the model attends to padding

    out = export(model, spec.model_dump(mode="json"), tokenizer, tmp_path / "out")
    torch.testing.assert_close(mmray.load(out).embed_texts(TEXTS), expected, rtol=0, atol=1e-6)
    again = AutoTokenizer.from_pretrained(out)(TEXTS, padding="max_length", return_tensors="pt")
    assert torch.equal(again["input_ids"], tokens["input_ids"])
    assert AutoModel.from_pretrained(out).config.text_config.pad_token_id == 4


@pytest.mark.parametrize("kind", SPECS)
def test_patches_are_dropped_in_training_only(kind: str) -> None:
    spec = SPECS[kind].model_copy(update={"patch_dropout": 0.5})
    model, image, seen = model_of(spec), batch_of()["image"], []
    model.image.tower.encoder.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["inputs_embeds"].shape[1]), with_kwargs=True
    )
    whole = model.embed_image(image)
    first, second = model.train().embed_image(image), model.embed_image(image)
    extra = kind == "clip"  # the class token is kept
    assert seen == [16 + extra, 8 + extra, 8 + extra]
    assert not torch.allclose(first, second, atol=1e-4)
    assert torch.equal(model.eval().embed_image(image), whole)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            spec_with("clip", image=ClipImage(width=30, heads=4)),
            r"model\.image\.heads: 4 heads do not divide",
        ),
        (
            spec_with("clip", image=ClipImage(patch=12)),
            r"model\.image\.patch: patches of 12 pixels .* 32",
        ),
        (
            spec_with("clip", weights="/no/such/place"),
            r"model\.weights: cannot load `/no/such/place`",
        ),
        (spec_with("siglip", pad_id=999), r"model\.pad_id: 999 is not a token of a model with"),
        (
            spec_with("siglip", weights="/no/such/file.pt"),
            r"model\.weights: no file /no/such/file\.pt",
        ),
    ],
)
def test_invalid_setting_is_named(spec: Model, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(spec, VOCAB)


def test_vocabulary_smaller_than_that_of_the_tokenizer_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=rf"model\.vocab_size: 20 embedding rows are too few for a .* {VOCAB} tokens",
    ):
        spec_with("clip", vocab_size=20).with_vocab(VOCAB, None)


def test_incompatible_weights_raise(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    CLIPModel(
        CLIPConfig.from_dict(model_of(SPECS["clip"]).architecture()["config"])
    ).save_pretrained(tmp_path)
    at = {"weights": str(tmp_path)}
    for spec, vocab_size, message in (
        (
            spec_with("clip", **at, inputs=INPUTS.model_copy(update={"image_side": 60})),
            VOCAB,
            "do not tile an image of 60 pixels",
        ),
        (
            spec_with("clip", **at),
            VOCAB + 1,
            f"{VOCAB} embedding rows, too few for a tokenizer of {VOCAB + 1}",
        ),
        (spec_with("siglip", **at), VOCAB, "holds a model of type 'clip'; supported are siglip"),
    ):
        with pytest.raises(UsageError, match=message):
            build(spec, vocab_size)
    resnet = {
        "visual.layer1.0.conv1.weight": torch.zeros(1),
        "token_embedding.weight": torch.zeros(1, 1),
    }
    torch.save(resnet, tmp_path / "resnet.pt")
    torch.save({"visual.proj": torch.zeros(3, 3)}, tmp_path / "other.pt")
    for name, message in (
        ("resnet.pt", r"a text transformer of its own: it has no vision_model"),
        ("other.pt", "is not a checkpoint of open_clip. If it is an image encoder"),
    ):
        with pytest.raises(UsageError, match=message):
            build(spec_with("clip", weights=str(tmp_path / name)), VOCAB)


def test_random_clip_has_the_standard_deviations_of_openais_code() -> None:
    """Normal and uniform weights alike; the names are those of this package."""
    width, text_width, depth, patch = 96, 64, 3, 8
    image = ClipImage(width=width, depth=2, heads=2, patch=patch)
    text = ClipText(width=text_width, depth=depth, heads=2)
    model = build(Clip(inputs=INPUTS, image=image, text=text, embed_dim=80), 600)
    uniform = 3**-0.5  # standard deviation of the uniform distribution in [-1, 1]
    residual = (2 * depth * text_width) ** -0.5
    expected = {
        "image.tower.embeddings.class_embedding": width**-0.5,
        "image.tower.embeddings.position_embedding.weight": width**-0.5,
        "image.tower.embeddings.patch_embedding.weight": uniform * (3 * patch**2) ** -0.5,
        "image.project.weight": width**-0.5,
        "image.tower.*.q_proj.weight": (2 * width) ** -0.5,
        "image.tower.*.k_proj.weight": (2 * width) ** -0.5,
        "image.tower.*.v_proj.weight": (2 * width) ** -0.5,
        "image.tower.*.out_proj.weight": uniform * width**-0.5,
        "image.tower.*.fc1.weight": uniform * width**-0.5,
        "image.tower.*.fc2.weight": uniform * (4 * width) ** -0.5,
        "text.tower.embeddings.token_embedding.weight": 0.02,
        "text.tower.embeddings.position_embedding.weight": 0.01,
        "text.project.weight": text_width**-0.5,
        "text.tower.*.q_proj.weight": text_width**-0.5,
        "text.tower.*.k_proj.weight": text_width**-0.5,
        "text.tower.*.v_proj.weight": text_width**-0.5,
        "text.tower.*.out_proj.weight": residual,
        "text.tower.*.fc1.weight": (2 * text_width) ** -0.5,
        "text.tower.*.fc2.weight": residual,
        "*.fc1.bias": uniform * width**-0.5,
        "*.fc2.bias": uniform * (4 * width) ** -0.5,
        "*_proj.bias": 0.0,
        "*norm*.bias": 0.0,
    }
    seen: set[str] = set()
    for name, weight in model.named_parameters():
        patterns = [pattern for pattern in expected if fnmatchcase(name, pattern)]
        for pattern in patterns:
            want = expected[pattern]
            if name.startswith("text.tower") and pattern in ("*.fc1.bias", "*.fc2.bias"):
                want *= (width / text_width) ** 0.5
            got = float(weight.detach().square().mean().sqrt())
            # 4 standard errors of the estimate
            assert got == pytest.approx(want, rel=4 / (2 * weight.numel()) ** 0.5), name
        seen.update(patterns)
        if not patterns:
            assert name == "log_scale" or ("norm" in name and bool((weight == 1).all())), name
    assert seen == set(expected)
    assert model.log_scale.item() == pytest.approx(np.log(1 / 0.07))


def test_temperature_stays_between_a_hundredth_and_one() -> None:
    model = model_of(SPECS["clip"])
    for value, bound in ((-1.0, 0.0), (9.0, np.log(100))):
        model.log_scale.data.fill_(value)
        model.clamp_parameters()
        assert model.log_scale.item() == pytest.approx(bound)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_export_called_as_transformers_documents_it_equals_load(tmp_path: Path, kind: str) -> None:
    """`model(**tokenizer(texts, padding="max_length"))`: SigLIP must not get a mask."""
    from transformers import AutoModel, AutoTokenizer

    model = model_of(SPECS[kind]).eval()
    out = export(model, SPECS[kind].model_dump(mode="json"), TOKENIZER, tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(out)(
        list(TEXTS), padding="max_length", truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        features = AutoModel.from_pretrained(out).get_text_features(**tokens)
    features = getattr(features, "pooler_output", features)
    expected = torch.from_numpy(np.asarray(mmray.load(out).embed_texts(list(TEXTS))))
    torch.testing.assert_close(F.normalize(features, dim=-1), expected, atol=1e-5, rtol=1e-4)
    assert ("attention_mask" in tokens) == (kind == "clip")


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_calls_of_the_model_card_give_the_scores_of_load(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of code of the card: mmray.load, AutoProcessor with AutoModel, and pipeline."""
    spec = SPECS[kind].replace(inputs=INPUTS.replace(max_tokens=64))
    export(model_of(spec).eval(), spec.model_dump(mode="json"), TOKENIZER, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    photo().convert("RGB").resize((32, 32)).save("photo.jpg", quality=95)
    blocks = (tmp_path / "model" / "README.md").read_text().split("```python\n")[1:]
    values: list[dict[str, Any]] = []
    for block in blocks:
        names: dict[str, Any] = {}
        exec(block.split("```")[0], names)
        values.append(names)
    ours, theirs, pipeline = values
    expected = torch.as_tensor(ours["scores"])
    torch.testing.assert_close(theirs["scores"].detach(), expected, atol=1e-3, rtol=0)
    best = pipeline["labels"][0]["label"]
    assert best == ["a red circle", "a blue square"][int(expected.argmax())]
