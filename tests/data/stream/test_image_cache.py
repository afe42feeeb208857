"""Decoded images that a data process keeps: each of a small set is decoded once, with the same
blocks.
"""

from __future__ import annotations

import numpy as np
import pytest

from mmray.config import Augment, Inputs
from mmray.data.stream import reader
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from tests.made import CAPTIONS, make_set, noisy, row

INPUTS = Inputs(image_side=16, fit="squash", interpolation="bilinear", max_tokens=12)
ROWS = 6
ALL_MB = ROWS * 3 * 16 * 16 / 1e6
PLAN = SamplePlan(num_rows=ROWS, global_batch_size=3, world_size=1, seed=1, steps=6)
POSITIONS = np.arange(3 * ROWS)  # three epochs


@pytest.fixture
def decoded(monkeypatch):
    """The images that were decoded, in order."""
    seen, read = [], reader.decode
    monkeypatch.setattr(
        reader, "decode", lambda data, *rest: seen.append(data) or read(data, *rest)
    )
    return seen


def blocks(prepared, **settings):
    reader = RowReader(prepared, INPUTS, train_tokenizer(CAPTIONS, 60), 10**6, **settings)
    return [reader.read_block(PLAN, part) for part in np.split(POSITIONS, 3)]


@pytest.fixture
def prepared(tmp_path):
    return make_set(tmp_path, [row(number, data=noisy(number)) for number in range(ROWS)])


def test_kept_images_are_decoded_once_and_give_the_same_blocks(prepared, decoded):
    plain = blocks(prepared)
    assert len(decoded) == 3 * ROWS
    decoded.clear()
    blocks(prepared, image_cache_mb=0.99 * ALL_MB)
    assert len(decoded) == 3 * ROWS, "a larger set is not kept"
    decoded.clear()
    kept = blocks(prepared, image_cache_mb=ALL_MB)
    assert sorted(decoded) == sorted(noisy(number) for number in range(ROWS))
    for mine, theirs in zip(kept, plain, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_augmented_images_are_not_kept(prepared):
    augment = Augment(crop_scale=(0.3, 0.6))
    first, second, _ = blocks(prepared, image_cache_mb=ALL_MB, augment=augment)
    by_key = [
        dict(zip(block["key"].tolist(), block["image"], strict=True)) for block in (first, second)
    ]
    assert all((by_key[0][key] != by_key[1][key]).any() for key in by_key[0])
