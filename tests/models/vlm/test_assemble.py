"""New models of an image encoder and a language model: the first stage (captions) against a plain
loop of torch and transformers, its export, and the second stage.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from PIL import Image

import mmray
from mmray.config import Batch, Data, override, recipes
from mmray.data.store.stored_row import Row
from mmray.data.vlm.encoder import MediaSize, ProcessorEncoder
from mmray.errors import UsageError
from mmray.models.vlm.assemble import assemble
from mmray.training import driver
from tests.made import encode, image_media, make_set
from tests.models.vlm.folders import CHATML, make_tokenizer
from tests.models.vlm.rows import photo, text
from tests.training.runs import Silent, lines

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
    hf.SiglipImageProcessor(size=crop).save_pretrained(root / "siglip")
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


@pytest.mark.parametrize("vision", ["clip", "siglip"])
@pytest.mark.parametrize("language", ["qwen2", "llama"])
def test_new_model_has_the_weights_of_its_parts_and_opens_in_transformers(
    parts, vision, language, tmp_path
):
    """With a chat template of conversations with images; tokens are counted without pixels."""
    assemble(str(parts / vision), str(parts / language), tmp_path)
    net = hf.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    alone = hf.AutoModelForCausalLM.from_pretrained(parts / language)
    ids = torch.arange(20)[None]
    assert torch.equal(
        net(input_ids=ids).logits[..., : alone.config.vocab_size], alone(input_ids=ids).logits
    )
    towers = hf.AutoModel.from_pretrained(parts / vision)
    pixels = torch.randn(1, 3, SIDE, SIDE)
    layers = net.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    expected = towers.vision_model(pixels, output_hidden_states=True).hidden_states
    assert all(map(torch.equal, layers, expected)) and len(layers) == 3
    encoder = ProcessorEncoder(str(tmp_path), 500)
    turns = [
        {"role": "system", "content": "one word"},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "red"},
    ]
    row = encoder.encode(turns, [photo(60, 40)])
    assert encoder.count_tokens(turns, [MediaSize(60, 40)]) == len(row.input_ids)
    net(
        input_ids=torch.tensor(row.input_ids[None]).long(),
        pixel_values=torch.tensor(row.images["pixel_values"]).float(),
    )
    written = encoder.tokenizer.decode(row.input_ids).replace("<image>" * 16, "@")
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


def test_part_that_does_not_fit_is_refused(parts, tmp_path):
    with pytest.raises(UsageError, match=r"model\.language: .* caps its logits"):
        assemble(str(parts / "clip"), str(parts / "gemma2"), tmp_path)
    with pytest.raises(UsageError, match=r"model\.vision: .* type 'llama'; supported are clip"):
        assemble(str(parts / "llama"), str(parts / "llama"), tmp_path)
    both = recipes.vlm_align().model
    assert "needs both" in both.replace(language="none").unsupported_reasons()[0]
    # A flag replaces what the recipe has in its place.
    assert override(recipes.vlm(), {"model": {"vision": "a"}}).model.weights == "none"
    aligned = override(recipes.vlm_align(), {"model": {"weights": "a"}}).model
    assert (aligned.vision, aligned.language) == ("none", "none")


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


def test_both_stages_from_siglip_and_qwen2(parts, tmp_path, without_ray):
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
    config = _config(recipes.vlm_align(), tmp_path, prepared, "align", own)
    reporter = Silent()
    outcome = driver.train(config, reporter)
    [line] = [text for label, text in reporter.notes if label == "model"]
    assert line.endswith(f"is a LLaVA of {own['vision']} and {own['language']}")
    [folder] = (tmp_path / "cache").glob("llava-*")
    losses, projector = _plain_loop(folder, images, config.optimizer)
    found = [line["train/loss"] for line in lines(outcome.path)]
    assert found == pytest.approx(losses, rel=1e-5)
    out = mmray.export(outcome.path, tmp_path / "out")
    net = hf.LlavaForConditionalGeneration.from_pretrained(out)
    before = hf.LlavaForConditionalGeneration.from_pretrained(folder).state_dict()
    for name, value in net.state_dict().items():
        if name in projector:
            assert torch.allclose(value, projector[name], atol=1e-6), name
        else:
            assert torch.equal(value, before[name]), name
    second = _config(recipes.vlm(), tmp_path, prepared, "second", {"weights": str(out)})
    assert driver.train(second, Silent()).result["status"] == "finished"
    assert json.loads((out / "config.json").read_text())["model_type"] == "llava"


def _plain_loop(folder, images, settings):
    """Losses of the steps, and the weights of the projector after them."""
    net = hf.LlavaForConditionalGeneration.from_pretrained(folder)
    processor = hf.AutoProcessor.from_pretrained(folder)
    net.requires_grad_(False)
    projector = net.model.multi_modal_projector.requires_grad_(True)
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
    prefix = "model.multi_modal_projector."
    return losses, {prefix + name: value for name, value in projector.state_dict().items()}
