"""The recipe `sample-vlm`, from generated images to answers of the exported model."""

from __future__ import annotations

import json

import pytest
from PIL import Image

import mmray
from tests.made import recipe_in


@pytest.mark.recipe
@pytest.mark.timeout(1800)  # in CI with a low priority
def test_sample_recipe_learns_to_answer_held_out_questions(tmp_path):
    """About 0 to 3 images a row; the exported model answers the same."""
    run = mmray.train(recipe_in("sample-vlm", tmp_path))
    assert run.metrics["exact_match"] >= 0.9
    assert (run.metrics["answered"], run.metrics["bad_rows"]) == (200, 0)
    # Next to the generated answers.
    assert 'class="image" src="data:image/webp' in (run.path / "report.html").read_text()
    model = mmray.load(mmray.export(run.path, tmp_path / "out"))
    [source] = (tmp_path / "cache" / "sample-vlm-source").rglob("*.jsonl")
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    several = [row for row in rows if row["split"] == "test" and len(row["images"]) == 3][:8]
    answers = model.answer(
        [row["messages"][:-1] for row in several],
        [[Image.open(source.parent / name) for name in row["images"]] for row in several],
    )
    expected = [row["messages"][-1]["content"][0]["text"] for row in several]
    assert sum(map(str.__eq__, answers, expected)) >= 6
