"""Evaluation batches: every row once over the ranks, all captions, unreadable rows reported and
skipped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmray.config import Evaluate, Inputs
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Row
from mmray.evaluation.batches import EvalDataset
from tests.data.images.crashing_images import deadly, decoder_dies
from tests.made import CAPTIONS, make_set, png, row

INPUTS = Inputs(image_side=8, fit="squash", interpolation="bilinear", max_tokens=16)


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedSet:
    """23 rows with one to three captions each; row 5 is not an image, row 6 was changed after
    prepare.
    """
    rows = [row(number, texts=CAPTIONS[: 1 + number % 3]) for number in range(23)]
    rows[5] = row(5, data=b"nothing")
    rows[6].media[0].sha256 = "0" * 64
    return make_set(tmp_path / "set", rows)


def data_of(prepared: PreparedSet, batch: int = 4) -> EvalDataset:
    settings = Evaluate(batch=batch)
    return EvalDataset(prepared, INPUTS, prepared.tokenizer_json or "", settings, max_pixels=1000)


@pytest.mark.parametrize("world", [1, 2, 3, 30])
@pytest.mark.parametrize("limit", [None, 10])
def test_every_row_once(prepared: PreparedSet, world: int, limit: int | None) -> None:
    data = data_of(prepared)
    seen: list[int] = []
    faults: list[str] = []
    sizes = []
    for rank in range(world):
        rows = [n for batch in data.batches(rank, world, limit) for n in batch["row"].tolist()]
        seen += rows
        faults += data.skipped
        sizes.append(len(rows) + len(data.skipped))
    assert seen == [number for number in range(limit or 23) if number not in (5, 6)]
    assert [fault.split(":")[0] for fault in faults] == ["row 5", "row 6"]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("size", [1, 4])
def test_batches_have_all_captions_and_pixels_at_each_iteration(
    prepared: PreparedSet, size: int
) -> None:
    data = data_of(prepared, batch=size)
    for _ in range(2):
        sizes = []
        for batch in data.batches():
            rows = batch["row"].tolist()
            sizes.append(len(rows))
            assert batch["caption_row"].tolist() == [
                number for number in rows for _ in range(1 + number % 3)
            ]
            ids, num_tokens = data.encoder.encode(
                [text for n in rows for text in CAPTIONS[: 1 + n % 3]]
            )
            assert np.array_equal(batch["input_ids"].numpy(), ids)
            assert batch["attention_mask"].sum(1).tolist() == num_tokens.tolist()
            assert ((batch["attention_mask"].diff(dim=1)) <= 0).all()
            assert batch["image"].shape[1:] == (3, 8, 8)
            assert batch["image"][:, 0, 0, 0].tolist() == rows  # row N has gray level N
        # batches without readable rows are omitted
        assert sizes == ([1] * 21 if size == 1 else [4, 2, 4, 4, 4, 3])
        assert len(data.skipped) == 2


def test_image_that_kills_the_decoder_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, log = row(3, data=deadly(png(3), tmp_path / "tries")), tmp_path / "tries"
    made = make_set(tmp_path / "set", [*map(row, range(3)), bad, row(4)])
    unchecked = PreparedSet(
        made.folder, replace(made.manifest, settings={"check": "header", "image_side": 0})
    )
    with decoder_dies():
        data = data_of(unchecked, batch=2)
        for _ in range(2):
            seen = [number for batch in data.batches() for number in batch["row"].tolist()]
            assert seen == [0, 1, 2, 4]
            assert data.skipped[0].startswith(
                "row 3: decoder-crash: row-3: the decoder process was ended by"
            )
    assert len(log.read_text().splitlines()) == 1 and "row-3" in caplog.text


def test_damaged_record_skips_only_its_rows(
    prepared: PreparedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PreparedSet.read

    def damaged(self: PreparedSet, rows: np.ndarray, *options: Any) -> list[Row]:
        if 9 in rows:
            raise ValueError("shard 0, record batch 1: damaged")
        return read(self, rows, *options)

    monkeypatch.setattr(PreparedSet, "read", damaged)
    data = data_of(prepared)
    seen = [number for batch in data.batches() for number in batch["row"].tolist()]
    assert seen == [number for number in range(23) if number not in (5, 6, 9)]
    assert [fault.split(":")[0] for fault in data.skipped] == ["row 5", "row 6", "row 9"]


def test_failing_store_raises_instead_of_skipping(
    prepared: PreparedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: PreparedSet, rows: np.ndarray, *options: Any) -> list[Row]:
        raise TimeoutError("the store does not answer")

    monkeypatch.setattr(PreparedSet, "read", silent)
    with pytest.raises(TimeoutError):
        list(data_of(prepared).batches())
