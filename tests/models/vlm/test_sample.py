"""The recipe `sample-vlm`, from generated images to answers of the exported model."""

from __future__ import annotations

import json

from PIL import Image

import mmray
from mmray.config import recipes


def test_sample_recipe_learns_to_answer_held_out_questions(tmp_path):
    """About 0 to 3 images a row; the exported model answers the same."""
    config = recipes.sample_vlm()
    config = config.replace(
        data=config.data.replace(cache=str(tmp_path / "cache")),
        run=config.run.replace(storage=str(tmp_path), name="run"),
    )
    run = mmray.train(config)
    assert run.metrics["exact_match"] >= 0.9
    assert (run.metrics["answered"], run.metrics["bad_rows"]) == (200, 0)
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
