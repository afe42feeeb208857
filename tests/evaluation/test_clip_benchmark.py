"""Metrics equal those of CLIP_benchmark's functions on the same embeddings.

It is not a dependency. Install it into a folder of its own, which is then in PYTHONPATH:
`pip install --no-deps --target DIR clip-benchmark scikit-learn scipy joblib threadpoolctl narwhals
"numpy<2.4"` (its version 1.6 fails with a newer numpy).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.config import EvalSettings, Inputs
from mmray.config.prompts import prompt_sets
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.text.tokenizer import train_tokenizer
from mmray.engine.collectives import Group
from mmray.evaluation.evaluator import Evaluator
from mmray.objectives.contrastive import Contrastive
from tests.made import make_set, row

classification = pytest.importorskip("clip_benchmark.metrics.zeroshot_classification")
retrieval = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval")

CLASSES = ("red", "tench", "goldfish", "white shark", "hammerhead", "electric ray", "stingray")
INPUTS = Inputs(image_side=8, fit="squash", interpolation="bilinear", max_tokens=64)
NUM_ROWS = 60
WIDTH = 16


class Random(nn.Module):
    """A random embedding for each gray level and for each text, not normalized in `encode_*`, which
    CLIP_benchmark calls.
    """

    def encode_image(self, image: Tensor) -> Tensor:
        return torch.stack([_draw(int(pixel)) for pixel in image[:, 0, 0, 0]])

    def encode_text(self, texts: Any) -> Tensor:
        return torch.stack([_draw(*(int(token) for token in text if token)) for text in texts])

    def embed_image(self, image: Tensor) -> Tensor:
        return F.normalize(self.encode_image(image), dim=1)

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return F.normalize(self.encode_text(input_ids * attention_mask), dim=1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logit_scale": torch.ones(())}


def _draw(*numbers: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(numbers) % 2**31)
    return torch.randn(WIDTH, generator=generator)


class Loader(list):
    """Batches, and the class names where CLIP_benchmark reads them."""

    dataset = SimpleNamespace(classes=CLASSES)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    """Images with one to three captions, and labels of which one class never occurs."""
    rows = [
        replace(
            row(number, texts=[f"a {number} {part}" for part in range(1 + number % 3)]),
            label=number % (len(CLASSES) - 1),
        )
        for number in range(NUM_ROWS)
    ]
    made = make_set(tmp_path_factory.mktemp("benchmark") / "set", rows)
    return PreparedSet(made.folder, replace(made.manifest, class_names=CLASSES))


def own_metrics(prepared: PreparedSet, prompts: str) -> tuple[dict[str, float], Any]:
    settings: Any = EvalSettings(batch=7).with_prompts(prompts)
    texts = [prompt.replace("{}", name) for name in CLASSES for prompt in settings.prompts]
    texts += [text for each in prepared.read(range(NUM_ROWS)) for text in each.texts]
    evaluator = Evaluator(prepared, INPUTS, train_tokenizer(texts, 2000), settings)
    metrics = evaluator.score(Random(), Group(), Contrastive(), 10)

    def tokenize(texts: list[str]) -> Tensor:
        ids, num_tokens = evaluator.encoder.encode(texts)
        kept = torch.arange(ids.shape[1]) < torch.from_numpy(num_tokens)[:, None]
        return torch.from_numpy(ids) * kept

    return metrics, tokenize


def test_recall_equals_clip_benchmark(prepared: PreparedSet) -> None:
    metrics, tokenize = own_metrics(prepared, "simple")
    rows = prepared.read(range(NUM_ROWS))
    images = torch.arange(NUM_ROWS, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    batches = [(images[at : at + 20], [r.texts for r in rows[at : at + 20]]) for at in (0, 20, 40)]
    expected = retrieval.evaluate(Random(), batches, tokenize, "cpu", False, [1, 5, 10])
    assert 0 < expected["text_retrieval_recall@10"] < 1
    for k in (1, 5, 10):
        for way, name in (("image_to_text", "text"), ("text_to_image", "image")):
            assert metrics[f"recall_at_{k}/{way}"] == pytest.approx(
                expected[f"{name}_retrieval_recall@{k}"], abs=1e-6
            )


@pytest.mark.parametrize("prompts", ["simple", "cifar", "imagenet"])
def test_zero_shot_equals_clip_benchmark(prepared: PreparedSet, prompts: str) -> None:
    metrics, tokenize = own_metrics(prepared, prompts)
    images = torch.arange(NUM_ROWS, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    loader = Loader([(images, torch.arange(NUM_ROWS) % (len(CLASSES) - 1))])
    templates = [prompt.replace("{}", "{c}") for prompt in prompt_sets()[prompts]]
    expected = classification.evaluate(
        Random(), loader, tokenize, list(CLASSES), templates, "cpu", amp=False
    )
    assert 0 < expected["acc1"] < expected["acc5"] < 1
    for ours, theirs in (("top_1", "acc1"), ("top_5", "acc5")):
        assert metrics[f"zero_shot/{ours}"] == pytest.approx(expected[theirs], abs=1e-6)
    assert metrics["zero_shot/mean_per_class_recall"] == pytest.approx(
        expected["mean_per_class_recall"], abs=1e-6
    )


@pytest.mark.parametrize(("name", "theirs"), [("imagenet", "imagenet1k"), ("cifar", "cifar10")])
def test_prompts_are_those_of_clip_benchmark(name: str, theirs: str) -> None:
    folder = Path(classification.__file__).parents[1] / "datasets"
    templates = json.loads((folder / "en_zeroshot_classification_templates.json").read_text())
    assert {prompt.replace("{}", "{c}") for prompt in prompt_sets()[name]} == set(templates[theirs])
