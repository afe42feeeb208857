"""Sample set: deterministic bytes, a test split of unseen combinations, and known damaged rows."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from mmray.data.images.decode import BadImage, decode
from mmray.data.prepare import sample
from mmray.errors import UsageError


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory) -> Path:
    return sample.draw(tmp_path_factory.mktemp("sample"))


def _rows(jsonl: Path) -> list[dict]:
    """The well-formed lines of undamaged rows."""
    lines = [line for line in jsonl.read_text().splitlines() if line.endswith("}")]
    return [row for row in map(json.loads, lines) if not row["id"].startswith("damaged")]


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = hashlib.sha256()
    for path in files:
        whole.update(str(path.relative_to(folder)).encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sample, "NUM_TRAIN", 20)
    monkeypatch.setattr(sample, "NUM_TEST", 10)


def test_sample_depends_only_on_the_seed(small, tmp_path):
    one, other = (sample.draw(tmp_path, seed=seed).parent for seed in (0, 1))
    assert other != one and _digest(other) != _digest(one)
    assert _digest(sample.draw(tmp_path / "again").parent) == _digest(one)


def test_existing_sample_is_reused(small, tmp_path):
    jsonl = sample.draw(tmp_path)
    jsonl.write_text("mark")
    assert sample.draw(tmp_path) == jsonl and jsonl.read_text() == "mark"


def test_interrupted_sample_leaves_no_set(small, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UsageError, match=r"No space left on device.*data\.cache"):
        patch.setattr(sample, "_damaged", full)
        sample.draw(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert sample.draw(tmp_path).exists()


def test_concurrent_sample_writers_are_accepted(small, tmp_path, monkeypatch):
    draw_all = sample._draw_all

    def draw_after_another(folder, seed):
        monkeypatch.setattr(sample, "_draw_all", draw_all)
        sample.draw(tmp_path, seed)  # another process
        draw_all(folder, seed)

    monkeypatch.setattr(sample, "_draw_all", draw_after_another)
    assert sample.draw(tmp_path).exists() and [path.name for path in tmp_path.iterdir()] == ["v1-seed0"]


def test_test_combinations_are_not_in_train_but_their_parts_are():
    train, test = sample.scenes(seed=0)
    assert (len(train), len(test)) == (sample.NUM_TRAIN, sample.NUM_TEST)
    assert len(set(test)) == len(test) >= 500
    assert not set(train) & set(test)
    for part in ("shape", "colour", "size", "where", "background"):
        seen = Counter(getattr(scene, part) for scene in train)
        assert {getattr(scene, part) for scene in test} <= set(seen)
        assert min(seen.values()) > 200


def test_splits_follow_scenes_and_test_captions_are_unique(jsonl):
    rows = _rows(jsonl)
    train, test = sample.scenes(seed=0)
    captions = {"train": {c for scene in train for c in scene.captions()}}
    captions["test"] = {c for scene in test for c in scene.captions()}
    assert not captions["train"] & captions["test"]
    assert Counter(row["split"] for row in rows) == {"train": sample.NUM_TRAIN, "test": sample.NUM_TEST}
    assert all(set(row["texts"]) <= captions[row["split"]] for row in rows)
    assert {len(row["texts"]) for row in rows} == {1, 2, 3}
    gallery = Counter(text for row in rows if row["split"] == "test" for text in row["texts"])
    assert max(gallery.values()) == 1


def test_images_differ_and_have_both_formats_and_many_sizes(jsonl):
    rows = _rows(jsonl)
    files = [jsonl.parent / row["image"] for row in rows]
    assert len({path.read_bytes() for path in files}) == len({row["id"] for row in rows}) == len(rows)
    images = [Image.open(path) for path in files[:200]]
    assert {image.format for image in images} == {"JPEG", "PNG"}
    assert {image.size for image in images} == set(sample.CANVASES)


@pytest.mark.parametrize("where", [*sample.CENTRES, *sample.COUNTS])
def test_shapes_match_the_caption(where):
    scene = sample.Scene("circle", "red", "small", where, "white")
    image = sample._draw_scene(scene, random.Random(3))
    width, height = image.size

    def is_red(corner):
        x, y = sample.CENTRES[corner]
        red, green, _ = image.getpixel((round(x * width), round(y * height)))
        return red - green > 100

    shown = {corner for corner in sample.CENTRES if is_red(corner)}
    assert len(shown) == sample.COUNTS.get(where, 1)
    assert "centre" not in shown if where in sample.COUNTS else shown == {where}


def test_sample_has_one_damaged_row_of_each_kind(jsonl):
    images, whole = jsonl.parent / "images", {row["image"] for row in _rows(jsonl)}
    lines = jsonl.read_text().splitlines()
    assert sum(not line.endswith("}") for line in lines) == 1
    damaged = [json.loads(line) for line in lines if line.startswith('{"id": "damaged')]
    kinds = ("truncated", "empty", "web-page", "flipped-byte", "missing", "blank-caption", "duplicate")
    assert tuple(row["id"].removeprefix("damaged-") for row in damaged) == kinds
    assert not (images / "missing.jpg").exists()
    for name in ("truncated.jpg", "empty.jpg", "web-page.jpg", "flipped-byte.png"):
        with pytest.raises(BadImage):  # Pillow does not fail for every flipped byte, but the checksum of the chunk does
            decode((images / name).read_bytes())
    by_id = {row["id"]: row for row in damaged}
    assert not by_id["damaged-blank-caption"]["texts"][0].strip()
    assert by_id["damaged-duplicate"]["image"] in whole
