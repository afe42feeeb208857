"""Search for rows that repeat another one, by the digests in the records.

Tasks search the digests, each a range of their values. Those of a small set are one range, which
the driver searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmray.data.partitions import read_part, write_parts
from mmray.data.prepare.records import PackedRows, open_records
from mmray.data.rows import HELD_OUT_SPLITS
from mmray.data.store.manifest import CHUNK_RECORDS
from mmray.data.store.shard_table import Shard
from mmray.storage.paths import TEMP_SUFFIX, AnyPath
from mmray.storage.requests import parallel_map

NO_ROW = -1
MAX_SORTED_ROWS = 1 << 21  # rows that are searched at a time; about 100 bytes each
LATER = 1 << 62  # `order` of a row: its number, plus this if it is not held out
SAME_KEY = 1
SAME_CONTENT = 2
DuplicateRule = Literal["image", "row", "keep"]
_REPEATS = pa.schema([("order", pa.int64()), ("first", pa.int64()), ("reason", pa.uint8())])


# A file of records, the file for its digests, and of each record its batch, its first row and the
# splits of its shards.
_File = tuple[str, AnyPath, list[tuple[int, int, list[int]]]]


class Digests:
    """The digests of the good rows in files of `num_parts` parts, each a range of digests that a
    task searches.

    Args:
        rule: `prepare.duplicates`: with `row`, contents are images and captions, otherwise the
            images (of a conversation always with its messages).
    """

    def __init__(self, packed: PackedRows, rule: DuplicateRule) -> None:
        self.packed = packed
        self.splits = sorted({shard.split or "" for shard in packed.shards})
        self.num_parts = 1 + packed.num_rows // MAX_SORTED_ROWS
        names = ("key_digest", "row_digest" if rule == "row" else "image_digest", "text_digest")
        self._files: list[AnyPath] = []
        items: list[_File] = []
        for file, numbers in packed.by_file():
            target = packed.out / f"{CHUNK_RECORDS}/digests-{len(items)}{TEMP_SUFFIX}"
            self._files.append(target)
            items.append((file, target, [self._describe(number) for number in numbers]))
        write = partial(_write_digests, out=packed.out, names=names, num_parts=self.num_parts)
        list(packed.map(write, items))

    def _describe(self, number: int) -> tuple[int, int, list[int]]:
        """Return the record batch of a record, its first row, and the splits of its shards."""
        record = self.packed.records[number]
        splits = [self.splits.index(shard.split or "") for shard in record.shards]
        return record.batch, int(self.packed.starts[number]), splits

    def search(
        self, search: Callable[[pa.Table], Any], kind: int, dropped: np.ndarray
    ) -> list[Any]:
        """Call a picklable function with the rows of each part that are not dropped.

        Args:
            search: Called with a table of `digest`, `row` (number) and `split` (index in `splits`).
            kind: 0: keys, 1: contents, 2: captions.
            dropped: Numbers of the dropped rows.
        """
        parts = [kind * self.num_parts + part for part in range(self.num_parts)]
        work = partial(_search_part, files=self._files, dropped=dropped, search=search)
        return list(self.packed.map(work, parts))

    def close(self) -> None:
        """Delete the files of the digests."""
        parallel_map(lambda file: file.unlink(), self._files)


def _write_digests(item: _File, out: AnyPath, names: Sequence[str], num_parts: int) -> None:
    """Task: write the digests of a file of records, in parts of each kind."""
    file, target, records = item
    tables = []
    with open_records(out, file, ["shard", *names]) as reader:
        for batch, start, splits in records:
            table = pa.Table.from_batches([reader.get_batch(batch)])
            rows = pa.array(np.arange(start, start + table.num_rows))
            split = pa.array(splits, pa.int32()).take(table["shard"].combine_chunks())
            table = table.append_column("row", rows).append_column("split", split)
            tables.append(table.filter(table["split"].is_valid()))
    table = pa.concat_tables(tables)
    columns = ["digest", "row", "split"]
    digests = pa.concat_tables(
        table.select([name, "row", "split"]).rename_columns(columns) for name in names
    )
    kinds = np.repeat(np.arange(len(names)), len(table))
    starts = pc.binary_slice(digests["digest"], 0, 4).combine_chunks().view(pa.uint32())
    parts = kinds * num_parts + starts.to_numpy() % num_parts
    write_parts(target, digests, parts, len(names) * num_parts)


def _search_part(
    part: int, files: Sequence[AnyPath], dropped: np.ndarray, search: Callable[[pa.Table], Any]
) -> Any:
    """Task: the work of `Digests.search` on a part."""
    table = read_part(files, part)
    return search(table.filter(pc.invert(pc.is_in(table["row"], pa.array(dropped)))))


def _find_repeats(table: pa.Table, reason: int, held_out: Sequence[int]) -> pa.Table:
    """Return the rows whose digest another one has, with the first one of it."""
    is_first = pc.is_in(table["split"], pa.array(held_out, pa.int32()))
    order = pc.add(table["row"], pc.if_else(is_first, 0, LATER))
    rows = pa.table({"digest": table["digest"], "order": order})
    groups = rows.group_by("digest").aggregate([("order", "min"), ("order", "count")])
    repeated = groups.filter(pc.greater(groups["order_count"], 1))
    pairs = rows.join(repeated, "digest", join_type="inner")
    pairs = pairs.filter(pc.greater(pairs["order"], pairs["order_min"]))
    reasons = np.full(len(pairs), reason, np.uint8)
    return pa.table([pairs["order"], pairs["order_min"], reasons], _REPEATS)


def _count_pairs(table: pa.Table, split_of: Sequence[int]) -> tuple[int, np.ndarray]:
    """Return the number of rows that repeat the digest of an earlier one, and by split that of
    ordered pairs with equal digests.
    """
    split = pa.array(split_of, pa.int32()).take(table["split"])
    keys = pa.table({"digest": table["digest"], "split": split})
    groups = keys.group_by(["digest", "split"]).aggregate([([], "count_all")])
    sizes = np.asarray(groups["count_all"])
    pairs = np.bincount(groups["split"], sizes * (sizes - 1), len(split_of))
    return len(table) - pc.count_distinct(table["digest"]).as_py(), pairs


@dataclass(frozen=True)
class DedupResult:
    """Rows that are left out of the set.

    Attributes:
        rows: Their numbers, sorted, int64 [D].
        originals: Number of the kept row that each of them repeats, int64 [D]; -1: it is
            contaminated.
        reasons: uint8 [D], why. 1: it has the same key within its split. 2: it has the same images,
            audio and video; with the rule `row` also the same captions, and a conversation always
            also the same messages.
        contaminated: By number of a contaminated row (whose image is also in another set or split)
            a sentence for quarantine.jsonl: which row of which set it repeats.
    """

    rows: np.ndarray
    originals: np.ndarray
    reasons: np.ndarray
    contaminated: dict[int, str] = field(default_factory=dict)

    def with_contaminated(self, contaminated: dict[int, str]) -> DedupResult:
        """Return the result with contaminated rows, which are no duplicates."""
        added = np.array(list(contaminated), np.int64)
        rows = np.concatenate([self.rows, added])
        order = np.argsort(rows)
        originals = np.concatenate([self.originals, np.full(len(added), NO_ROW, np.int64)])
        reasons = np.concatenate([self.reasons, np.zeros(len(added), np.uint8)])
        return DedupResult(rows[order], originals[order], reasons[order], contaminated)


def find_duplicates(digests: Digests, rule: DuplicateRule) -> DedupResult:
    """Find the rows that repeat another one.

    Of equal rows a held-out one is kept, otherwise the earliest. Under each rule but `keep` a row
    whose key (name) an earlier row of its split has is a duplicate too, with reason 1; no other row
    counts as a duplicate of it.

    Args:
        rule: `prepare.duplicates`: `image` (same images, and same conversation if there is one),
            `row` (same images and captions) or `keep` (none).
    """
    found = [_REPEATS.empty_table()]
    if rule != "keep":
        held_out = [digests.splits.index(s) for s in digests.splits if s in HELD_OUT_SPLITS]
        search = partial(_find_repeats, held_out=held_out)
        none = np.zeros(0, np.int64)
        found += digests.search(partial(search, reason=SAME_KEY), 0, none)
        dropped = pa.concat_tables(found)["order"].to_numpy() % LATER
        found += digests.search(partial(search, reason=SAME_CONTENT), 1, dropped)
    repeats = pa.concat_tables(found)
    rows = repeats["order"].to_numpy() % LATER
    order = np.argsort(rows)
    originals = repeats["first"].to_numpy() % LATER
    return DedupResult(rows[order], originals[order], repeats["reason"].to_numpy()[order])


def caption_fields(
    digests: Digests, dropped: np.ndarray, shards: Sequence[Shard]
) -> dict[str, Any]:
    """Return the fields of the manifest about kept rows with equal captions.

    Args:
        dropped: Sorted numbers of the rows that are left out of the set.
        shards: The shards of the packed rows, with the splits of the set.

    Returns:
        `num_same_text` and `same_text_share`.
    """
    names = sorted({shard.split or "" for shard in shards})
    # Rows without a split may be training rows now.
    split_of = [names.index(s if s in names else "train") for s in digests.splits]
    search = partial(_count_pairs, split_of=split_of)
    counts = digests.search(search, 2, dropped)
    shares = {}
    for number, split in enumerate(names):
        num_rows = sum(shard.num_kept for shard in shards if (shard.split or "") == split)
        if num_pairs := sum(int(pairs[number]) for _, pairs in counts):
            shares[split] = num_pairs / (num_rows * (num_rows - 1))
    return {"num_same_text": sum(repeats for repeats, _ in counts), "same_text_share": shares}
