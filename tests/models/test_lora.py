"""LoRA adapters: no change at initialization, only adapters train, and merging gives a plain
model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mmray
from mmray.config import Clip, ClipImage, ClipText, Config, Inputs, Lora, Model
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from mmray.models import lora
from mmray.models.build import build
from mmray.models.export.export import export
from mmray.models.synthetic import synthetic_batch
from mmray.training.driver import check_classes
from tests.engine import toy
from tests.engine.test_step import take
from tests.made import CAPTIONS
from tests.models import test_clip

pytestmark = pytest.mark.usefixtures("one_thread")
INPUTS = Inputs(image_side=32, max_tokens=10, fit="squash")
VOCAB = 23
ADAPTERS = Lora(rank=3, alpha=6)
# with the objective, and an output that the adapters change
SPECS: dict[str, tuple[Model, str, str]] = {
    "clip": (
        Clip(
            inputs=INPUTS,
            image=ClipImage(width=16, depth=2, heads=2, patch=8),
            text=ClipText(width=16, depth=2, heads=2),
            embed_dim=8,
        ),
        "contrastive",
        "image_embed",
    ),
}


def models_of(kind: str) -> tuple[nn.Module, nn.Module]:
    """The same random model without and with adapters, float64."""
    spec = SPECS[kind][0]
    models = []
    for section in (Lora(), ADAPTERS):
        torch.manual_seed(0)
        models.append(
            build(spec.model_copy(update={"lora": section}), spec.vocab_size or VOCAB).double()
        )
    return models[0], models[1]


def trained(kind: str, model: nn.Module) -> nn.Module:
    """Three steps of eight rows in two micro-batches."""
    spec, objective, _ = SPECS[kind]
    state = toy.train_state(model.train(), objective=toy.objective(objective))
    for step in range(3):
        batch = synthetic_batch(spec.inputs, spec.vocab_size or VOCAB, 8, "cpu", step)
        assert take(state, toy.cut(batch, 4), step).is_finite
    return model.eval()


@pytest.mark.parametrize("kind", SPECS)
def test_only_adapters_train_and_they_merge(kind: str) -> None:
    spec, _, output = SPECS[kind]
    plain, adapted = models_of(kind)
    batch = synthetic_batch(spec.inputs, spec.vocab_size or VOCAB, 3, "cpu", 9)
    with torch.no_grad():
        before = plain.eval()(batch)[output]
        # up to rounding: projections without adapters are fused
        torch.testing.assert_close(adapted.eval()(batch)[output], before, rtol=0, atol=1e-12)
    assert all(
        ("lora_" in name) == weight.requires_grad for name, weight in adapted.named_parameters()
    )
    trained(kind, adapted)
    state = adapted.state_dict().items()
    base = {name.replace(".base_layer", ""): value for name, value in state if "lora_" not in name}
    torch.testing.assert_close(base, dict(plain.state_dict()), rtol=0, atol=0)
    with torch.no_grad():
        after = adapted(batch)[output]
        assert (after - before).abs().max() > 1e-6
        merged = lora.merge_adapters(adapted)
        assert merged.state_dict().keys() == plain.state_dict().keys()
        torch.testing.assert_close(merged(batch)[output], after, rtol=0, atol=1e-9)


def test_frozen_layers_get_no_adapter() -> None:
    """LLaVA does not use the last layer of the image encoder, so an adapter there would never
    train.
    """
    torch.manual_seed(0)
    model = build(SPECS["clip"][0], VOCAB)
    frozen = model.image.tower.encoder.layers[1]
    frozen.requires_grad_(False)
    lora.add_adapters(model, ADAPTERS)
    adapted = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    assert adapted
    assert not set(adapted) & set(frozen.modules())


def test_output_layer_of_torch_attention_gets_no_adapter() -> None:
    """SigLIP pools with nn.MultiheadAttention, which does not call its output layer."""
    model = build(test_clip.SPECS["siglip"], test_clip.VOCAB)
    lora.add_adapters(model, ADAPTERS.model_copy(update={"targets": ("*.out_proj",)}))
    outputs = model(synthetic_batch(test_clip.INPUTS, test_clip.VOCAB, 2, "cpu"))
    (outputs["image_embed"].sum() + outputs["text_embed"].sum()).backward()
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    assert len(trainable) == 2 * 4 and all(weight.grad is not None for weight in trainable)


def test_invalid_setting_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["clip"][0]
    wrong = ADAPTERS.model_copy(update={"targets": ("*.q_proj", "*.query")})
    with pytest.raises(UsageError, match=r"model.lora.targets: `\*.query` matches no linear layer"):
        build(spec.model_copy(update={"lora": wrong}), VOCAB)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"pip install \"mmray\[lora\]\""):
        build(spec.model_copy(update={"lora": ADAPTERS}), VOCAB)
    with pytest.raises(UsageError, match=r"model.lora.rank: needs peft"):
        check_classes(Config(model=spec.model_copy(update={"lora": ADAPTERS})))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported CLIP with random weights, which also opens in transformers."""
    torch.manual_seed(0)
    spec = SPECS["clip"][0]
    spec = spec.replace(vocab_size=VOCAB, inputs=spec.inputs.replace(max_tokens=16))
    tokenizer = train_tokenizer(CAPTIONS, VOCAB)
    folder = tmp_path_factory.mktemp("lora") / "base"
    export(build(spec, VOCAB), spec.model_dump(mode="json"), tokenizer, folder)
    return folder


