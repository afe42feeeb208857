"""Contamination: exact and near matches in other sets and splits are counted, listed and
quarantined.
"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmray.config import Prepare
from mmray.data.prepare import contamination, map_shards
from mmray.data.prepare import pipeline as prepare_module
from mmray.data.prepare.assemble import NO_ROW
from mmray.data.prepare.contamination import (
    EXACT,
    IMAGE_HASH_DTYPE,
    MAX_COLOR_DISTANCE,
    ImageIndex,
    perceptual_hash,
)
from mmray.data.prepare.pipeline import prepare
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from tests.data.prepare.test_pipeline import quarantine, run_here
from tests.made import encode

LAX = Prepare(max_bad_fraction=0.0, rows_per_shard=4, vocab_size=100)


@pytest.fixture
def in_process(monkeypatch):
    """Run without Ray; the fixture lists the shards that were hashed."""
    hashed = []

    def tasks(work, items, **_):
        hashed.extend(shard.file for item in items for shard in item)
        yield from map(work, items)

    # the images of these tests have little but noise
    monkeypatch.setattr(contamination, "PHASH_DISTANCE", 20)
    monkeypatch.setattr(prepare_module, "map_tasks", run_here)
    monkeypatch.setattr(contamination, "map_tasks", run_here)
    monkeypatch.setattr(map_shards, "map_tasks", tasks)
    return hashed


def patches_image(number):
    """An image of colored patches, different for each number."""
    patches = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((96, 96), Image.Resampling.BICUBIC)


def make_source(folder, images, splits=None):
    """JSONL of these encoded images; returns its path."""
    folder.mkdir()
    with (folder / "rows.jsonl").open("w") as file:
        for number, data in enumerate(images):
            (folder / f"{number}.img").write_bytes(data)
            row = {
                "id": f"{folder.name}{number}",
                "image": f"{number}.img",
                "text": f"row {number}",
            }
            file.write(json.dumps(row | ({"split": splits[number]} if splits else {})) + "\n")
    return str(folder / "rows.jsonl")


@pytest.fixture
def two(tmp_path, in_process):
    """A prepared evaluation set of 6 rows, and a source of 10 with two exact and two re-encoded
    copies of it.
    """
    seen = [encode(patches_image(number)) for number in range(6)]
    prepare(make_source(tmp_path / "e", seen), str(tmp_path / "eval"), LAX)
    images = [encode(patches_image(number)) for number in range(20, 30)]
    images[2], images[7] = seen[4], seen[0]
    images[3] = encode(patches_image(1).resize((64, 64)), "JPEG", quality=75)
    images[9] = encode(patches_image(5).resize((150, 150)), "WEBP", quality=80)
    return make_source(tmp_path / "t", images), str(tmp_path / "eval")


def leaks_in(out):
    return [json.loads(line) for line in (out / "leaks.jsonl").read_text().splitlines()]


def test_leaks_are_counted_named_and_shown(tmp_path, two):
    source, eval_set = two
    manifest = prepare(
        source, str(tmp_path / "out"), LAX.model_copy(update={"check_contamination": (eval_set,)})
    )
    assert manifest.num_rows == 10
    assert manifest.leakage == {
        "exact": 2, "near": 2, "phash_distance": 20, "dropped": False,
        "found_in": {eval_set: 4, "splits": 0}
    }  # fmt: skip
    lines = leaks_in(tmp_path / "out")
    assert [(line["key"], line["other"]) for line in lines] == [
        ("t2", "e4"),
        ("t3", "e1"),
        ("t7", "e0"),
        ("t9", "e5"),
    ]
    assert [line["bits"] is None for line in lines] == [True, False, True, False]


def test_leaks_are_quarantined_and_other_rows_kept(tmp_path, two, in_process):
    source, eval_set = two
    settings = LAX.model_copy(update={"check_contamination": (eval_set,)})
    prepare(source, str(tmp_path / "out"), settings)
    in_process.clear()
    settings = settings.model_copy(update={"drop_overlap": True})
    manifest = prepare(source, str(tmp_path / "out"), settings)
    assert in_process == []  # no image is hashed again
    assert (manifest.num_rows, manifest.num_quarantined, manifest.reasons) == (6, 4, {"overlap": 4})
    assert PreparedSet.open(str(tmp_path / "out")).keys() == ["t0", "t1", "t4", "t5", "t6", "t8"]
    faults = {fault["source"]: fault["detail"] for fault in quarantine(tmp_path / "out")}
    assert list(faults) == [f"rows.jsonl:{number + 1}" for number in (2, 3, 7, 9)]
    assert faults["rows.jsonl:3"] == f"same image as row e4 of {eval_set}"
    assert "near-duplicate (" in faults["rows.jsonl:4"]


def test_training_row_is_the_leak_between_splits(tmp_path, in_process):
    images = [encode(patches_image(number)) for number in range(8)]
    images[6] = encode(patches_image(1), "JPEG", quality=80)  # of test, after its copy in train
    images[2] = encode(patches_image(7), "JPEG", quality=80)  # of train, before its copy in test
    images[5] = encode(patches_image(3), "JPEG", quality=80)  # both in train: no leak
    source = make_source(tmp_path / "s", images, splits=["train"] * 6 + ["test"] * 2)
    manifest = prepare(source, str(tmp_path / "out"), LAX.model_copy(update={"drop_overlap": True}))
    assert manifest.splits == {"train": 4, "test": 2}
    assert [fault["key"] for fault in quarantine(tmp_path / "out")] == ["s1", "s2"]
    assert manifest.leakage["found_in"] == {"splits": 2}


def test_invalid_comparisons_are_refused(tmp_path, two, monkeypatch):
    source, eval_set = two
    with pytest.raises(UsageError, match="is the set that is being prepared"):
        prepare(source, eval_set, LAX.model_copy(update={"check_contamination": (eval_set,)}))
    with pytest.raises(DataError, match="not a prepared set"):
        prepare(
            source,
            str(tmp_path / "out"),
            LAX.model_copy(update={"check_contamination": (str(tmp_path / "t"),)}),
        )
    monkeypatch.setattr(contamination, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'mmray\[leakage\]'"):
        prepare(
            source,
            str(tmp_path / "out"),
            LAX.model_copy(update={"check_contamination": (eval_set,)}),
        )


def random_hashes(rng, count, base=None):
    """Hashes that are often near each other: a few centers with some bits flipped and some colors
    moved.
    """
    out = np.zeros(count, IMAGE_HASH_DTYPE)
    centers = base if base is not None else rng.integers(0, 2**63, (4, 4), dtype=np.uint64)
    out["phash"] = centers[rng.integers(0, len(centers), count)]
    for _ in range(12):
        word, bit, turned = (
            rng.integers(0, 4, count),
            rng.integers(0, 64, count),
            rng.random(count) < 0.6,
        )
        out["phash"][np.flatnonzero(turned), word[turned]] ^= np.uint64(1) << bit[turned].astype(
            np.uint64
        )
    out["colors"] = 100 + rng.integers(0, 3, (count, 1)) * 4
    out["has_phash"] = rng.random(count) < 0.9
    out["sha256"] = rng.integers(0, 60, (count, 1))
    return out


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(0, 40), st.integers(0, 31))
def test_index_finds_the_match_of_all_pairs(seed, num_queries, num_references, most_bits):
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 2**63, (3, 4), dtype=np.uint64)
    queries, references = (
        random_hashes(rng, num_queries, base),
        random_hashes(rng, num_references, base),
    )
    index, bits = ImageIndex(references, most_bits).search(queries)
    for number, query in enumerate(queries):
        best = (257, NO_ROW)
        for place, reference in enumerate(references):
            differ = int(np.bitwise_count(query["phash"] ^ reference["phash"]).sum())
            apart = np.abs(query["colors"].astype(int) - reference["colors"]).mean()
            if (query["sha256"] == reference["sha256"]).all():
                best = min(best, (EXACT, place))
            elif (
                query["has_phash"]
                and reference["has_phash"]
                and differ <= most_bits
                and apart <= MAX_COLOR_DISTANCE
            ):
                best = min(best, (differ, place))
        assert (index[number], bits[number]) == (
            (best[1], best[0]) if best[1] != NO_ROW else (NO_ROW, EXACT)
        )


def test_equal_hashes_are_compared_once():
    pages = np.zeros(10_000, IMAGE_HASH_DTYPE)
    pages["has_phash"] = True
    pages["sha256"] = 1 + np.arange(20_000).reshape(-1, 2)
    index, bits = ImageIndex(pages[:5000], 7).search(pages[5000:])
    assert not index.any() and not bits.any()


def test_images_of_different_color_do_not_match():
    red, blue = (
        perceptual_hash(Image.new("RGB", (32, 32), color)) for color in ((200, 0, 0), (0, 0, 200))
    )
    assert np.array_equal(red[0], blue[0])
    both = np.zeros(2, IMAGE_HASH_DTYPE)
    both["phash"], both["colors"], both["has_phash"] = [red[0], blue[0]], [red[1], blue[1]], True
    both["sha256"][1] = 1
    assert ImageIndex(both[1:], 7).search(both[:1])[0].tolist() == [NO_ROW]


def test_unreadable_shard_is_an_error(tmp_path, in_process):
    images = [encode(patches_image(number)) for number in range(4)]
    other = prepare(make_source(tmp_path / "other", images), str(tmp_path / "eval"), LAX)
    (tmp_path / "eval" / other.shards[0].file).write_bytes(b"gone")
    wanted = LAX.model_copy(update={"check_contamination": (str(tmp_path / "eval"),)})
    with pytest.raises(DataError, match="cannot hash"):
        prepare(make_source(tmp_path / "mine", images), str(tmp_path / "out"), wanted)
