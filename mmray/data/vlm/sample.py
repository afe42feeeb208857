"""The sample set of conversations, and the tiny model that learns it: nothing is downloaded.

Images of one shape, and rows with 0 to 3 of them: rows of text alone, several images in a message,
and several turns. Each question has one short answer, so exact match measures what was learned.
"""

from __future__ import annotations

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmray.data.prepare.sample import COLORS, draw_shape, tinted, write_once

VERSION = "v2"  # change it if the files change; it is a folder name
NUM_TRAIN = 2400
NUM_TEST = 200
SIDE = 64
SHAPES = ("circle", "square", "triangle", "cross")
NUMBERS = ("zero", "one", "two", "three")
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
PAD = "<|endoftext|>"
IMAGE = "<|image_pad|>"
VIDEO = "<|video_pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>"
    "{% endgeneration %}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def generate_conversations(out: Path) -> Path:
    """Return the JSONL file of the sample conversations, which are generated if they do not exist.

    Args:
        out: Folder in which the set gets a folder named by its version, such as `v2`.

    Raises:
        UsageError: `out` is not writable.
    """
    return write_once(out / VERSION / "sample-vlm.jsonl", _write_conversations)


def generate_model(out: Path) -> Path:
    """Return a folder with the config and processor of a Qwen3-VL of 0.5 million parameters.

    It has no weights, so a run starts with random ones.

    Args:
        out: Folder in which the model gets a folder named by its version, such as `v2`.

    Raises:
        UsageError: `out` is not writable.
    """
    return write_once(out / VERSION / "config.json", _write_model).parent


def _write_conversations(folder: Path) -> None:
    (folder / "images").mkdir()
    # Each three words are in one row at most, because rows without images may be equal.
    words = list(permutations((*SHAPES, *COLORS, *NUMBERS), 3))
    random.Random("words").shuffle(words)
    lines = []
    for number in range(NUM_TRAIN + NUM_TEST):
        draw = random.Random(f"conversation {number}")
        scenes = [
            (draw.choice(SHAPES), draw.choice(tuple(COLORS))) for _ in range(draw.randrange(4))
        ]
        names = []
        for index, scene in enumerate(scenes):
            names.append(f"images/{number:05d}-{index}.png")
            _draw(*scene, draw).save(folder / names[-1])
        row = {
            "id": f"conversation-{number:05d}",
            "images": names,
            "messages": _conversation(scenes, "" if scenes else " ".join(words.pop()), draw),
            "split": "train" if number < NUM_TRAIN else "test",
        }
        lines.append(json.dumps(row))
    (folder / "sample-vlm.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _draw(shape: str, color: str, draw: random.Random) -> Image.Image:
    size = 2 * SIDE
    image = Image.new("RGB", (size, size), tinted((245, 245, 245), draw))
    x = size * draw.uniform(0.47, 0.53)
    y = size * draw.uniform(0.47, 0.53)
    radius = size * draw.uniform(0.3, 0.36)
    draw_shape(ImageDraw.Draw(image), shape, (x, y), radius, tinted(COLORS[color], draw), 0.0)
    return image.reduce(2)


def _conversation(
    scenes: list[tuple[str, str]], words: str, draw: random.Random
) -> list[dict[str, Any]]:
    """Return the messages about the shapes and colors of images, or without any about words."""
    if not scenes:
        return _turn([], f"Say {words}.", words)
    if draw.random() < 0.5:
        # All images in the first message; the questions are about all of them.
        parts = [{"type": "image"} for _ in scenes]
        messages = _turn(parts, "How many images?", NUMBERS[len(scenes)])
        shape, color = scenes[-1]
        return messages + draw.choice(
            (_turn([], "Last shape?", shape), _turn([], "Last color?", color))
        )
    messages = []
    for shape, color in scenes:
        image = [{"type": "image"}]
        messages += draw.choice((_turn(image, "Shape?", shape), _turn(image, "Color?", color)))
    return messages


def _turn(images: list[dict[str, Any]], question: str, answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [*images, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def _write_model(folder: Path) -> None:
    """Write what transformers would save, without importing it: it takes seconds."""
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": "<|im_end|>",
        },
        "processor_config.json": _processor_config(),
        "config.json": _model_config(tokenizer),
    }
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2))


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    draw = random.Random("words")
    texts = [
        part["text"]
        for _ in range(200)
        for scenes in ([], [("circle", "red")] * 2)
        for message in _conversation(scenes, "red", draw)
        for part in message["content"]
        if part["type"] == "text"
    ]
    texts += [*SHAPES, *COLORS, *NUMBERS, "user\n", "assistant\n"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = [PAD, *SPECIAL_TOKENS, IMAGE, VIDEO]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def _model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the config.json of a Qwen3-VL of 0.5 million parameters."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 96,
        "initializer_range": 0.1,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    vision = {
        "model_type": "qwen3_vl_vision",
        "depth": 2,
        "hidden_size": 64,
        "initializer_range": 0.1,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 16,
        "out_hidden_size": 96,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "video_token_id": tokenizer.token_to_id(VIDEO),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": True,
    }


def _processor_config() -> dict[str, Any]:
    """Return the processor_config.json of a Qwen3-VL with images of 32 to 64 pixels."""
    images = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    normalization = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image_processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": images,
        **patches,
        **normalization,
    }
    video_processor = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64 * 8},
        **patches,
        **normalization,
    }
    return {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": image_processor,
        "video_processor": video_processor,
    }
