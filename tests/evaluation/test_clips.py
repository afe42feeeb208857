"""Evaluation of clips of text, audio and video."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmray.config import Evaluate
from mmray.data.store.prepared_set import PreparedSet
from mmray.evaluation.clips import ClipEvaluator
from mmray.models.build import build
from mmray.models.protocol import RANDOM_WEIGHTS
from tests.data.media.test_clips import make_rows
from tests.engine import recipe_models
from tests.evaluation.test_evaluator import on_ranks
from tests.made import make_set

SPEC, _ = recipe_models.OTHER_MODELS["towers"]
SETTINGS = Evaluate(batch=2)


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
    """The ranks have different numbers of batches, and 3 of 12 have none. Those of a sharded model
    call it equally often.
    """
    torch.manual_seed(3)
    model = build(SPEC, recipe_models.VOCAB, RANDOM_WEIGHTS)

    def score(group: Any) -> dict[str, float]:
        evaluator = ClipEvaluator(prepared, SPEC.inputs, prepared.tokenizer_json or "", SETTINGS)
        return evaluator.score(copy.deepcopy(model), group, None, 0)

    def score_sharded(group: Any) -> tuple[dict[str, float], int]:
        own = copy.deepcopy(model)
        own.set_reshard_after_forward = None  # FSDP2's method
        calls: list[int] = []
        own.register_forward_hook(lambda *_: calls.append(1))
        evaluator = ClipEvaluator(prepared, SPEC.inputs, prepared.tokenizer_json or "", SETTINGS)
        return evaluator.score(own, group, None, 0), len(calls)

    (alone,) = on_ranks(1, score)
    assert {"recall_at_1/audio_to_text", "recall_at_1/video_to_audio"} <= alone.keys()
    for scores in on_ranks(world, score):
        assert scores == pytest.approx(alone)
    sharded = on_ranks(world, score_sharded)
    assert {calls for _, calls in sharded} == {sharded[0][1]}
    for scores, _ in sharded:
        assert scores == pytest.approx(alone)


def test_examples_have_frames_with_times_and_sound(prepared: PreparedSet) -> None:
    torch.manual_seed(3)
    model = build(SPEC, recipe_models.VOCAB, RANDOM_WEIGHTS)
    evaluator = ClipEvaluator(prepared, SPEC.inputs, prepared.tokenizer_json or "", SETTINGS)
    saved: list[dict[str, Any]] = []
    (scores,) = on_ranks(1, lambda group: evaluator.score(model, group, None, 0, saved.append))
    [examples] = saved
    directions = {name for name in examples if "_to_" in name}
    assert directions == {
        name.partition("/")[2] for name in scores if name.startswith("median_rank/")
    }
    for direction in directions:
        for item in examples[direction]:
            correct = [answer["correct"] for answer in item["answers"]]
            assert correct[0] == (item["rank"] == 1) and len(correct) == 2
    clips = examples["clips"].values()
    assert any(clip["sound"] for clip in clips)
    times = [[frame["time_s"] for frame in clip["frames"]] for clip in clips if clip["frames"]]
    assert times and all(each == sorted(each) for each in times)
    longest = max(clip["end_s"] - clip["start_s"] for clip in clips)
    assert longest <= SPEC.inputs.clip_s + 0.001
