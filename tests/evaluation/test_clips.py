"""Evaluation of clips of text, audio and video."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmray.data.store.prepared_set import PreparedSet
from mmray.evaluation.clips import ClipEvaluator
from mmray.models.build import build
from tests.data.media.test_clips import make_rows
from tests.engine import recipe_models
from tests.evaluation.test_evaluator import on_ranks
from tests.made import make_set

SPEC, _ = recipe_models.OTHER_MODELS["towers"]
SETTINGS: Any = SimpleNamespace(batch=2, limit=None)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    rows = [
        replace(row, key=f"{row.key} {number}")
        for number in range(2)
        for row in make_rows()
        if row.key not in ("broken", "two")
    ]
    folder: Path = tmp_path_factory.mktemp("clips") / "set"
    return make_set(folder, rows[:9])


@pytest.mark.parametrize("world", [2, 4, 12])
def test_scores_do_not_depend_on_the_number_of_ranks(prepared: PreparedSet, world: int) -> None:
    """The ranks have different numbers of batches, and 3 of 12 have none."""

    torch.manual_seed(3)
    model = build(SPEC, recipe_models.VOCAB, {})

    def score(group: Any) -> dict[str, float]:
        evaluator = ClipEvaluator(prepared, SPEC.inputs, prepared.tokenizer_json or "", SETTINGS)
        return evaluator.score(copy.deepcopy(model), group, None, 0)

    (alone,) = on_ranks(1, score)
    assert {"recall_at_1/audio_to_text", "recall_at_1/video_to_audio"} <= alone.keys()
    for scores in on_ranks(world, score):
        assert scores == pytest.approx(alone)
