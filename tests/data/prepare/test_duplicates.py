"""Deduplication: equal to a plain search with dictionaries, in any number of parts."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from mmray.data.formats.source import SourceChunk
from mmray.data.prepare import duplicates
from mmray.data.prepare.duplicates import (
    NO_ROW,
    SAME_CONTENT,
    SAME_KEY,
    Digests,
    caption_fields,
    find_duplicates,
)
from mmray.data.prepare.records import SCHEMA, PackedRows, Record, record_path, write_records
from mmray.data.store.shard_table import Shard

SPLITS = ("train", "test", None)
DIGESTS = ("key_digest", "image_digest", "row_digest", "text_digest")


def packed_rows(out, seed, count, most):
    """Rows of three files of records, whose digests have `most` values; some are bad."""
    rng = np.random.default_rng(seed)
    (out / "parts").mkdir(parents=True)
    records = []
    for number, size in enumerate((count // 2, 0, count - count // 2)):
        shard = rng.integers(-1, 3, size)
        columns = dict.fromkeys(SCHEMA.names, [None] * size)
        columns |= {"shard": [None if each < 0 else each for each in shard.tolist()]}
        columns |= {"reason": ["blank" if each < 0 else None for each in shard.tolist()]}
        columns["position"] = [int((shard[:n] == each).sum()) for n, each in enumerate(shard)]
        for name in DIGESTS:
            values = rng.integers(0, most, size)
            columns[name] = [int(each).to_bytes(2, "little") * 8 for each in values]
        shards = [
            Shard(f"{number}-{n}", split, int((shard == n).sum()), 0, "")
            for n, split in enumerate(SPLITS)
        ]
        chunk = SourceChunk(number, "rows", 0, size, 1, size, "")
        bad = {"blank": int((shard < 0).sum())}
        file = record_path(number)
        record = Record("", chunk, [], shards, size, bad, [], [], {}, None, {}, False, file)
        batch = pa.RecordBatch.from_pydict(columns, SCHEMA)
        write_records(out, record.file, [record], [batch])
        records.append(record)
    return PackedRows(out, records)


def all_rows(packed):
    """(number, split, digests) of each good row."""
    rows = []
    for start, record in zip(packed.starts, packed.records, strict=False):
        with pa.ipc.open_file(str(packed.out / record.file)) as reader:
            for index, row in enumerate(reader.get_batch(0).to_pylist()):
                if row["shard"] is not None:
                    rows.append((int(start) + index, SPLITS[row["shard"]], row))
    return rows


def plain_duplicates(packed, rule):
    """(row, row that it duplicates, reason) row by row, held-out rows first."""
    found = {}
    by_key, by_content = {}, {}
    content = "row_digest" if rule == "row" else "image_digest"
    ordered = sorted(all_rows(packed), key=lambda each: (each[1] != "test", each[0]))
    for row, _, digests in ordered:
        key, image = (digests[name] for name in ("key_digest", content))
        original, code = row, SAME_KEY
        if rule != "keep":
            original = by_key.setdefault(key, row)
        if original == row and rule != "keep":
            original, code = by_content.get(image, row), SAME_CONTENT
        if original == row:
            by_content.setdefault(image, row)
        else:
            found[row] = (original, code)
    return [(row, *found[row]) for row in sorted(found)]


@pytest.mark.parametrize("rule", ["image", "row", "keep"])
def test_duplicates_equal_those_of_a_plain_search(tmp_path, monkeypatch, rule):
    monkeypatch.setattr(duplicates, "MAX_SORTED_ROWS", 5)
    for seed in range(20):
        packed = packed_rows(tmp_path / f"{seed}", seed, count=seed * 3, most=4 + 3 * seed)
        digests = Digests(packed, rule)
        found = find_duplicates(digests, rule)
        expected = plain_duplicates(packed, rule)
        assert list(zip(found.rows, found.originals, found.reasons, strict=True)) == expected
        shards = packed.without(packed.select(found.rows))
        kept = [each for each in all_rows(packed) if each[0] not in found.rows]
        texts = [digests["text_digest"] for _, _, digests in kept]
        fields = caption_fields(digests, found.rows, shards)
        assert fields["num_same_text"] == len(kept) - len(set(texts))
        assert fields["same_text_share"] == plain_share(kept, shards)
        digests.close()
        assert not list((tmp_path / f"{seed}").glob("parts/*.unfinished"))


def plain_share(kept, shards):
    """Share of the pairs of kept rows of each split with equal captions, pair by pair."""
    shares = {}
    for split in {shard.split for shard in shards}:
        texts = [
            digests["text_digest"]
            for _, own, digests in kept
            if (own or ("train" if any(shard.split for shard in shards) else None)) == split
        ]
        pairs = [first == second for first, second in itertools.permutations(texts, 2)]
        if any(pairs):
            shares[split or ""] = sum(pairs) / len(pairs)
    return shares


def test_dropped_rows_are_found_by_number_and_by_position(tmp_path):
    packed = packed_rows(tmp_path, 0, count=60, most=90)
    numbers = np.array([row for row, *_ in all_rows(packed)])[::3]
    rows = packed.select(numbers)
    shards, positions = (np.asarray(rows[name]) for name in ("shard", "position"))
    assert packed.row_numbers(shards, positions).tolist() == numbers.tolist()
    dropped = [shard.num_rows - shard.num_kept for shard in packed.without(rows)]
    assert dropped == np.bincount(shards, minlength=9).tolist()
    assert packed.select().num_rows == packed.num_bad == 60 - len(all_rows(packed))
    assert NO_ROW not in rows["shard"].to_pylist()
