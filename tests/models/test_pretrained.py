"""Pretrained weights are evaluated and exported without training, with the sizes and activation that they define."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

import mmray
from mmray import cli
from mmray.cli.console import Terminal
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.train import evaluate_export
from mmray.train.evaluate_export import export_pretrained, pretrained_config
from tests.data.text.test_tokenizer_files import small_clip_bpe
from tests.made import make_set, row

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, SIDE, TOKENS = 520, 48, 12  # ids of small_clip_bpe, pixels, positions
TEXTS = ["a cat", "A dog and a CAT!", "🐶 狗"]
GELU = {"vision_cfg": {"width": 128}, "text_cfg": {"width": 64, "heads": 4}}


class Block(nn.Module):
    """open_clip's ResidualAttentionBlock."""

    def __init__(self, width: int, heads: int, quick: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.quick = nn.LayerNorm(width), nn.LayerNorm(width), quick
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        y = self.mlp["c_fc"](self.ln_2(x))
        return x + self.mlp["c_proj"](y * torch.sigmoid(1.702 * y) if self.quick else F.gelu(y))


class OpenClip(nn.Module):
    """CLIP in the layout of open_clip: width 128 and 3 layers for images, 64 and 2 for texts, heads of 64."""

    def __init__(self, quick: bool, text_heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, 128, 16, 16, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.randn(128))
        self.visual.positional_embedding = nn.Parameter(torch.randn((SIDE // 16) ** 2 + 1, 128))
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(128), nn.LayerNorm(128)
        self.visual.transformer = nn.Module()
        self.visual.transformer.resblocks = nn.ModuleList(Block(128, 2, quick) for _ in range(3))
        self.visual.proj = nn.Parameter(torch.randn(128, 32))
        self.token_embedding = nn.Embedding(ROWS, 64)
        self.positional_embedding = nn.Parameter(torch.randn(TOKENS, 64))
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(Block(64, text_heads, quick) for _ in range(2))
        self.ln_final = nn.LayerNorm(64)
        self.text_projection = nn.Parameter(torch.randn(64, 32))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    @torch.no_grad()
    def encode_image(self, pixels: Tensor) -> Tensor:
        x = self.visual.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.visual.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.visual.positional_embedding
        x = self.visual.ln_pre(x)
        for block in self.visual.transformer.resblocks:
            x = block(x)
        return F.normalize(self.visual.ln_post(x[:, 0]) @ self.visual.proj, dim=-1)

    @torch.no_grad()
    def encode_text(self, ids: list[int]) -> Tensor:
        x = self.token_embedding(torch.tensor([ids])) + self.positional_embedding[: len(ids)]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        for block in self.transformer.resblocks:
            x = block(x, mask)
        return F.normalize(self.ln_final(x)[:, -1] @ self.text_projection, dim=-1)


def saved(folder: Path, theirs: OpenClip, config: dict[str, Any] | None = None, **extra: Tensor) -> Path:
    """Save the checkpoint with CLIP's tokenizer next to it, and open_clip_config.json if given."""
    folder.mkdir(exist_ok=True)
    small_clip_bpe(folder)
    torch.save(theirs.state_dict() | extra, folder / "clip.pt")
    if config is not None:
        (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder / "clip.pt"


PIXELS = torch.randint(0, 256, (2, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("source", ["open_clip_config.json", "openai", "flag"])
@pytest.mark.parametrize("quick", [False, True])
def test_open_clip_checkpoint_is_exported_with_equal_embeddings(quick: bool, source: str, tmp_path: Path) -> None:
    """Into mmray.load and into transformers; sizes and activation come from the checkpoint or the file next to it."""
    from transformers import AutoModel, AutoTokenizer

    if source == "openai" and not quick:
        pytest.skip("OpenAI's weights all use quick_gelu")
    in_config = source == "open_clip_config.json"
    theirs = OpenClip(quick, text_heads=4 if in_config else 1).eval()
    preprocess = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.3], "interpolation": "bilinear", "resize_mode": "squash"}
    config = {"model_cfg": GELU | {"quick_gelu": quick}, "preprocess_cfg": preprocess} if in_config else None
    openai = ("input_resolution", "context_length", "vocab_size") if source == "openai" else ()
    file = saved(tmp_path / "in", theirs, config, **dict.fromkeys(openai, torch.tensor(1)))
    flags = ["--model.activation", "quick_gelu" if quick else "gelu"] if source == "flag" else []
    assert cli.run(["export", "--weights", str(file), str(tmp_path / "out"), *flags], Terminal()) == 0

    loaded = mmray.load(tmp_path / "out")
    inputs = loaded.inputs
    assert (inputs.image_side, inputs.max_tokens) == (SIDE, TOKENS)
    assert (inputs.fit, inputs.interpolation) == (("squash", "bilinear") if in_config else ("crop", "bicubic"))
    assert inputs.mean == ([0.5, 0.4, 0.3] if in_config else [0.48145466, 0.4578275, 0.40821073])
    tokenizer = Tokenizer.from_str(load_tokenizer(str(file.parent), None))
    text = torch.cat([theirs.encode_text(tokenizer.encode(text).ids[:TOKENS]) for text in TEXTS[:2]])
    image = theirs.encode_image(loaded.model.image.pixels(PIXELS))
    images = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in PIXELS]
    torch.testing.assert_close(loaded.embed_texts(TEXTS[:2]), text, rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded.embed_images(images), image, rtol=0, atol=1e-5)

    hf, report = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert hf.config.vision_config.hidden_act == hf.config.text_config.hidden_act == ("quick_gelu" if quick else "gelu")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(TEXTS[:2], padding="max_length", return_tensors="pt")
    with torch.no_grad():
        out = hf(input_ids=tokens["input_ids"], pixel_values=loaded.model.image.pixels(PIXELS))
    torch.testing.assert_close(out.text_embeds, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.image_embeds, image, rtol=0, atol=1e-5)
    assert out.logits_per_text.shape == (2, 2) and hf.logit_scale.item() == 3.0


def test_activation_that_nothing_defines_must_be_given(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = saved(tmp_path / "in", OpenClip(False))
    assert cli.run(["export", "--weights", str(file), str(tmp_path / "out")], Terminal()) == 2
    assert "model.activation:" in (error := capfd.readouterr().err) and "no open_clip_config.json" in error
    (tmp_path / "in" / "open_clip_config.json").write_text(json.dumps({"model_cfg": GELU}))
    flags = ["--model.activation", "quick_gelu"]
    assert cli.run(["export", "--weights", str(file), str(tmp_path / "out"), *flags], Terminal()) == 2
    assert "was trained with gelu, not quick_gelu" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    assert cli.run(["export", "--weights", str(file)], Terminal()) == 2
    assert "folder OUT is missing" in capfd.readouterr().err


def test_setting_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    config = pretrained_config(str(saved(tmp_path, OpenClip(False), {"model_cfg": GELU})))
    for setting, value, message in (
        ("image_side", 64, "needs images of 48 pixels, not 64"),
        ("max_tokens", 13, "exceeds the 12 positions"),
    ):
        inputs = config.model.inputs.replace(**{setting: value})
        with pytest.raises(UsageError, match=message):
            build(config.model.replace(inputs=inputs), ROWS)
    state = torch.load(tmp_path / "clip.pt")
    del state["visual.ln_pre.weight"]
    torch.save(state, tmp_path / "clip.pt")
    with pytest.raises(UsageError, match=r"not an open_clip ViT checkpoint.*Missing.*pre_layrnorm"):
        build(config.model, ROWS)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_transformers_folder_is_exported_with_equal_embeddings(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel, CLIPImageProcessor

    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": ROWS, "max_position_embeddings": TOKENS, "eos_token_id": ROWS - 1, "pad_token_id": 1}
    activation = {"hidden_act": "gelu"} if kind == "clip" else {}
    text |= {"projection_size": 32} if kind == "siglip" else {}
    vision = {"image_size": SIDE, "patch_size": 16}
    torch.manual_seed(3)
    towers = {"text_config": tower | text | activation, "vision_config": tower | vision | activation}
    theirs = AutoModel.from_config(AutoConfig.for_model(kind, **towers)).eval()
    theirs.save_pretrained(tmp_path / "in")
    small_clip_bpe(tmp_path / "in")
    CLIPImageProcessor(image_mean=[0.1, 0.2, 0.3], resample=2).save_pretrained(tmp_path / "in")
    config = pretrained_config(str(tmp_path / "in"))
    inputs = config.model.inputs
    assert (config.model.kind, inputs.mean, inputs.interpolation, inputs.fit) == (
        kind,
        (0.1, 0.2, 0.3),
        "bilinear",
        "crop",
    )
    export_pretrained(config, tmp_path / "out", lambda *_: None)
    loaded, again = mmray.load(tmp_path / "out"), AutoModel.from_pretrained(tmp_path / "out")
    pixels = loaded.model.image.pixels(PIXELS)
    with torch.no_grad():
        image = F.normalize(theirs.get_image_features(pixel_values=pixels).pooler_output)
        torch.testing.assert_close(loaded.model.embed_image(PIXELS), image, rtol=0, atol=1e-5)
        image_again = F.normalize(again.get_image_features(pixel_values=pixels).pooler_output)
        torch.testing.assert_close(image_again, image, rtol=0, atol=1e-5)
        ids = torch.tensor([[518, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 519]])
        expected = F.normalize(theirs.get_text_features(input_ids=ids).pooler_output)
        torch.testing.assert_close(loaded.model.embed_text(ids, torch.ones_like(ids)), expected, rtol=0, atol=1e-5)
    if kind == "clip":
        with pytest.raises(UsageError, match="trained with gelu, not quick_gelu"):
            build(config.model.replace(activation="quick_gelu"), ROWS)


def test_image_encoder_alone_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(**small)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"image encoder \(vit\) without a text encoder; .*--model\.image\.weights"):
        pretrained_config(str(tmp_path))


def test_pretrained_weights_are_scored_as_their_model_ranks(tmp_path: Path) -> None:
    """A worker's part of `mmray evaluate --weights`."""
    held_out = make_set(tmp_path / "set", [row(number) for number in range(7)])
    config = pretrained_config(str(saved(tmp_path / "in", OpenClip(False), {"model_cfg": GELU})))
    logged: list[str] = []
    config, tokenizer_json = evaluate_export._with_tokenizer(config, None, lambda text, _: logged.append(text))
    assert logged == [] and config.model.vocab_size == ROWS
    scores = evaluate_export._score(config, tokenizer_json, held_out, None, torch.device("cpu"))
    assert scores["rows"] == 7 and scores["loss"] > 0 and 0 <= scores["recall_at_1/mean"] <= 1
    other = config.model.replace(inputs=config.model.inputs.replace(tokenizer="trained"))
    evaluate_export._with_tokenizer(
        config.replace(model=other), held_out.tokenizer_json, lambda text, _: logged.append(text)
    )
    assert "tokens, the weights 520: is it their tokenizer?" in logged[0]
