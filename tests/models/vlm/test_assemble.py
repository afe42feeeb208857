"""New models of an image encoder and a language model: the first stage (captions) against a plain
loop of torch and transformers, its export, and the second stage.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

import mmray
from mmray.config import Batch, Data, override, recipes
from mmray.data.store.stored_row import Row
from mmray.data.vlm.encoder import MediaSize, ProcessorEncoder
from mmray.errors import UsageError
from mmray.models.vlm.assemble import MAX_GRID, assemble
from mmray.training import driver
from tests.made import encode, image_media, make_set
from tests.models.vlm.folders import CHATML, make_tokenizer
from tests.models.vlm.rows import photo, text
from tests.training.runs import Silent, lines

pytestmark = pytest.mark.usefixtures("forked_data_processes")

SIDE = 56
CAPTIONS = ("a red circle", "two blue squares and a circle", "green", "no image")
STEPS = 2
SIZES = ((60, 40), (30, 90), (56, 56), (80, 80))
# As language models have it: contents are texts.
TEXT_CHATML = (
    CHATML[: CHATML.index("{% for part")]
    + "{{ message['content'] }}"
    + CHATML[CHATML.index("<|im_end|>") :]
)
CLASSES = {
    "mlp": hf.LlavaForConditionalGeneration,
    "pixel_shuffle": hf.Idefics3ForConditionalGeneration,
}
PROJECTORS = {"mlp": "multi_modal_projector", "pixel_shuffle": "connector"}
IMAGE = {
    "mlp": "<image>" * 16,
    "pixel_shuffle": "<fake_token_around_image><global-img><image><fake_token_around_image>",
}
SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
}
QUESTION = [{"type": "image"}, text("Describe the image.")]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folder with encoders `clip` and `siglip`, and language models: `qwen2` has a chat template
    and tied embeddings, `llama` neither, `gemma2` caps its logits.
    """
    root = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 99,
    }
    vision = sizes | {"image_size": SIDE, "patch_size": 14}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    clip = hf.CLIPConfig(vision_config=vision, text_config=sizes | ends)
    _save(hf.CLIPModel(clip), root / "clip")
    crop = {"height": SIDE, "width": SIDE}
    hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=crop).save_pretrained(
        root / "clip"
    )
    siglip = hf.SiglipConfig(vision_config=vision, text_config=sizes | ends)
    _save(hf.SiglipModel(siglip), root / "siglip")
    hf.SiglipImageProcessor(size=crop, image_mean=[0.5] * 3, image_std=[0.4] * 3).save_pretrained(
        root / "siglip"
    )
    for name, config_class in (
        ("qwen2", hf.Qwen2Config),
        ("llama", hf.LlamaConfig),
        ("gemma2", hf.Gemma2Config),
    ):
        tokenizer = make_tokenizer("qwen2_audio")
        tokenizer.chat_template = None if name == "llama" else TEXT_CHATML
        tokenizer.save_pretrained(root / name)
        config = config_class(
            **sizes | {"vocab_size": len(tokenizer), "num_key_value_heads": 1},
            tie_word_embeddings=name == "qwen2",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        _save(hf.AutoModelForCausalLM.from_config(config), root / name)
    return root


def _save(model, folder):
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.1)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("vision", "projector"), [("clip", "mlp"), ("siglip", "mlp"), ("siglip", "pixel_shuffle")]
)
@pytest.mark.parametrize("language", ["qwen2", "llama"])
def test_new_model_has_the_weights_of_its_parts_and_opens_in_transformers(
    parts, vision, projector, language, tmp_path
):
    """With a chat template of conversations with images; tokens are counted without pixels."""
    assemble(str(parts / vision), str(parts / language), tmp_path, projector)
    net = CLASSES[projector].from_pretrained(tmp_path)
    alone = hf.AutoModelForCausalLM.from_pretrained(parts / language)
    ids = torch.arange(20)[None]
    assert torch.equal(
        net(input_ids=ids).logits[..., : alone.config.vocab_size], alone(input_ids=ids).logits
    )
    towers = hf.AutoModel.from_pretrained(parts / vision)
    pixels = torch.randn(1, 3, SIDE, SIDE)
    encoder = net.get_encoder(modality="image")
    if projector == "mlp":
        layers = encoder(pixels, output_hidden_states=True).hidden_states
        expected = towers.vision_model(pixels, output_hidden_states=True).hidden_states
        assert all(map(torch.equal, layers, expected)) and len(layers) == 3
    else:  # it reads the states after the last norm
        expected = towers.vision_model(pixels).last_hidden_state
        assert torch.equal(encoder(pixels).last_hidden_state, expected)
    encoder = ProcessorEncoder(str(tmp_path), 500)
    turns = [
        {"role": "system", "content": "one word"},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "red"},
    ]
    row = encoder.encode(turns, [photo(60, 40)])
    assert encoder.count_tokens(turns, [MediaSize(60, 40)]) == len(row.input_ids)
    shape = (1, 3, SIDE, SIDE) if projector == "mlp" else (1, 1, 3, SIDE, SIDE)
    net(
        input_ids=torch.tensor(row.input_ids[None]).long(),
        pixel_values=torch.tensor(row.images["pixel_values"]).float().view(*shape),
    )
    written = encoder.tokenizer.decode(row.input_ids).replace(IMAGE[projector], "@")
    trained = encoder.tokenizer.decode(row.input_ids[row.loss_weights > 0])
    assert (written, trained) == {
        "qwen2": (
            "<|im_start|>system\none word<|im_end|>\n<|im_start|>user\n@\nDescribe the image."
            "<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n",
            "red<|im_end|>",
        ),
        "llama": (
            "one word USER: @\nDescribe the image. ASSISTANT: red<|im_end|>",
            " red<|im_end|>",
        ),
    }[language]


