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

from mmray.data.prepare.records import PackedRows, open_records
from mmray.data.prepare.tasks import Result
from mmray.data.rows import HELD_OUT_SPLITS
from mmray.data.store.manifest import CHUNK_RECORDS
from mmray.data.store.shard_table import Shard
from mmray.storage.paths import TEMP_SUFFIX, AnyPath, open_input, open_output
from mmray.storage.requests import parallel_map

NO_ROW = -1
MAX_SORTED_ROWS = 1 << 21  # rows that are searched at a time; about 100 bytes each
SAME_KEY = 1
SAME_CONTENT = 2
SAME_TEXT = 3
DuplicateRule = Literal["image", "row", "text", "keep"]


def first_occurrence(values: np.ndarray, is_later: np.ndarray | None = None) -> np.ndarray:
    """Return for each row the first row that has the same digest.

    Args:
        values: 128-bit digests of the rows, uint64 [N, 2].
        is_later: Whether each row counts as later than those that are False, bool [N]; None: no row
            does, and the order is that of the rows.

    Returns:
        Row numbers int64 [N]; -1 for a row that is the first with its digest.
    """
    later = () if is_later is None else (is_later,)
    # stable: of equal rows the earliest comes first
    order = np.lexsort((*later, values[:, 1], values[:, 0]))
    ordered = values[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
    out = np.full(len(values), NO_ROW, np.int64)
    out[order[~is_first]] = first[~is_first]
    return out


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
        items: list[tuple[str, str, list[tuple[int, int, list[int]]]]] = []
        for file, numbers in packed.by_file():
            target = f"{CHUNK_RECORDS}/digests-{len(items)}{TEMP_SUFFIX}"
            items.append((file, target, [self._describe(number) for number in numbers]))
        self._files = [target for _, target, _ in items]
        write = partial(_write_digests, out=packed.out, names=names, num_parts=self.num_parts)
        list(packed.map(write, items))

    def _describe(self, number: int) -> tuple[int, int, list[int]]:
        """Return the record batch of a record, its first row, and the splits of its shards."""
        record = self.packed.records[number]
        splits = [self.splits.index(shard.split or "") for shard in record.shards]
        return record.batch, int(self.packed.starts[number]), splits

    def search(self, search: Callable[..., Result], kind: int, dropped: np.ndarray) -> list[Result]:
        """Call a picklable function with the rows of each part that are not dropped.

        Args:
            search: Called with a table of `digest`, `row` (number, in order) and `split` (index in
                `splits`).
            kind: 0: keys, 1: contents, 2: captions.
            dropped: Numbers of the dropped rows.
        """
        parts = [kind * self.num_parts + part for part in range(self.num_parts)]
        files = [self.packed.out / file for file in self._files]
        work = partial(_search_part, files=files, dropped=dropped, search=search)
        return list(self.packed.map(work, parts))

    def close(self) -> None:
        """Delete the files of the digests."""
        parallel_map(lambda name: (self.packed.out / name).unlink(), self._files)


_DIGESTS = pa.schema([("digest", pa.binary(16)), ("row", pa.int64()), ("split", pa.int32())])


def _write_digests(
    item: tuple[str, str, list[tuple[int, int, list[int]]]],
    out: AnyPath,
    names: Sequence[str],
    num_parts: int,
) -> Result:
    """Task: write the digests of a file of records, a record batch for each kind and part."""
    file, target, records = item
    tables = []
    with open_records(out, file, ["shard", *names]) as reader:
        for batch, start, splits in records:
            table = pa.Table.from_batches([reader.get_batch(batch)])
            rows = pa.array(np.arange(start, start + table.num_rows))
            split = pa.array(splits, pa.int32()).take(table["shard"].combine_chunks())
            table = table.append_column("row", rows).append_column("split", split)
            tables.append(table.filter(table["split"].is_valid()))
    table = pa.concat_tables(tables).combine_chunks()
    with open_output(out / target) as stream, pa.ipc.new_file(stream, _DIGESTS) as writer:
        for name in names:
            part_of = _to_array(table[name])[:, 0] % num_parts
            for part in range(num_parts):
                selected = table.filter(pa.array(part_of == part)).select([name, "row", "split"])
                columns = [column.combine_chunks() for column in selected.columns]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_DIGESTS))
    return {}


def _to_array(column: pa.ChunkedArray) -> np.ndarray:
    """Return digests as uint64 [N, 2]."""
    array = column.combine_chunks()
    start = 2 * array.offset
    data = np.frombuffer(array.buffers()[1] or b"", np.uint64)
    return data[start : start + 2 * len(array)].reshape(-1, 2)


