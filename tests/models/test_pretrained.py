"""Pretrained weights are evaluated and exported without training, with the sizes and activation
that they define.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

import mmray
from mmray import cli
from mmray.console.reporter import ConsoleReporter
from mmray.data.text.tokenizer import train_tokenizer
from mmray.data.text.tokenizer_files import load_tokenizer
from mmray.engine.collectives import Group
from mmray.errors import UsageError
from mmray.models import open_clip, pretrained
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.models.weights import read_state_dict
from mmray.training import evaluate_export
from mmray.training.evaluate_export import export_model
from mmray.training.recipe import load_recipe
from mmray.training.saved_model import SavedModel, pretrained_config, with_tokenizer
from tests.data.text.test_tokenizer_files import small_clip_bpe
from tests.made import cache_repository, make_set, row
from tests.models.test_build import Draws

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, SIDE, TOKENS = 520, 48, 12  # ids of small_clip_bpe, pixels, positions
TEXTS = ["a cat", "A dog and a CAT!", "🐶 狗"]
GELU = {"vision_cfg": {"width": 128}, "text_cfg": {"width": 64, "heads": 4}}
# what create_model of open_clip needs: all sizes
DECLARED = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": SIDE, "patch_size": 16, "layers": 3, "width": 128},
    "text_cfg": {
        "context_length": TOKENS,
        "vocab_size": ROWS,
        "layers": 2,
        "width": 64,
        "heads": 1,
    },
}


class Block(nn.Module):
    """open_clip's ResidualAttentionBlock."""

    def __init__(self, width: int, heads: int, quick: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.quick = nn.LayerNorm(width), nn.LayerNorm(width), quick
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        y = self.mlp["c_fc"](self.ln_2(x))
        return x + self.mlp["c_proj"](y * torch.sigmoid(1.702 * y) if self.quick else F.gelu(y))


class OpenClip(nn.Module):
    """CLIP in the layout of open_clip: width 128 and 3 layers for images, 64 and 2 for texts, heads
    of 64.
    """

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
        x = (
            torch.cat([self.visual.class_embedding.expand(len(x), 1, -1), x], dim=1)
            + self.visual.positional_embedding
        )
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


def saved(
    folder: Path, theirs: nn.Module, config: dict[str, Any] | None = None, **extra: Tensor
) -> Path:
    """Save the checkpoint with CLIP's tokenizer next to it, and open_clip_config.json if given."""
    folder.mkdir(exist_ok=True)
    small_clip_bpe(folder)
    torch.save(theirs.state_dict() | extra, folder / "clip.pt")
    if config is not None:
        (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder / "clip.pt"


PIXELS = torch.randint(
    0, 256, (2, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)


@pytest.mark.parametrize("source", ["open_clip_config.json", "openai", "flag"])
@pytest.mark.parametrize("quick", [False, True])
def test_open_clip_checkpoint_is_exported_with_equal_embeddings(
    quick: bool, source: str, tmp_path: Path
) -> None:
    """Into mmray.load and into transformers; sizes and activation come from the checkpoint or the
    file next to it.
    """
    from transformers import AutoModel, AutoTokenizer

    if source == "openai" and not quick:
        pytest.skip("OpenAI's weights all use quick_gelu")
    in_config = source == "open_clip_config.json"
    theirs = OpenClip(quick, text_heads=4 if in_config else 1).eval()
    preprocess = {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.3],
        "interpolation": "bilinear",
        "resize_mode": "squash",
    }
    config = (
        {"model_cfg": GELU | {"quick_gelu": quick}, "preprocess_cfg": preprocess}
        if in_config
        else None
    )
    openai = ("input_resolution", "context_length", "vocab_size") if source == "openai" else ()
    file = saved(tmp_path / "in", theirs, config, **dict.fromkeys(openai, torch.tensor(1)))
    flags = ["--model.activation", "quick_gelu" if quick else "gelu"] if source == "flag" else []
    assert (
        cli.run(
            ["export", "--weights", str(file), str(tmp_path / "out"), *flags], ConsoleReporter()
        )
        == 0
    )

    if in_config:  # random weights are not drawn before
        with Draws() as draws:
            build(pretrained_config(str(file)).model, ROWS)
        assert draws.devices <= {torch.device("meta")}

    loaded = mmray.load(tmp_path / "out")
    inputs = loaded.inputs
    assert (inputs.image_side, inputs.max_tokens) == (SIDE, TOKENS)
    assert (inputs.fit, inputs.interpolation) == (
        ("squash", "bilinear") if in_config else ("crop", "bicubic")
    )
    assert inputs.mean == ([0.5, 0.4, 0.3] if in_config else [0.48145466, 0.4578275, 0.40821073])
    tokenizer = Tokenizer.from_str(load_tokenizer(str(file.parent), None))
    text = torch.cat(
        [theirs.encode_text(tokenizer.encode(text).ids[:TOKENS]) for text in TEXTS[:2]]
    )
    image = theirs.encode_image(loaded.model.image.tower.embeddings.normalize(PIXELS))
    images = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in PIXELS]
    torch.testing.assert_close(loaded.embed_texts(TEXTS[:2]), text, rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded.embed_images(images), image, rtol=0, atol=1e-5)

    hf, report = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert (
        hf.config.vision_config.hidden_act
        == hf.config.text_config.hidden_act
        == ("quick_gelu" if quick else "gelu")
    )
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(
        TEXTS[:2], padding="max_length", return_tensors="pt"
    )
    with torch.no_grad():
        out = hf(
            input_ids=tokens["input_ids"],
            pixel_values=loaded.model.image.tower.embeddings.normalize(PIXELS),
        )
    torch.testing.assert_close(out.text_embeds, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.image_embeds, image, rtol=0, atol=1e-5)
    assert out.logits_per_text.shape == (2, 2) and hf.logit_scale.item() == 3.0


class OpenClipSiglip(nn.Module):
    """SigLIP in the layout of open_clip: timm's ViT with attention pooling, a text transformer
    without a mask.
    """

    def __init__(self, timm_name: str, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.visual, self.text = nn.Module(), nn.Module()
        self.visual.trunk = timm_vit(timm_name)
        self.text.token_embedding = nn.Embedding(ROWS, 64)
        self.text.positional_embedding = nn.Parameter(torch.randn(TOKENS, 64))
        self.text.transformer = nn.Module()
        self.text.transformer.resblocks = nn.ModuleList(Block(64, 4, False) for _ in range(2))
        self.text.ln_final = nn.LayerNorm(64, eps=1e-6)
        self.text.text_projection = nn.Linear(64, 64) if bias else nn.Parameter(torch.randn(64, 64))
        self.logit_scale, self.logit_bias = (
            nn.Parameter(torch.tensor(3.0)),
            nn.Parameter(torch.tensor(-9.0)),
        )
        for name, weight in self.named_parameters():
            if "logit" not in name and (
                name.endswith("bias") or "norm" in name or "latent" in name
            ):
                nn.init.normal_(weight)  # zeros and ones would hide a wrong name

    @torch.no_grad()
    def encode_image(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.visual.trunk(pixels))

    @torch.no_grad()
    def encode_text(self, ids: Tensor) -> Tensor:
        x = self.text.token_embedding(ids) + self.text.positional_embedding
        for block in self.text.transformer.resblocks:
            x = block(x)
        last, project = self.text.ln_final(x)[:, -1], self.text.text_projection
        return F.normalize(project(last) if isinstance(project, nn.Linear) else last @ project)


def timm_vit(name: str, **options: Any) -> nn.Module:
    import timm

    sizes = {"img_size": SIDE, "patch_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 2}
    siglip = {"class_token": False, "global_pool": "map", "num_classes": 0}
    act_layer = "gelu_tanh" if name.endswith("tanh") else None
    return timm.models.vision_transformer.VisionTransformer(**sizes, **siglip, act_layer=act_layer)


@pytest.mark.parametrize("kind", ["gelu", "tanh"])
def test_open_clip_siglip_is_exported_with_equal_embeddings(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel

    timm = pytest.importorskip("timm")
    published = {"vision_cfg": {"timm_model_name": "vit_base_patch16_siglip_256"}}
    assert open_clip._siglip_image("siglip.pt", published)["num_attention_heads"] == 12
    monkeypatch.setattr(timm, "create_model", timm_vit)
    theirs = OpenClipSiglip(f"vit_{kind}", bias=kind == "gelu").eval()
    text = {"heads": 4, "no_causal_mask": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
    config = {"model_cfg": {"vision_cfg": {"timm_model_name": f"vit_{kind}"}, "text_cfg": text}}
    file = saved(tmp_path / "in", theirs, config)
    assert (
        cli.run(["export", "--weights", str(file), str(tmp_path / "out")], ConsoleReporter()) == 0
    )
    loaded, hf = mmray.load(tmp_path / "out"), AutoModel.from_pretrained(tmp_path / "out")
    assert (loaded.inputs.fit, loaded.inputs.mean, loaded.inputs.image_side) == (
        "squash",
        [0.5, 0.5, 0.5],
        SIDE,
    )
    ids = torch.randint(0, ROWS, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    expected, pixels = (
        theirs.encode_text(ids),
        loaded.model.image.tower.embeddings.normalize(PIXELS),
    )
    torch.testing.assert_close(
        loaded.model.embed_text(ids, torch.ones_like(ids)), expected, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        loaded.model.embed_image(PIXELS), theirs.encode_image(pixels), rtol=0, atol=1e-6
    )
    with torch.no_grad():
        out = hf(input_ids=ids, pixel_values=pixels)
    torch.testing.assert_close(out.text_embeds, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.image_embeds, theirs.encode_image(pixels), rtol=0, atol=1e-6)
    assert (hf.logit_scale.item(), hf.logit_bias.item()) == (3.0, -9.0)

    with pytest.raises(UsageError, match=r"model\.kind: .* is a siglip checkpoint, not clip"):
        build(
            pretrained_config(str(saved(tmp_path / "c", OpenClip(False)))).model.replace(
                weights=str(file)
            ),
            ROWS,
        )
    (file.parent / "open_clip_config.json").write_text(
        json.dumps(config["model_cfg"] | {"text_cfg": {}})
    )
    with pytest.raises(
        UsageError,
        match=r"text_cfg\.pool_type None in .*, but model\.kind siglip supports only last",
    ):
        build(pretrained_config(str(file)).model, ROWS)
    (file.parent / "open_clip_config.json").unlink()
    with pytest.raises(
        UsageError, match=r"whose config is not next to it; copy it there as open_clip_config\.json"
    ):
        build(pretrained_config(str(file)).model, ROWS)


def test_torchscript_archive_is_refused_and_its_state_dict_is_read(tmp_path: Path) -> None:
    theirs = OpenClip(True).half()
    for name in ("input_resolution", "context_length", "vocab_size"):  # of OpenAI's files
        theirs.register_buffer(name, torch.tensor(1))
    theirs.register_buffer("attn_mask", torch.zeros(2, dtype=torch.uint8))  # which is not read
    file = saved(tmp_path, theirs)
    plain = pretrained_config(str(file))
    torch.jit.script(ScriptedClip(theirs)).save(file)
    with pytest.raises(UsageError, match=r"is a TorchScript archive.*state_dict"):
        pretrained_config(str(file))
    torch.save(torch.jit.load(file).state_dict(), file)  # what the message suggests
    assert pretrained_config(str(file)) == plain
    assert read_state_dict("model.weights", str(file))["visual.proj"].dtype == torch.half
    build(plain.model, ROWS)


class ScriptedClip(nn.Module):
    """The same modules and a method that torch.jit.script compiles."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = (
            clip._modules,
            clip._parameters,
            clip._buffers,
        )
        self.sizes = [1, 2]

    def forward(self, ids: Tensor) -> Tensor:
        return self.token_embedding(ids)


def test_code_in_a_torchscript_archive_does_not_run(tmp_path: Path) -> None:
    file, ran = tmp_path / "clip.pt", tmp_path / "ran"
    with ZipFile(file, "w") as archive:
        archive.writestr("clip/constants.pkl", b"")
        archive.writestr("clip/data.pkl", b"cos\nsystem\n(S'touch %s'\ntR." % str(ran).encode())
    with pytest.raises(UsageError, match="cannot read weights from"):
        pretrained_config(str(file))
    assert not ran.exists()


def test_training_checkpoint_of_several_gpus_is_read(tmp_path: Path) -> None:
    """The weights in a checkpoint of open_clip that trained on several GPUs."""
    file, theirs = saved(tmp_path, OpenClip(True)), OpenClip(True).eval()
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{n}": t for n, t in theirs.state_dict().items()}}, file
    )
    model = pretrained_config(str(file)).model.replace(activation="quick_gelu", vocab_size=0)
    built = build(model, ROWS).eval()
    assert built.log_scale.item() == 3.0
    ids = torch.randint(0, ROWS, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = theirs.encode_text(ids[0].tolist())
    torch.testing.assert_close(
        built.embed_text(ids, torch.ones_like(ids)), expected, rtol=0, atol=2e-6
    )


def test_heads_follow_open_clip_unless_its_config_has_them() -> None:
    assert [open_clip._num_heads("vision", width, None) for width in (768, 1024, 1152, 1664)] == [
        12,
        16,
        16,
        16,
    ]
    assert [open_clip._num_heads("text", width, None) for width in (512, 1280)] == [8, 20]
    # defaults of open_clip
    assert [open_clip._num_heads("vision", width, {}) for width in (768, 1664)] == [12, 26]
    assert [open_clip._num_heads("text", width, {}) for width in (512, 1280)] == [8, 8]
    assert open_clip._num_heads("vision", 1408, {"head_width": 88}) == 16
    assert open_clip._num_heads("text", 100, {"heads": 5}) == 5
    with pytest.raises(
        UsageError, match=r"the text encoder has width 100, .*text_cfg.*open_clip_config\.json"
    ):
        open_clip._num_heads("text", 100, None)


def test_activation_that_nothing_defines_must_be_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "in", OpenClip(False))
    assert (
        cli.run(["export", "--weights", str(file), str(tmp_path / "out")], ConsoleReporter()) == 2
    )
    assert (
        "model.activation:" in (error := capfd.readouterr().err)
        and "no open_clip_config.json" in error
    )
    (tmp_path / "in" / "open_clip_config.json").write_text(json.dumps({"model_cfg": GELU}))
    flags = ["--model.activation", "quick_gelu"]
    assert (
        cli.run(
            ["export", "--weights", str(file), str(tmp_path / "out"), *flags], ConsoleReporter()
        )
        == 2
    )
    assert "was trained with gelu, not quick_gelu" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    assert cli.run(["export", "--weights", str(file)], ConsoleReporter()) == 2
    assert "folder OUT is missing" in capfd.readouterr().err


def test_setting_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    config = pretrained_config(str(saved(tmp_path, OpenClip(False), {"model_cfg": GELU})))
    inputs = config.model.inputs.replace(image_side=50)
    with pytest.raises(UsageError, match="do not tile an image of 50 pixels"):
        build(config.model.replace(inputs=inputs), ROWS)
    state = torch.load(tmp_path / "clip.pt")
    del state["visual.ln_pre.weight"]
    torch.save(state, tmp_path / "clip.pt")
    with pytest.raises(
        UsageError, match=r"not a checkpoint of open_clip with a ViT: Missing.*pre_layrnorm"
    ):
        build(config.model, ROWS)


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("vision_cfg", "pool_type", "avg"),
        ("text_cfg", "no_causal_mask", True),
        ("text_cfg", "pool_type", "last"),
        ("text_cfg", "norm_kwargs", {"eps": 1e-6}),
    ],
)
def test_setting_of_open_clip_without_equal_in_transformers_is_refused(
    part: str, setting: str, value: Any, tmp_path: Path
) -> None:
    config = GELU | {part: GELU[part] | {setting: value}}
    model = pretrained_config(str(saved(tmp_path, OpenClip(False), config))).model
    with pytest.raises(
        UsageError, match=rf"clip\.pt has {part}\.{setting} .*, but model\.kind clip supports only"
    ):
        build(model, ROWS)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_transformers_folder_is_exported_with_equal_embeddings(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel, CLIPImageProcessor

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {
        "vocab_size": ROWS,
        "max_position_embeddings": TOKENS,
        "eos_token_id": ROWS - 1,
        "pad_token_id": 1,
    }
    activation = {"hidden_act": "gelu"} if kind == "clip" else {}
    text |= {"projection_size": 32} if kind == "siglip" else {}
    vision = {"image_size": SIDE, "patch_size": 16}
    torch.manual_seed(3)
    towers = {
        "text_config": tower | text | activation,
        "vision_config": tower | vision | activation,
    }
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
    with Draws() as draws:
        build(config.model, ROWS)
    assert draws.devices <= {torch.device("meta")}
    export_model(config, tmp_path / "out")
    loaded, again = mmray.load(tmp_path / "out"), AutoModel.from_pretrained(tmp_path / "out")
    pixels = loaded.model.image.tower.embeddings.normalize(PIXELS)
    with torch.no_grad():
        image = F.normalize(theirs.get_image_features(pixel_values=pixels).pooler_output)
        torch.testing.assert_close(loaded.model.embed_image(PIXELS), image, rtol=0, atol=1e-5)
        image_again = F.normalize(again.get_image_features(pixel_values=pixels).pooler_output)
        torch.testing.assert_close(image_again, image, rtol=0, atol=1e-5)
        ids = torch.tensor([[518, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 519]])
        expected = F.normalize(theirs.get_text_features(input_ids=ids).pooler_output)
        torch.testing.assert_close(
            loaded.model.embed_text(ids, torch.ones_like(ids)), expected, rtol=0, atol=1e-5
        )
    if kind == "clip":
        with pytest.raises(UsageError, match="trained with gelu, not quick_gelu"):
            build(config.model.replace(activation="quick_gelu"), ROWS)


def test_export_keeps_its_settings_as_pretrained_weights(tmp_path: Path) -> None:
    """transformers' files have no `pad`."""
    text = load_tokenizer(str(saved(tmp_path / "in", OpenClip(False)).parent), None)
    spec = pretrained_config(
        str(saved(tmp_path / "in", OpenClip(False), {"model_cfg": GELU}))
    ).model
    inputs = spec.inputs.replace(fit="pad", mean=(0.1, 0.2, 0.3), max_tokens=9)
    spec = spec.replace(inputs=inputs, vocab_size=ROWS)
    values = spec.model_dump(mode="json")
    values["inputs"]["max_boxes"] = 0  # a setting of an earlier version
    export(build(spec, ROWS), values, text, tmp_path / "clip")
    config = pretrained_config(str(tmp_path / "clip"))
    assert config.model.inputs == inputs.replace(
        tokenizer=str(tmp_path / "clip" / "tokenizer.json")
    )


def test_unreachable_hub_is_not_a_missing_preprocessor_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def download(name: str, file_name: str) -> str:
        if not reachable:
            raise LocalEntryNotFoundError("cannot find the file on the local disk")
        if file_name == files[0]:
            (tmp_path / file_name).write_text(
                json.dumps({"image_processor": {"image_mean": [0.1, 0.2, 0.3]}})
            )
            return str(tmp_path / file_name)
        raise EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    reachable, files = True, ["processor_config.json"]
    assert pretrained._preprocessing("a/b") == {"mean": [0.1, 0.2, 0.3], "fit": "squash"}
    files = ["none"]
    assert pretrained._preprocessing("a/b") == {}
    reachable = False
    with pytest.raises(
        UsageError,
        match=r"--weights: cannot read preprocessor_config\.json of `a/b`: .*hf download a/b",
    ):
        pretrained._preprocessing("a/b")


@pytest.mark.parametrize("exists", [True, False])
def test_cached_repository_without_preprocessor_file_needs_no_network(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = {"image_processor": {"image_mean": [0.1, 0.2, 0.3]}}
    files = {"processor_config.json": json.dumps(processor)} if exists else {}
    missing = {"preprocessor_config.json", "processor_config.json"} - files.keys()
    cache_repository(monkeypatch, tmp_path, files, missing)
    assert pretrained._preprocessing("a/b") == (
        {"mean": [0.1, 0.2, 0.3], "fit": "squash"} if exists else {}
    )


def test_weights_of_the_hub_define_the_inputs_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "clip", "vision_config": {"image_size": 336}}
    processor = {"image_mean": [0.5] * 3}
    files = {
        "config.json": json.dumps(config),
        "preprocessor_config.json": json.dumps(processor),
    }
    cache_repository(monkeypatch, tmp_path, files)
    built_in = load_recipe("clip").model.inputs
    changed = {"image_side": 336, "mean": (0.5, 0.5, 0.5), "fit": "squash", "tokenizer": "a/b"}
    assert load_recipe("clip", weights="a/b").model.inputs == built_in.replace(**changed)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("recipe: clip\nmodel: {weights: a/b, inputs: {image_side: 112, fit: crop}}\n")
    changed |= {"image_side": 112, "fit": "crop"}
    assert load_recipe(str(recipe)).model.inputs == built_in.replace(**changed)
    assert load_recipe("clip", weights="/of/workers").model.inputs == built_in
    with pytest.raises(UsageError, match="cannot load `a/c`"):
        load_recipe("clip", weights="a/c")


def test_config_of_transformers_wins_over_open_clip_in_a_folder(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = tower | {"vocab_size": ROWS, "max_position_embeddings": TOKENS - 1}
    vision = tower | {"image_size": SIDE, "patch_size": 16}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(tmp_path)
    saved(tmp_path, OpenClip(False), {"model_cfg": GELU}).rename(
        tmp_path / "open_clip_pytorch_model.bin"
    )
    config = pretrained_config(str(tmp_path))  # as `train` does
    assert (config.model.weights, config.model.inputs.max_tokens) == (str(tmp_path), TOKENS - 1)


def test_incomplete_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"mmray": "1.0"}')
    with pytest.raises(
        UsageError,
        match=r"config\.json has no model\.kind, so the export is incomplete; export the run",
    ):
        pretrained_config(str(tmp_path))


def test_run_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UsageError, match=f"is a run; .*mmray export {tmp_path} OUT"):
        pretrained_config(str(tmp_path))


def test_folder_of_the_hub_has_its_open_clip_file(tmp_path: Path) -> None:
    file = saved(tmp_path, OpenClip(False), {"model_cfg": GELU}).rename(
        tmp_path / "open_clip_pytorch_model.bin"
    )
    config = pretrained_config(str(file))
    assert pretrained_config(str(tmp_path)) == config
    of_folder = build(config.model.replace(weights=str(tmp_path)), ROWS)
    of_file = build(config.model, ROWS)
    torch.testing.assert_close(of_folder.state_dict(), of_file.state_dict(), rtol=0, atol=0)


def test_sizes_in_open_clips_config_equal_those_of_the_weights(tmp_path: Path) -> None:
    declared = saved(tmp_path / "declared", OpenClip(False), {"model_cfg": DECLARED})
    inferred = saved(tmp_path / "inferred", OpenClip(False), {"model_cfg": GELU})
    settings = [pretrained.pretrained_settings(str(file)) for file in (declared, inferred)]
    for each in settings:
        del each["weights"], each["inputs"]["tokenizer"]
    assert settings[0] == settings[1]
    assert settings[0]["inputs"] == {"image_side": SIDE, "max_tokens": TOKENS}


def test_missing_file_is_not_searched_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--weights: no file .*clip\.pt; check the path"):
        pretrained_config(str(tmp_path / "clip.pt"))


def test_image_encoder_alone_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    ViTModel(ViTConfig(**small)).save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match=r"image encoder \(vit\) without a text encoder; .*--model\.image\.weights"
    ):
        pretrained_config(str(tmp_path))
    torch.save({"patch_embed.proj.weight": torch.zeros(3, 3, 4, 4)}, tmp_path / "timm.pth")
    with pytest.raises(
        UsageError,
        match=r"timm\.pth is not a checkpoint of open_clip.*"
        r"--model\.image\.weights DIR, a folder of timm",
    ):
        pretrained_config(str(tmp_path / "timm.pth"))


def test_pretrained_weights_are_scored_as_their_model_ranks(tmp_path: Path) -> None:
    """A worker's part of `mmray evaluate --weights`."""
    held_out = make_set(tmp_path / "set", [row(number) for number in range(7)])
    config = pretrained_config(str(saved(tmp_path / "in", OpenClip(False), {"model_cfg": GELU})))
    logged, progress = list[str](), list[int]()
    config, tokenizer_json = with_tokenizer(config, lambda text, _: logged.append(text))
    assert logged == [] and config.model.vocab_size == ROWS
    scores = evaluate_export.score_model(
        config,
        Group(),
        lambda message: progress.append(message["rows"]),
        SavedModel(config, tokenizer_json, None),
        {"": held_out},
    )
    assert (
        sum(progress) == 7 == scores["rows"]
        and scores["loss"] > 0
        and 0 <= scores["recall_at_1/mean"] <= 1
    )
    (tmp_path / "other.json").write_text(train_tokenizer(TEXTS, 60))
    for tokenizer in (str(tmp_path / "other.json"), "trained"):
        model = config.model.replace(inputs=config.model.inputs.replace(tokenizer=tokenizer))
        with (
            pytest.raises(UsageError, match="`trained` is")
            if tokenizer == "trained"
            else nullcontext()
        ):
            with_tokenizer(config.replace(model=model), lambda text, _: logged.append(text))
    assert "tokens, the weights 520: is it their tokenizer?" in logged[0]