def test_pixels_of_the_model_with_pixel_shuffle_are_those_of_the_siglip(parts, tmp_path):
    """And their size is fixed."""
    assemble(str(parts / "siglip"), str(parts / "qwen2"), tmp_path, "pixel_shuffle")
    image = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)
    for backend in ("pil", "torchvision"):
        pixels = [
            hf.AutoImageProcessor.from_pretrained(folder, backend=backend)(
                Image.fromarray(image), return_tensors="np"
            )["pixel_values"].reshape(3, SIDE, SIDE)
            for folder in (tmp_path, parts / "siglip")
        ]
        assert np.array_equal(*pixels), backend
    with pytest.raises(UsageError, match=r"model.inputs.max_pixels: .* fixed size"):
        ProcessorEncoder(str(tmp_path), 500, max_pixels=SIDE**2)


def test_encoder_that_does_not_fit_pixel_shuffle_is_refused(parts, tmp_path):
    language = str(parts / "qwen2")
    folders = {"clip_vision_model with 4": str(parts / "clip")}
    # No square divides the first; transformers 5.24 rounds the numbers of patches of the second.
    for grid in (25, 40):
        folder = _make_siglip(tmp_path / str(grid), 2 * grid)
        folders[f"siglip_vision_model with {grid}"] = folder
    for message, vision in folders.items():
        with pytest.raises(UsageError, match=rf"model\.projector: .* {message};"):
            assemble(vision, language, tmp_path / "out", "pixel_shuffle")
    whole = recipes.vlm().model.replace(weights="a", projector="pixel_shuffle")
    assert "(and model.projector) needs both" in whole.unsupported_reasons()[0]


def _make_siglip(folder, side):
    """Save a SigLIP with patches of 2 pixels and return its folder."""
    config = hf.SiglipVisionConfig(**SMALL, image_size=side, patch_size=2)
    _save(hf.SiglipVisionModel(config), folder)
    hf.SiglipImageProcessor().save_pretrained(folder)
    return str(folder)


def test_idefics3_computes_the_states_of_a_siglip():
    """For each grid that pixel shuffle takes."""
    for grid in range(2, MAX_GRID + 1):
        size = {"image_size": 2 * grid, "patch_size": 2}
        siglip = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, **size)).eval()
        tower = Idefics3VisionTransformer(Idefics3VisionConfig(**SMALL, **size)).eval()
        missing = tower.load_state_dict(siglip.state_dict(), strict=False).missing_keys
        pixels = torch.randn(1, 3, 2 * grid, 2 * grid)
        same = torch.equal(tower(pixels).last_hidden_state, siglip(pixels).last_hidden_state)
        # Grids that no square divides may differ.
        assert not missing and (same or (grid % 2 and grid % 3)), grid


@pytest.mark.parametrize(("side", "tokens"), [(16, 4), (12, 9), (19, 9)])
def test_pixel_shuffle_joins_squares_that_divide_the_grid(parts, side, tokens, tmp_path):
    vision = _make_siglip(tmp_path / "siglip", side)
    assemble(vision, str(parts / "qwen2"), tmp_path / "new", "pixel_shuffle")
    encoder = ProcessorEncoder(str(tmp_path / "new"), 500)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "red"},
    ]
    row = encoder.encode(turns, [photo(60, 40)])
    [image_id] = encoder.tokenizer.convert_tokens_to_ids(["<image>"])
    assert (row.input_ids == image_id).sum() == tokens
    assert len(encoder.tokenizer.tokenize(IMAGE["pixel_shuffle"])) == 4
    net = hf.Idefics3ForConditionalGeneration.from_pretrained(tmp_path / "new")
    pixels = torch.tensor(row.images["pixel_values"])[None].float()
    net(input_ids=torch.tensor(row.input_ids[None]).long(), pixel_values=pixels)


