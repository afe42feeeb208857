"""Assemble finished chunks into a prepared set: deduplication, quarantine, limit of bad rows, tokenizer.

Runs on the driver after the Ray job, on the records of the chunks. Only digests and a few records are in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import orjson

from mmray.data.formats.rows import HELD_OUT_SPLITS
from mmray.data.prepare.pack import read_chunk_record, record_path
from mmray.data.store.manifest import QUARANTINE, RECORD_BATCH_ROWS, TOKENIZER, Manifest, Shard
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import DataError
from mmray.storage.storage import Storage, iter_parallel

NO_ROW = -1
OVERLAP = "overlap"  # the reason of rows that --drop-overlap quarantines; they do not count as bad
REASONS = ("", "duplicate-key", "duplicate", "duplicate-text")
SAME_KEY, SAME_CONTENT, SAME_TEXT = 1, 2, 3
MAX_TRAINING_TEXTS = 1_000_000  # more hardly change a vocabulary of some thousand tokens, and all are in memory
MAX_SAMPLED_BYTES, MAX_RUNS, ROWS_PER_READ = 8 << 30, 8192, 1 << 16  # of the rows with these texts


def iter_chunk_records(out: Storage, chunks: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (first row number, record) of finished chunks, read ahead in threads. Raises DataError if one is gone."""
    start = 0
    records = iter_parallel(partial(read_chunk_record, out), [*map(record_path, chunks)])
    for index, record in zip(chunks, records, strict=True):
        if record is None:
            raise DataError(f"{out.address}: the record of chunk {index} was deleted: rerun the same command")
        yield start, record
        start += len(record["rows"]["key"])


def parse_digests(hexadecimal: Sequence[str]) -> np.ndarray:
    """Return the first 128 bits of hex digests: uint64 [N, 2]."""
    joined = bytes.fromhex("".join(digest[:32] for digest in hexadecimal))
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64).reshape(-1, 2)


def first_occurrence(values: np.ndarray) -> np.ndarray:
    """Return the index of the first row equal to each row of `values` [N, 2]; -1 for the first itself."""
    order = np.lexsort((values[:, 1], values[:, 0]))  # stable: of equal rows the earliest comes first
    ordered = values[order]
    is_first = np.ones(len(values), dtype=bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(values)), 0))]
    out = np.full(len(values), NO_ROW, dtype=np.int64)
    out[order[~is_first]] = first[~is_first]
    return out


