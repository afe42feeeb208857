"""A run that continues the export of another with larger images and longer captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

import mmray
from mmray.cli.train import train
from mmray.config import Config
from tests.engine.single_worker import run_config
from tests.made import CAPTIONS, make_set, row

SMALL = """clip --model.image.width 16 --model.image.depth 2 --model.image.heads 2
    --model.image.patch 16 --model.text.width 16 --model.text.depth 2 --model.text.heads 2
    --model.embed-dim 8 --model.weights none --model.inputs.tokenizer trained
    --model.inputs.image-side 64 --model.inputs.max-tokens 32"""
LARGER = "clip --model.inputs.image-side 96 --model.inputs.max-tokens 77"
SHARED = """--batch.micro 4 --batch.global 8 --train.steps 2 --train.precision fp32
    --train.compile none --optimizer.warmup-steps 0 --optimizer.lr 0.01"""


def config_of(*flags: str) -> Config:
    words = [word for text in (*flags, SHARED) for word in text.split()]
    return train.parse(words)["settings"]


def test_export_of_a_continued_export_opens_in_transformers(tmp_path: Path) -> None:
    train_set = make_set(tmp_path / "set", [row(number) for number in range(22)])
    run_config(config_of(SMALL), train_set, tmp_path / "first")
    first = mmray.export(tmp_path / "first", tmp_path / "exported")
    config = config_of(LARGER, f"--model.weights {first}")
    assert config.model.inputs.tokenizer == str(first / "tokenizer.json")
    run_config(config, train_set, tmp_path / "second")
    second = mmray.export(tmp_path / "second", tmp_path / "larger")
    net: Any = AutoModel.from_pretrained(second)
    assert net.config.vision_config.image_size == 96
    assert net.config.text_config.max_position_embeddings == 77
    ours = mmray.load(second)
    texts = [*CAPTIONS, "a much longer red row " * 15]
    tokens = AutoTokenizer.from_pretrained(second)(
        texts, padding=True, truncation=True, return_tensors="pt"
    )
    assert tokens["input_ids"].shape[1] == 77
    inputs = config.model.inputs
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (inputs.mean, inputs.std))
    raw = torch.randint(0, 256, (len(texts), 3, 96, 96), dtype=torch.uint8)
    with torch.no_grad():
        outputs = net(**tokens, pixel_values=(raw / 255 - mean) / std)
        images = ours.model.embed_image(raw)
    torch.testing.assert_close(outputs.image_embeds, images, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.text_embeds, ours.embed_texts(texts), rtol=0, atol=1e-5)