def adapted_from(base: Path, train: str) -> tuple[Any, dict[str, Any]]:
    """A model with random adapters and projections on the weights of a folder, and its settings."""
    spec = Clip(weights=str(base), lora=ADAPTERS.replace(train=train), vocab_size=VOCAB)
    spec = spec.replace(inputs=INPUTS.replace(max_tokens=16))
    return randomize_trained(build(spec, VOCAB)), spec.model_dump(mode="json")


@torch.no_grad()
def randomize_trained(model: nn.Module) -> nn.Module:
    """Set the trainable weights to random values, as if they had been trained."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.normal_(std=0.3)
    return model.eval()


def test_parts_that_train_fully_are_named(base: Path) -> None:
    model, _ = adapted_from(base, "project|log_scale")
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    others = {name for name in trained if "lora_" not in name}
    assert others == {"image.project.weight", "text.project.weight", "log_scale"}
    with pytest.raises(UsageError, match=r"model.lora.train: `projet` .* mean `project`"):
        adapted_from(base, "projet")


def test_exported_adapters_open_in_peft(base: Path, tmp_path: Path) -> None:
    from transformers import CLIPModel

    model, spec = adapted_from(base, "project")
    tokenizer = (base / "tokenizer.json").read_text()
    export(model, spec, tokenizer, tmp_path / "adapters", adapters_only=True)
    size = (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size
    assert size < (base / "model.safetensors").stat().st_size / 2
    assert_peft_embeds_alike(model, CLIPModel.from_pretrained(base), tmp_path / "adapters", INPUTS)
    with pytest.raises(UsageError, match="it has adapters only; open it with peft"):
        mmray.load(tmp_path / "adapters")
    scaled, spec = adapted_from(base, "log_scale")
    with pytest.raises(UsageError, match="peft cannot save log_scale"):
        export(scaled, spec, tokenizer, tmp_path / "other", adapters_only=True)


@pytest.mark.parametrize("train", ["", "head"])
def test_exported_adapters_of_siglip_open_in_peft(tmp_path: Path, train: str) -> None:
    """Also with the projection of the text encoder trained fully."""
    from transformers import SiglipModel

    torch.manual_seed(0)
    spec = test_clip.SPECS["siglip"].replace(vocab_size=test_clip.VOCAB)
    values = spec.model_dump(mode="json")
    base = export(build(spec, spec.vocab_size), values, test_clip.TOKENIZER, tmp_path / "base")
    spec = spec.replace(weights=str(base), lora=ADAPTERS.replace(train=train))
    model = randomize_trained(build(spec, spec.vocab_size))
    values = spec.model_dump(mode="json")
    out = export(model, values, test_clip.TOKENIZER, tmp_path / "out", adapters_only=True)
    assert_peft_embeds_alike(model, SiglipModel.from_pretrained(base), out, test_clip.INPUTS)


def assert_peft_embeds_alike(model: Any, base: nn.Module, adapters: Path, inputs: Inputs) -> None:
    """Images, and texts of SigLIP, have the same embeddings with peft on the base, within 1e-5."""
    from peft import PeftModel

    batch = synthetic_batch(inputs, VOCAB, 3, "cpu", 9)
    net: Any = PeftModel.from_pretrained(base, adapters).eval().base_model.model
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (inputs.mean, inputs.std))
    images = net.get_image_features((batch["image"] / 255 - mean) / std)
    pairs = [(images, model.embed_image(batch["image"]))]
    # CLIP reads the embedding at its end token, which a random text does not have.
    if net.config.model_type == "siglip":
        texts = (batch["input_ids"], batch["attention_mask"])
        pairs.append((net.get_text_features(*texts), model.embed_text(*texts)))
    for given, expected in pairs:
        embeds = F.normalize(getattr(given, "pooler_output", given), dim=1)
        torch.testing.assert_close(embeds, expected, rtol=0, atol=1e-5)
