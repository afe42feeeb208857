"""Decoder of captions: its loss equals a loop over tokens, it learns, and its export captions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import mmray
from mmray import objectives
from mmray.config import (
    CaptionDecoder,
    Clip,
    Config,
    ImageTower,
    Lora,
    Model,
    Objective,
    Siglip,
    TextTower,
    Towers,
    Train,
    TwoTower,
    Vlm,
)
from mmray.data.stream.collate import token_columns
from mmray.data.text.tokenizer import TextEncoder
from mmray.errors import UsageError
from mmray.models.build import build
from mmray.models.export.embedder import load_images
from mmray.models.export.export import export
from mmray.training.saved_model import pretrained_config
from mmray.training.validate import unsupported_reasons
from tests.made import noisy
from tests.models.test_clip import (
    IMAGE,
    INPUTS,
    TEXT,
    TEXTS,
    TOKENIZER,
    VOCAB,
    batch_of,
    photo,
    tokenizer_adding,
)

pytestmark = pytest.mark.usefixtures("one_thread")
DECODER = CaptionDecoder(width=24, depth=2, heads=3)
SPECS: dict[str, Model] = {
    "clip": Clip(
        inputs=INPUTS, image=IMAGE, text=TEXT, embed_dim=16, patch_dropout=0.5, decoder=DECODER
    ),
    "siglip": Siglip(inputs=INPUTS, image=IMAGE, text=TEXT, decoder=DECODER),
    "two_tower": TwoTower(
        inputs=INPUTS,
        image=ImageTower(name="convnet", width=8, depth=2),
        text=TextTower(width=16, depth=1, heads=2),
        embed_dim=12,
        decoder=DECODER,
    ),
}
KIND = "contrastive + captioning"


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return build(SPECS[kind], VOCAB)


@pytest.mark.parametrize("kind", SPECS)
def test_loss_and_gradients_equal_a_loop_over_tokens(kind: str) -> None:
    batch = batch_of() | {"valid": torch.tensor([True, True, False, True])}
    objective: Any = objectives.build(Objective(kind="captioning"))
    model = model_of(kind).double().train()
    torch.manual_seed(1)  # of the dropped patches
    loss, count, _ = objective.compute_loss(model(batch), batch)
    assert count == batch["attention_mask"][[0, 1, 3]].sum()
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}

    model.zero_grad()
    torch.manual_seed(1)
    features = model.image(batch["image"]).features
    expected = torch.zeros(())
    for row in (0, 1, 3):
        ids = batch["input_ids"][row : row + 1]
        for length in range(batch["attention_mask"][row].sum()):
            logits = model.decoder(features[row : row + 1], ids[:, :length])
            expected = expected + F.cross_entropy(logits, ids[:, length])
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=0, atol=1e-9, msg=name)
    assert gradients["decoder.start"].any()


def test_first_pass_of_a_step_computes_no_captions() -> None:
    model = model_of("siglip").train()
    with torch.no_grad():
        assert "caption_losses" not in model(batch_of())
        assert "caption_losses" in model.eval()(batch_of())


@pytest.fixture(scope="module")
def captioner() -> Any:
    """A model that has learned a caption for each of three images."""
    model = model_of("clip")
    model.image.patch_dropout = 0
    images = load_images([noisy(number) for number in range(3)], INPUTS)
    ids, num_tokens = TextEncoder(TOKENIZER, INPUTS.max_tokens).encode(TEXTS)
    columns = token_columns(ids, num_tokens)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        loss = model({"image": images, **columns})["caption_losses"].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("format", ["transformers", "open_clip"])
def test_export_captions_its_images_and_opens_in_transformers(
    captioner: Any, tmp_path: Path, format: Any
) -> None:
    from transformers import AutoModel

    spec = SPECS["clip"].model_copy(update={"vocab_size": VOCAB})
    out = export(captioner, spec.model_dump(mode="json"), TOKENIZER, tmp_path / "m", format=format)
    loaded = mmray.load(out)
    texts = [
        "a red circle",
        "a blue square on a green ground",
        "two triangles, left of a circle",
    ]
    assert loaded.caption([noisy(number) for number in range(3)], batch=2) == texts
    assert loaded.caption([]) == []
    state = captioner.state_dict()
    assert loaded.model.state_dict().keys() == state.keys()
    assert load_file(out / "decoder.safetensors").keys() == {
        name for name in state if name.startswith("decoder.")
    }
    if format == "transformers":
        continued: Any = build(spec.model_copy(update={"weights": str(out)}), VOCAB)
        torch.testing.assert_close(continued.state_dict(), state, rtol=0, atol=0)
        other = spec.model_copy(update={"weights": str(out), "decoder": DECODER.replace(depth=1)})
        with pytest.raises(UsageError, match=r"its sizes are not those of .*decoder.safetensors"):
            build(other, VOCAB)
        assert pretrained_config(str(out)).model.decoder == spec.decoder
        none: Any = build(other.model_copy(update={"decoder": CaptionDecoder()}), VOCAB)
        assert "the decoder of captions in" in none.build_notes[-1]
        theirs, report = AutoModel.from_pretrained(out, output_loading_info=True)
        assert not any(report.values())
        pixels = load_images([photo()], INPUTS)
        with torch.no_grad():
            normalized = captioner.image.tower.embeddings.normalize(pixels)
            embeds = theirs.get_image_features(pixel_values=normalized)
            embeds = getattr(embeds, "pooler_output", embeds)
        torch.testing.assert_close(
            loaded.embed_images([photo()]), F.normalize(embeds), rtol=0, atol=1e-6
        )


def test_caption_without_decoder_is_refused_with_the_setting(tmp_path: Path) -> None:
    spec = SPECS["siglip"].model_copy(update={"vocab_size": VOCAB, "decoder": CaptionDecoder()})
    out = export(build(spec, VOCAB), spec.model_dump(mode="json"), TOKENIZER, tmp_path / "m")
    with pytest.raises(UsageError, match=r"no decoder of captions; train one .*depth N"):
        mmray.load(out).caption([noisy(0)])


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        (Towers(), KIND, "objective captioning is for model.kind `two_tower`, `clip`, `siglip`"),
        (Vlm(weights="sample-vlm"), "captioning", "is for model.kind `two_tower`"),
        (Clip(), KIND, "captioning needs a decoder; set --model.decoder.depth N"),
        (Clip(decoder=DECODER), "contrastive", r"add `\+ captioning` to --objective.kind"),
        (Clip(decoder=DECODER), "captioning", "does not train the text branch"),
        (
            Clip(decoder=DECODER, weights="hub/clip", lora=Lora(rank=2)),
            KIND,
            "freezes the decoder, .* set --model.lora.train decoder",
        ),
        (Clip(decoder=DECODER.replace(heads=5)), KIND, "decoder.heads: 5 heads do not divide"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(model: Model, kind: str, reason: str) -> None:
    reasons = unsupported_reasons(Config(model=model, objective=Objective(kind=kind)))
    assert re.search(reason, "\n".join(reasons))


def test_branches_on_two_devices_are_refused() -> None:
    model = Clip(decoder=DECODER)
    train = Train(parallel="branches")
    reasons = unsupported_reasons(Config(model=model, objective=Objective(kind=KIND), train=train))
    assert any("without other parts such as a decoder" in reason for reason in reasons), reasons


def test_start_and_end_tokens_of_tokenizers() -> None:
    assert TextEncoder(TOKENIZER, 8).has_start
    for added in (("$A",), ("[CLS]", "$A"), ("[SEP]", "$A", "[SEP]")):
        assert TextEncoder(tokenizer_adding(*added), 8).end_id is None
    encoder = TextEncoder(tokenizer_adding("$A", "[SEP]"), 8)
    assert not encoder.has_start and encoder.tokenizer.id_to_token(encoder.end_id) == "[SEP]"


def test_adapters_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot save the decoder of captions"):
        export(model_of("clip"), {}, TOKENIZER, tmp_path / "m", adapters_only=True)
