"""The recipe `sample-av`, from generated clips to embeddings of the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mmray
from mmray.errors import DataError, UsageError
from tests.made import recipe_in

DIRECTIONS = [
    f"{first}_to_{second}"
    for first in ("text", "audio", "video")
    for second in ("text", "audio", "video")
    if first != second
]


@pytest.mark.recipe
@pytest.mark.timeout(1800)  # in CI with a low priority
@pytest.mark.parametrize(
    ("steps", "recall"),
    [(100, 0.2), pytest.param(300, 0.8, marks=pytest.mark.slow)],
    ids=["a third of the steps", "all steps"],
)
def test_sample_recipe_finds_held_out_clips_in_all_directions(steps, recall, tmp_path, monkeypatch):
    """The exported model embeds clips at their spans, and its model card's example runs.

    A third of the steps finds 40 to 70 % at once; by chance it would be one of 200.
    """
    recipe = recipe_in("sample-av", tmp_path)
    run = mmray.train(recipe.replace(train=recipe.train.replace(steps=steps)))
    assert (run.metrics["rows"], run.metrics["bad_rows"]) == (200, 0)
    assert all(run.metrics[f"recall_at_1/{direction}"] >= recall for direction in DIRECTIONS)
    model = mmray.load(mmray.export(run.path, tmp_path / "out"))
    [source] = (tmp_path / "cache" / "sample-av-source").rglob("*.jsonl")
    rows = [json.loads(line) for line in source.read_text().splitlines()][-6:]
    files = [source.parent / row["video"] for row in rows]
    spans = [(row["texts"][0]["t0_s"], row["texts"][0]["t1_s"]) for row in rows]
    text = model.embed_texts([row["texts"][0]["text"] for row in rows])
    for embed in (model.embed_audio, model.embed_video):
        media = embed(files, spans)
        assert media.shape == text.shape == (6, 64)
        assert (media.norm(dim=1) - 1).abs().max() < 1e-5
        assert (media - embed(files)).abs().max() > 1e-3  # the span decides
    with pytest.raises(DataError, match="file 1"):
        model.embed_audio([files[0].read_bytes(), b"no media"])
    with pytest.raises(DataError, match=r"span 5 to 9 s is not in the file, which is at 0.00 to"):
        model.embed_audio(files[:1], [(5.0, 9.0)])
    with pytest.raises(UsageError, match="spans: 1 for 2 files"):
        model.embed_video(files[:2], [(0.0, 1.0)])
    card = (tmp_path / "out" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("clip.mp4").write_bytes(files[0].read_bytes())
    called: dict[str, Any] = {}
    exec(card.split("```python")[1].split("```")[0], called)
    audio = model.embed_audio(["clip.mp4"], [(0.0, 1.3)])
    expected = audio @ model.embed_texts(["a red circle"]).T
    assert (called["scores"] - expected).abs().max() < 1e-6
