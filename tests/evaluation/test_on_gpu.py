"""Evaluation on a real or simulated GPU: same scores as on a CPU."""

from __future__ import annotations

import pytest
import torch

from mmray.engine.collectives import Group
from mmray.evaluation.evaluator import Evaluator
from mmray.models.build import build
from mmray.objectives.contrastive import Contrastive
from tests.engine.fake_cuda import CPU, DEVICES, gpus, has_gpus
from tests.evaluation import test_evaluator
from tests.made import make_set, row
from tests.models import test_fusion

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]
TEXTS = [["a red circle", "a circle"], ["a blue square on a green ground"], ["a blue ground"]]
CLASSES = {"classes": ("red circle", "blue square"), "prompts": ("{}", "a {}")}


@pytest.fixture
def prepared(tmp_path):
    """Nine rows of two classes, one of them unreadable."""
    rows = [row(number, texts=TEXTS[number % 3]) for number in range(9)]
    for number, record in enumerate(rows):
        record.label = number % 2
    rows[5] = row(5, data=b"nothing")
    return make_set(tmp_path / "set", rows)


def by_embeddings(prepared, device):
    """Scores and examples of a model with a classification head and class names."""
    torch.manual_seed(0)
    spec = test_fusion.spec_of(matching=False)
    model = build(spec, test_fusion.VOCAB).eval().double().to(device)
    settings = test_evaluator.SETTINGS.replace(**CLASSES)
    shown = []
    evaluator = Evaluator(prepared, test_fusion.INPUTS, test_fusion.TOKENIZER, settings)
    return evaluator.score(model, Group(device=device), Contrastive(), 4, shown.append), shown


def test_scores_on_gpu_equal_cpu(monkeypatch, prepared):
    plain, shown = by_embeddings(prepared, CPU)
    with gpus(monkeypatch):
        there, shown_there = by_embeddings(prepared, DEVICES[0])
    assert there == pytest.approx(plain, rel=1e-5 if has_gpus() else 1e-9)  # norms in float32
    assert shown_there == shown
    assert there["bad_rows"] == 1