def _first_kept_occurrence(images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the earlier kept row with the same image, otherwise the one with the same captions, and which it is.

    Works row by row, because a row that is dropped for its captions must not cause another row with its image to be
    dropped.
    """
    first, reason_code = np.full(len(images), NO_ROW, np.int64), np.full(len(images), SAME_CONTENT, np.uint8)
    by_image: dict[bytes, int] = {}
    by_text: dict[bytes, int] = {}
    for row, (image, text) in enumerate(zip(map(bytes, images), map(bytes, texts), strict=True)):
        if image in by_image:
            first[row] = by_image[image]
        elif text in by_text:
            first[row], reason_code[row] = by_text[text], SAME_TEXT
        else:
            by_image[image] = by_text[text] = row
    return first, reason_code


@dataclass(frozen=True)
class DedupResult:
    """Duplicate rows, and contaminated rows that are dropped."""

    duplicate_of: np.ndarray  # int64 [N]: the kept row that each row duplicates, or NO_ROW
    reason: np.ndarray  # uint8 [N]: index in REASONS
    num_same_text: int = 0  # kept rows with the captions of an earlier one
    contaminated: dict[int, str] = field(default_factory=dict)  # row -> detail in the quarantine

    @property
    def dropped(self) -> np.ndarray:
        """Whether each packed row is dropped: bool [N]."""
        dropped = self.duplicate_of != NO_ROW
        dropped[list(self.contaminated)] = True
        return dropped


@dataclass(frozen=True)
class PackedRows:
    """Columns of the rows of all chunks in source order: digests uint64 [N, 2], and their shards."""

    keys: np.ndarray
    images: np.ndarray
    rows: np.ndarray  # images with captions
    texts: np.ndarray
    shard_of: np.ndarray  # int32 [N]: index in `shards`
    shards: list[Shard]
    num_bad: int  # bad rows of the chunks, which are not among the N

    @cached_property
    def by_shard(self) -> np.ndarray:
        """The row numbers [N] in the order in which the shards store them."""
        return np.argsort(self.shard_of, kind="stable")


def read_packed_rows(out: Storage, chunks: Sequence[int]) -> PackedRows:
    """Read the columns of the rows of these chunks."""
    columns: list[tuple[np.ndarray, ...]] = []
    shards: list[Shard] = []
    num_bad = 0
    for _, record in iter_chunk_records(out, chunks):
        rows = record["rows"]
        hashes = [hashlib.blake2b(key.encode(), digest_size=16).hexdigest() for key in rows["key"]]
        digests = map(parse_digests, (hashes, rows["image_digest"], rows["row_digest"], rows["text_digest"]))
        columns.append((*digests, np.array(rows["shard"], np.int32) + len(shards)))
        shards += map(Shard.from_json, record["shards"])
        num_bad += len(record["bad_rows"])
    keys, images, row_digests, texts, shard_of = (np.concatenate(column) for column in zip(*columns, strict=True))
    return PackedRows(keys, images, row_digests, texts, shard_of, shards, num_bad)


def find_duplicates(packed: PackedRows, rule: Literal["image", "row", "text", "keep"]) -> DedupResult:
    """Find the rows that repeat another one: of equal rows a held-out one is kept, otherwise the earliest.

    This also holds for rows with the same key. A duplicate key is an error under each rule, and no row is a duplicate
    of such a row.
    """
    held_out = np.array([shard.split in HELD_OUT_SPLITS for shard in packed.shards], bool)
    order = np.argsort(~held_out[packed.shard_of], kind="stable")  # held-out rows first
    first, duplicate_of = first_occurrence(packed.keys[order]), np.full(len(order), NO_ROW)
    repeats = first != NO_ROW
    duplicate_of[order[repeats]] = order[first[repeats]]
    reason = np.where(duplicate_of != NO_ROW, SAME_KEY, 0).astype(np.uint8)
    unique = order[~repeats]
    first, reason_code = np.full(len(unique), NO_ROW), np.full(len(unique), SAME_CONTENT, np.uint8)
    if rule == "text":
        first, reason_code = _first_kept_occurrence(packed.images[unique], packed.texts[unique])
    elif rule != "keep":
        first = first_occurrence((packed.images if rule == "image" else packed.rows)[unique])
    repeats = first != NO_ROW
    duplicate_of[unique[repeats]], reason[unique[repeats]] = unique[first[repeats]], reason_code[repeats]
    result = DedupResult(duplicate_of, reason)
    return replace(result, num_same_text=int((first_occurrence(packed.texts[~result.dropped]) != NO_ROW).sum()))


@dataclass
class PrepareResult:
    """The shards with their dropped rows; counts by quarantine reason, with an example; kept rows by language."""

    shards: list[Shard]
    quarantine: str  # file name of the list of bad and dropped rows
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    languages: Counter[str] = field(default_factory=Counter)


def quarantine_rows(
    out: Storage, chunks: Sequence[int], packed: PackedRows, dedup: DedupResult, file_name: str = QUARANTINE
) -> PrepareResult:
    """Write bad and dropped rows to a file, in source order; return the shards without the dropped rows."""
    dropped = dedup.dropped
    result = PrepareResult(list(_drop_rows(packed, dropped)), file_name)
    wanted = np.unique(dedup.duplicate_of[dedup.duplicate_of != NO_ROW])
    originals: dict[int, str] = {}  # key by row
    for start, record in iter_chunk_records(out, chunks if wanted.size else ()):
        names = record["rows"]["key"]
        first, last = np.searchsorted(wanted, (start, start + len(names)))
        originals |= {row: names[row - start] for row in wanted[first:last].tolist()}
    with out.open_output(file_name) as file:
        for start, record in iter_chunk_records(out, chunks):
            rows, entries = record["rows"], record["bad_rows"]
            drops = dropped[start : start + len(rows["key"])]
            for index in np.flatnonzero(drops).tolist():
                reason = _drop_reason(packed, dedup, start + index, originals)
                names = {"line": "line", "key": "key", "source": "location"}
                entries.append({name: rows[column][index] for name, column in names.items()} | reason)
            for entry in sorted(entries, key=lambda entry: entry["line"]):
                del entry["line"]
                file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
                result.reasons[entry["reason"]] += 1
                result.examples.setdefault(entry["reason"], f"{entry['source']}: {entry['detail'][:160]}")
            languages = zip(rows["language"], drops, strict=True)
            result.languages.update(name for name, is_dropped in languages if name and not is_dropped)
    return result


def _drop_rows(packed: PackedRows, dropped: np.ndarray) -> Iterator[Shard]:
    """Yield the shards without the rows that are `dropped` [N]."""
    in_shards, end = dropped[packed.by_shard], 0
    for shard in packed.shards:
        start, end = end, end + shard.num_rows
        yield replace(shard, dropped=tuple(np.flatnonzero(in_shards[start:end]).tolist()))


def _drop_reason(packed: PackedRows, dedup: DedupResult, row: int, originals: dict[int, str]) -> dict[str, str]:
    """Return the quarantine entry of a packed row: why it is dropped."""
    original, reason = int(dedup.duplicate_of[row]), int(dedup.reason[row])
    if original == NO_ROW:
        return {"stage": "leakage", "reason": OVERLAP, "detail": dedup.contaminated[row]}
    key = originals[original]
    split, original_split = (packed.shards[packed.shard_of[each]].split for each in (row, original))
    detail = ("", "another row has this id", f"duplicate of row {key}", f"same captions as row {key}")[reason]
    if split != original_split:
        detail += f" (in split {original_split})"
    return {"stage": "duplicates", "reason": REASONS[reason], "detail": detail}


def max_bad_rows(max_bad_fraction: float, total: int) -> int:
    """Return the number of rows that may be bad. Tolerates float rounding: 0.29 of 100 is 29."""
    return int(max_bad_fraction * total + 1e-6)


def rejection_error(
    source: str, out: Storage, num_read: int, total: int, result: PrepareResult, max_bad_fraction: float
) -> DataError:
    """Return the error of a source with more bad rows than `max_bad_fraction` of `total`, or without a good row."""
    reasons, quarantine = result.reasons, f"{out.address}/{result.quarantine}"
    bad = reasons.total() - reasons[OVERLAP]
    if reasons[OVERLAP] and reasons.total() == num_read:
        return DataError(
            f"{source}: no row of {num_read:,} is left; {reasons[OVERLAP]:,} are also in other sets or splits "
            f"(prepare.drop_overlap). {quarantine} lists them; compare with other sets"
        )
    early = f" of {total:,} rows (stopped early)" if num_read < total else ""
    limit = "none is good"
    advice = (
        "Correct the source: each row needs `image` (a path relative to its folder) and `text`. Map other column names "
        "with --columns image=NAME text=NAME."
    )
    if bad < num_read:
        limit = f"the limit is {100 * max_bad_fraction:.3g} %{early} (prepare.max_bad_fraction)"
        keep = ", keep duplicates with --duplicates keep" if {"duplicate", "duplicate-text"} & reasons.keys() else ""
        accept = f"accept them with --max-bad-fraction {-(-1000 * bad // total) / 1000:g}"
        advice = f"Correct them{keep}, or {accept}. Then rerun the same command to resume."
    lines = [
        f"{source}: {bad:,} of {num_read:,} rows are bad ({100 * bad / num_read:.3g} %), {limit}",
        *(f"  {count:,} {reason}, for example {result.examples[reason]}" for reason, count in reasons.most_common(5)),
        f"All of them are in {quarantine}.",
        f"{advice} In `mmray train`, these flags start with --prepare, as in --prepare.columns.",
    ]
    return DataError("\n".join(lines))


def write_tokenizer(out: Storage, manifest: Manifest, vocab_size: int) -> bool:
    """Train a tokenizer on the captions outside the held-out splits, if there are any; return whether it is written."""
    used = [shard for shard in manifest.shards if shard.split not in HELD_OUT_SPLITS]
    if vocab_size and used:
        captions = sample_captions(PreparedSet(out, replace(manifest, shards=tuple(used))))
        out.write(TOKENIZER, train_tokenizer(captions, vocab_size).encode())
    return bool(vocab_size and used)


def sample_captions(prepared: PreparedSet) -> Iterator[str]:
    """Yield the captions of evenly spaced runs of rows, at most MAX_TRAINING_TEXTS; all if the set is small.

    A store sends runs with their images: at most about MAX_SAMPLED_BYTES, and 1 MiB between two runs.
    """
    num_rows = prepared.num_rows
    sampled = min(num_rows, MAX_TRAINING_TEXTS, MAX_SAMPLED_BYTES * num_rows // prepared.num_bytes + 1)
    num_runs = min(-(-sampled // RECORD_BATCH_ROWS), MAX_RUNS)
    starts = np.arange(num_runs) * num_rows // num_runs
    rows = np.unique(starts[:, None] + np.arange(-(-sampled // num_runs)))
    rows = rows[rows < num_rows]
    for part in np.array_split(rows, -(-len(rows) // ROWS_PER_READ)):
        texts = list(chain.from_iterable(prepared.texts(part)))
        yield from texts[:: -(-len(texts) * len(rows) // (MAX_TRAINING_TEXTS * len(part))) or 1]
