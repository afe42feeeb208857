"""Deduplication: equal to a plain search with dictionaries, and about 20 bytes of memory for
a row.
"""

import itertools
import tracemalloc
from dataclasses import asdict

import numpy as np
import pytest

from mmray.data.prepare import assemble
from mmray.data.prepare.assemble import (
    NO_ROW,
    SAME_CONTENT,
    SAME_KEY,
    SAME_TEXT,
    PackedRows,
    caption_fields,
    find_duplicates,
)
from mmray.data.store.shard_table import Shard

SPLITS = ("train", "test", None)


def packed_rows(seed, count, most):
    """Rows whose digests have `most` values."""
    rng = np.random.default_rng(seed)
    keys, contents, texts = (
        rng.integers(0, most, (count, 1), np.uint64) * [1, 7 << 40] for _ in range(3)
    )
    shard_of = rng.integers(0, 3, count).astype(np.int32)
    sizes = np.bincount(shard_of, minlength=3).tolist()
    shards = [Shard(f"{n}", split, sizes[n], 0, "") for n, split in enumerate(SPLITS)]
    return PackedRows(
        *(each.astype(np.uint64) for each in (keys, contents, texts)), shard_of, shards, 0
    )


def plain_duplicates(packed, rule):
    """(row that each row duplicates, reason) row by row, held-out rows first."""
    count = len(packed.keys)
    keys, contents, texts = (
        [bytes(each) for each in column] for column in (packed.keys, packed.contents, packed.texts)
    )
    duplicate_of, reason = [NO_ROW] * count, [0] * count
    by_key, by_content, by_text = {}, {}, {}
    for row in sorted(range(count), key=lambda row: (SPLITS[packed.shard_of[row]] != "test", row)):
        original, code = row, SAME_KEY
        if rule != "keep":
            original = by_key.setdefault(keys[row], row)
        if original == row and rule != "keep":
            original, code = by_content.get(contents[row], row), SAME_CONTENT
            if original == row and rule == "text":
                original, code = by_text.get(texts[row], row), SAME_TEXT
        if original == row:
            by_content.setdefault(contents[row], row)
            by_text.setdefault(texts[row], row)
        else:
            duplicate_of[row], reason[row] = original, code
    kept = [row for row in range(count) if duplicate_of[row] == NO_ROW]
    return duplicate_of, reason, len(kept) - len({texts[row] for row in kept})


@pytest.mark.parametrize("rule", ["image", "row", "text", "keep"])
def test_duplicates_equal_those_of_a_plain_search(monkeypatch, rule):
    monkeypatch.setattr(assemble, "MAX_SORTED_ROWS", 5)
    for seed in range(30):
        packed = packed_rows(seed, count=seed * 3, most=4 + 3 * seed)
        found = find_duplicates(packed, rule)
        duplicate_of, reason, num_same_text = plain_duplicates(packed, rule)
        assert found.duplicate_of.tolist() == duplicate_of and found.reason.tolist() == reason
        shards = packed.without(found.dropped)
        fields = caption_fields(packed, found.dropped, shards)
        assert fields["num_same_text"] == num_same_text
        assert fields["same_text_share"] == plain_share(packed, found.dropped, shards)


def plain_share(packed, dropped, shards):
    """Share of the pairs of kept rows of each split with equal captions, pair by pair."""
    shares = {}
    for split in {shard.split for shard in shards}:
        texts = [
            bytes(text)
            for text, shard, drop in zip(packed.texts, packed.shard_of, dropped, strict=True)
            if shards[shard].split == split and not drop
        ]
        pairs = [first == second for first, second in itertools.permutations(texts, 2)]
        if any(pairs):
            shares[split or ""] = sum(pairs) / len(pairs)
    return shares


@pytest.mark.parametrize(("rule", "most_bytes"), [("image", 22), ("text", 40)])
def test_memory_of_a_row_is_bounded(tmp_path, monkeypatch, rule, most_bytes):
    """The digests are in files, and a part of them is sorted at a time."""
    rng, count, size = np.random.default_rng(0), 60_000, 2000

    def iter_chunk_records(*_):
        for start in range(0, count, size):
            columns = {
                name: [rng.bytes(16).hex() for _ in range(size)]
                for name in ("image_digest", "text_digest")
            }
            keys = [f"k{row}" for row in range(start, start + size)]
            yield (
                start,
                {
                    "rows": columns | {"key": keys, "shard": [0] * size, "language": [None] * size},
                    "shards": [asdict(Shard(f"{start}", None, size, 1, ""))],
                    "bad_rows": [],
                    "notices": {},
                },
            )

    monkeypatch.setattr(assemble, "iter_chunk_records", iter_chunk_records)
    monkeypatch.setattr(assemble, "MAX_SORTED_ROWS", 600)
    packed = assemble.read_packed_rows(tmp_path, range(count // size), rule)
    tracemalloc.start()
    try:
        found = find_duplicates(packed, rule)
        assert len(packed.by_shard) == count and not found.dropped.any()
        peak = tracemalloc.get_traced_memory()[1] + packed.shard_of.nbytes
    finally:
        tracemalloc.stop()
    print(f"{rule}: {peak / count:.1f} bytes per row")
    assert isinstance(packed.keys, np.memmap) and peak < most_bytes * count