def _search_part(
    number: int, files: Sequence[AnyPath], dropped: np.ndarray, search: Callable[..., Result]
) -> Result:
    """Task: the work of `Digests.search` on a part."""
    batches = []
    for file in files:
        with open_input(file) as stream, pa.ipc.open_file(stream) as reader:
            batches.append(reader.get_batch(number))
    table = pa.Table.from_batches(batches).sort_by("row")
    table = table.filter(pc.invert(pc.is_in(table["row"], pa.array(dropped))))
    return search(table)


def _find_repeats(table: pa.Table, held_out: Sequence[int]) -> Result:
    """Return the rows whose digest another one has, with the first one of it."""
    rows = np.asarray(table["row"])
    is_later = ~np.isin(table["split"], held_out)
    first = first_occurrence(_to_array(table["digest"]), is_later)
    repeats = np.flatnonzero(first != NO_ROW)
    firsts = first[repeats]
    return {
        "rows": rows[repeats],
        "first": rows[firsts],
        "is_later": is_later[repeats],
        "is_first_later": is_later[firsts],
    }


def _count_pairs(table: pa.Table, split_of: Sequence[int]) -> Result:
    """Return the number of rows that repeat the digest of an earlier one, and by split that of
    ordered pairs with equal digests.
    """
    split = pa.array(split_of, pa.int32()).take(table["split"])
    keys = pa.table({"digest": table["digest"], "split": split})
    groups = keys.group_by(["digest", "split"]).aggregate([([], "count_all")])
    sizes = np.asarray(groups["count_all"])
    pairs = np.bincount(groups["split"], sizes * (sizes - 1), len(split_of))
    return {"repeats": len(table) - pc.count_distinct(table["digest"]).as_py(), "pairs": pairs}


@dataclass(frozen=True)
class DedupResult:
    """Rows that are left out of the set.

    Attributes:
        rows: Their numbers, sorted, int64 [D].
        originals: Number of the kept row that each of them repeats, int64 [D]; -1: it is
            contaminated.
        reasons: uint8 [D], why. 1: it has the same key within its split. 2: it has the same images,
            audio and video; with the rule `row` also the same captions, and a conversation always
            also the same messages. 3: it has the same captions, only with the rule `text`.
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
            `row` (same images and captions), `text` (same images or same captions) or `keep`
            (none).
    """
    none = np.zeros(0, np.int64)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [(none, none, none.astype(np.uint8))]
    if rule != "keep":
        held_out = [digests.splits.index(s) for s in digests.splits if s in HELD_OUT_SPLITS]
        search = partial(_find_repeats, held_out=held_out)
        keys = _join(digests.search(search, 0, none))
        dropped = keys["rows"]
        found.append((dropped, keys["first"], np.full(len(dropped), SAME_KEY, np.uint8)))
        contents = _join(digests.search(search, 1, dropped))
        if rule == "text":
            found.append(_keep_first(contents, _join(digests.search(search, 2, dropped))))
        else:
            code = np.full(len(contents["rows"]), SAME_CONTENT, np.uint8)
            found.append((contents["rows"], contents["first"], code))
    rows, originals, reasons = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(rows)
    return DedupResult(rows[order], originals[order], reasons[order])


def _join(results: Sequence[Result]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([result[name] for result in results]) for name in results[0]}


def _keep_first(
    contents: dict[str, np.ndarray], texts: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows that repeat a kept row with the same image, otherwise one with the same
    captions; that row; and which it is.

    Works row by row, because a row that is dropped for its captions must not cause another row with
    its image to be dropped.
    """
    firsts: list[dict[int, int]] = []
    is_later: dict[int, bool] = {}  # also of the rows that are first
    for each in (contents, texts):
        rows = each["rows"].tolist()
        first = each["first"].tolist()
        firsts.append(dict(zip(rows, first, strict=True)))
        is_later |= zip(rows, each["is_later"].tolist(), strict=True)
        is_later |= zip(first, each["is_first_later"].tolist(), strict=True)
    kept: tuple[dict[int, int], dict[int, int]] = ({}, {})
    found = []
    for row in sorted(is_later, key=lambda row: (is_later[row], row)):
        image, text = (first.get(row, row) for first in firsts)
        if image in kept[0]:
            found.append((row, kept[0][image], SAME_CONTENT))
        elif text in kept[1]:
            found.append((row, kept[1][text], SAME_TEXT))
        else:
            kept[0][image] = kept[1][text] = row
    repeats, originals, reasons = np.array(found, np.int64).reshape(-1, 3).T
    return repeats, originals, reasons.astype(np.uint8)


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
        if pairs := sum(int(each["pairs"][number]) for each in counts):
            shares[split] = pairs / (num_rows * (num_rows - 1))
    return {"num_same_text": sum(each["repeats"] for each in counts), "same_text_share": shares}
