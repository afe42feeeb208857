"""Token counts are computed once for each row and processor, and stored next to the set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmray.data.messages import message_text
from mmray.data.prepare import map_shards
from mmray.data.prepare import token_counts as module
from mmray.data.prepare.token_counts import NOT_COUNTED, RowCounter, token_counts
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import pack_rows
from mmray.data.store.stored_row import Row
from mmray.errors import ResourceError
from tests.made import png, row, write_set


@dataclass(frozen=True)
class Words:
    """Counts words, and an image as its height."""

    digest: str = "words"

    def build(self) -> RowCounter:
        def count(row: Row) -> int:
            if row.key == "row-3":
                raise ValueError("it cannot be encoded")
            words = [*row.texts, *map(message_text, row.messages or ())]
            return len(" ".join(words).split()) + sum(media.height for media in row.media)

        return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run without Ray; the shards that were counted."""
    shards: list[str] = []

    def run(work: Any, items: Any, **_: Any) -> Any:
        for item in items:
            yield work(item)
            shards.extend(shard.file for shard in item)

    monkeypatch.setattr(map_shards, "map_tasks", run)
    monkeypatch.setattr(module, "_COUNTERS", {})
    return shards


def make(folder: Any, num_shards: int = 3) -> PreparedSet:
    """Shards of 70 rows with one image of 10 pixels, without row 5 of each."""
    shards = []
    for shard in range(num_shards):
        rows = [row(70 * shard + number, png(number, 10)) for number in range(70)]
        shards.append((rows, None, (5,)))
    return PreparedSet.open(write_set(folder, shards))


def expected(prepared: PreparedSet) -> np.ndarray:
    rows = prepared.read(np.arange(prepared.num_rows))
    counts = [len(" ".join(row.texts).split()) + 10 for row in rows]
    return np.where([row.key == "row-3" for row in rows], NOT_COUNTED, counts)


def test_counts_are_stored_and_reused(tmp_path: Path, counted: list[str]) -> None:
    prepared = make(tmp_path)
    seen: list[tuple[int, int]] = []
    counts = token_counts(prepared, Words(), lambda *rows: seen.append(rows))
    assert np.array_equal(counts, expected(prepared)) and counts.dtype == np.uint32
    assert seen[-1] == (210, 210) and len(counted) == 3
    assert np.array_equal(token_counts(prepared, Words()), counts) and len(counted) == 3
    token_counts(prepared, Words("another processor"))
    assert len(counted) == 6


def test_killed_job_resumes_with_the_shards_that_are_missing(
    tmp_path: Path, counted: list[str]
) -> None:
    prepared = make(tmp_path)

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_counts(prepared, Words(), stop)
    counted.clear()
    assert np.array_equal(token_counts(prepared, Words()), expected(prepared))
    assert len(counted) == 2


def test_files_have_several_shards_and_a_set_that_grows_counts_new_ones(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_shards, "MAX_FILES", 2)
    counts = token_counts(make(tmp_path, 5), Words())
    [folder] = (tmp_path / "columns").iterdir()
    assert len([*folder.glob("*.arrow")]) == 2
    (folder / "index.json").unlink()  # an earlier job was killed
    larger = make(tmp_path, 7)
    assert np.array_equal(token_counts(larger, Words()), expected(larger))
    assert np.array_equal(expected(larger)[: len(counts)], counts)
    assert counted[5:] == ["shards/5.arrow", "shards/6.arrow"]


def test_counts_are_of_the_captions_that_are_used(tmp_path: Path, counted: list[str]) -> None:
    rows = [row(number, png(number, 10), texts=["one two", "three"]) for number in range(8)]
    for each in rows:
        each.text_columns = ["alt", "short"]
    prepared = PreparedSet.open(write_set(tmp_path, [(rows, None, ())]))
    for captions, words in (({"alt": 1.0}, 2), ({"short": 0.5}, 1), ({"alt": 1, "short": 3}, 3)):
        counts = token_counts(prepared.with_captions(captions), Words())
        assert counts.tolist() == [words + 10] * 3 + [NOT_COUNTED] + [words + 10] * 4
    assert len(counted) == 3
    token_counts(prepared.with_captions({"short": 7, "alt": 1}), Words())
    assert len(counted) == 3, "shares do not change counts"


def test_selections_of_rows_share_stored_counts(tmp_path: Path, counted: list[str]) -> None:
    prepared = make(tmp_path)
    counts = token_counts(prepared, Words())
    table = prepared.table.with_dropped(
        {0: pack_rows(np.arange(70), 70), 1: pack_rows(np.arange(0, 70, 2), 70)}
    )
    selected = prepared.with_shards(table)
    assert np.array_equal(token_counts(selected, Words()), expected(selected))
    assert selected.num_rows == 104 < len(counts) and len(counted) == 3


def test_counts_of_a_set_on_a_store_and_of_a_mixture(memory: str, counted: list[str]) -> None:
    sets = [make(f"{memory}/a", 1), make(f"{memory}/b", 2)]
    counts = token_counts(PreparedMixture(sets, [1.0, 2.0]), Words())
    assert np.array_equal(counts, np.concatenate([*map(expected, sets)]))


def test_folder_that_is_not_writable_is_named(tmp_path: Path, counted: list[str]) -> None:
    prepared = make(tmp_path, 1)
    (tmp_path / "columns").write_text("a file where the counts would be")
    with pytest.raises(ResourceError, match=r"cannot write the token counts of .* writable"):
        token_counts(prepared, Words())
