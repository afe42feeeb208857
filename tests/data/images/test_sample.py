"""Sample set: deterministic bytes, a test split of unseen combinations, and known damaged rows."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mmray.data.images import sample
from mmray.data.images.decode import BadImage, decode


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory) -> Path:
    return sample.generate(tmp_path_factory.mktemp("sample"))


def _rows(jsonl: Path) -> list[dict]:
    """The well-formed lines of undamaged rows."""
    lines = [line for line in jsonl.read_text().splitlines() if line.endswith("}")]
    return [row for row in map(json.loads, lines) if not row["id"].startswith("damaged")]


def _files(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_sample_is_the_same_in_every_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sample, "NUM_TRAIN", 20)
    monkeypatch.setattr(sample, "NUM_TEST", 10)
    one, other = (sample.generate(tmp_path / name).parent for name in ("one", "other"))
    assert _files(other) == _files(one)


def test_splits_follow_scenes_and_test_captions_are_unique(jsonl):
    rows = _rows(jsonl)
    train, test = sample.scenes()
    captions = {"train": {c for scene in train for c in scene.captions()}}
    captions["test"] = {c for scene in test for c in scene.captions()}
    assert not captions["train"] & captions["test"]
    assert Counter(row["split"] for row in rows) == {
        "train": sample.NUM_TRAIN,
        "test": sample.NUM_TEST,
    }
    assert all(set(row["texts"]) <= captions[row["split"]] for row in rows)
    assert {len(row["texts"]) for row in rows} == {1, 2, 3}
    gallery = Counter(text for row in rows if row["split"] == "test" for text in row["texts"])
    assert max(gallery.values()) == 1


def test_sample_has_one_damaged_row_of_each_kind(jsonl):
    images, whole = jsonl.parent / "images", {row["image"] for row in _rows(jsonl)}
    lines = jsonl.read_text().splitlines()
    assert sum(not line.endswith("}") for line in lines) == 1
    damaged = [
        json.loads(line) for line in lines if '"id": "damaged' in line and line.endswith("}")
    ]
    kinds = (
        "truncated",
        "empty",
        "web-page",
        "flipped-byte",
        "missing",
        "blank-caption",
        "duplicate",
    )
    assert tuple(row["id"].removeprefix("damaged-") for row in damaged) == kinds
    assert not (images / "missing.jpg").exists()
    for name in ("truncated.jpg", "empty.jpg", "web-page.jpg", "flipped-byte.png"):
        # Pillow does not fail for every flipped byte, but the checksum of the chunk does
        with pytest.raises(BadImage):
            decode((images / name).read_bytes())
    by_id = {row["id"]: row for row in damaged}
    assert not by_id["damaged-blank-caption"]["texts"][0].strip()
    assert by_id["damaged-duplicate"]["image"] in whole