def test_part_that_does_not_fit_is_refused(parts, tmp_path):
    with pytest.raises(UsageError, match=r"model\.language: .* caps its logits"):
        assemble(str(parts / "clip"), str(parts / "gemma2"), tmp_path)
    with pytest.raises(UsageError, match=r"model\.vision: .* type 'llama'; supported are clip"):
        assemble(str(parts / "llama"), str(parts / "llama"), tmp_path)
    both = recipes.vlm_align().model
    assert "needs both" in both.replace(language="none").unsupported_reasons()[0]
    # A flag replaces what the recipe has in its place.
    assert override(recipes.vlm(), {"model": {"vision": "a"}}).model.weights == "none"
    model = recipes.vlm_align().model.replace(projector="pixel_shuffle")
    aligned = override(recipes.vlm_align().replace(model=model), {"model": {"weights": "a"}}).model
    assert (aligned.vision, aligned.language, aligned.projector) == ("none", "none", "mlp")


def _config(recipe, tmp_path, prepared, name, model):
    config = override(
        recipe,
        {
            "model": model | {"inputs": {"max_tokens": 100}},
            # Its steps are as exact as gradients; those of Adam magnify the smallest ones.
            "optimizer": {
                "kind": "torch.optim:SGD",
                "lr": 0.1,
                "weight_decay": 0.0,
                "warmup_steps": 0,
                "schedule": "constant",
            },
        },
    )
    return config.replace(
        data=Data(train=prepared, cache=str(tmp_path / "cache"), workers=1),
        batch=Batch(global_=len(CAPTIONS), tokens=100),
        train=config.train.replace(steps=STEPS, epochs=None, log_every=1),
        run=config.run.replace(storage=str(tmp_path), name=name),
    ).with_cluster(workers=1, cpus_per_worker=1)


@pytest.mark.parametrize(
    ("projector", "model_type"), [("mlp", "llava"), ("pixel_shuffle", "idefics3")]
)
def test_both_stages_from_siglip_and_qwen2(parts, projector, model_type, tmp_path, without_ray):
    """The first equals a plain loop; its export opens in transformers and starts the second."""
    images = [photo(*size) for size in SIZES]
    media = [[image_media(encode(Image.fromarray(image)))] for image in images]
    captions = [[caption] for caption in CAPTIONS]
    prepared = str(tmp_path / "set")
    make_set(
        tmp_path / "set",
        [Row(f"row-{n}", *each) for n, each in enumerate(zip(media, captions, strict=True))],
    )
    own = {"vision": str(parts / "siglip"), "language": str(parts / "qwen2")}
    settings = own | {"projector": projector}
    config = _config(recipes.vlm_align(), tmp_path, prepared, "align", settings)
    reporter = Silent()
    outcome = driver.train(config, reporter)
    [line] = [text for label, text in reporter.notes if label == "model"]
    assert line.endswith(f"is a new model of {own['vision']} and {own['language']}")
    [folder] = (tmp_path / "cache").glob(f"vlm-{projector}-*")
    losses, trained = _plain_loop(folder, images, config.optimizer, projector)
    found = [line["train/loss"] for line in lines(outcome.path)]
    assert found == pytest.approx(losses, rel=1e-5)
    out = mmray.export(outcome.path, tmp_path / "out")
    net = CLASSES[projector].from_pretrained(out)
    before = CLASSES[projector].from_pretrained(folder).state_dict()
    for name, value in net.state_dict().items():
        if name in trained:
            assert torch.allclose(value, trained[name], atol=1e-6), name
        else:
            assert torch.equal(value, before[name]), name
    second = _config(recipes.vlm(), tmp_path, prepared, "second", {"weights": str(out)})
    assert driver.train(second, Silent()).result["status"] == "finished"
    assert json.loads((out / "config.json").read_text())["model_type"] == model_type


def _plain_loop(folder, images, settings, projector_setting):
    """Losses of the steps, and the weights of the projector after them."""
    net = CLASSES[projector_setting].from_pretrained(folder)
    processor = hf.AutoProcessor.from_pretrained(folder)
    net.requires_grad_(False)
    projector = getattr(net.model, PROJECTORS[projector_setting]).requires_grad_(True)
    optimizer = torch.optim.SGD(projector.parameters(), lr=settings.lr)
    losses = []
    for _ in range(STEPS):
        sums, counts = [], []
        for image, caption in zip(images, CAPTIONS, strict=True):
            content = [{"type": "image", "image": Image.fromarray(image)}, QUESTION[1]]
            turns = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [text(caption)]},
            ]
            options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            prompt = processor.apply_chat_template(turns[:1], add_generation_prompt=True, **options)
            inputs = processor.apply_chat_template(turns, **options)
            labels = inputs["input_ids"].clone()
            labels[:, : prompt["input_ids"].shape[1]] = -100
            labels[:, -1] = -100  # the line break after the end token
            counts.append(int((labels[:, 1:] != -100).sum()))
            sums.append(net(**inputs, labels=labels).loss * counts[-1])
        loss = sum(sums) / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(projector.parameters(), settings.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    prefix = f"model.{PROJECTORS[projector_setting]}."
    return losses, {prefix + name: value for name, value in projector.state_dict().items()}
