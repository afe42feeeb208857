"""Assemble finished chunks into a prepared set: deduplication, quarantine, limit of bad rows,
tokenizer.

Runs on the driver after the Ray job, on the records of the chunks. In memory are a few records and
about 20 bytes for each row; the digests are in temporary files.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import IO, Any, Literal

import numpy as np
import orjson
import pyarrow as pa

from mmray.data.prepare.pack import read_chunk_record, record_path
from mmray.data.rows import HELD_OUT_SPLITS
from mmray.data.store.manifest import RECORD_BATCH_ROWS, TOKENIZER, Manifest, Notice, RowCounts
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import Shard
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, open_output, write_atomic
from mmray.storage.requests import iter_parallel

NO_ROW = -1
OVERLAP = "overlap"  # the reason of rows that --drop-overlap quarantines; they do not count as bad
MAX_SORTED_ROWS = 1 << 21  # rows that are sorted at a time; about 60 bytes each
DuplicateRule = Literal["image", "row", "text", "keep"]
REASONS = ("", "duplicate-key", "duplicate", "duplicate-text")
# Reasons of rows of which a column is missing under its name.
_COLUMN_REASONS = {"no-image", "no-text"}
SAME_KEY = 1
SAME_CONTENT = 2
SAME_TEXT = 3
# more hardly change a vocabulary of some thousand tokens, and all are in memory
MAX_TRAINING_TEXTS = 1_000_000
# Rows with the texts for the tokenizer: bytes and runs of adjacent rows at most, rows a read.
MAX_SAMPLED_BYTES = 8 << 30
MAX_RUNS = 8192
ROWS_PER_READ = 1 << 16


def iter_chunk_records(out: AnyPath, chunks: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of finished chunks in order; they are read ahead in threads.

    A chunk is the part of the source that one task has packed; its record describes its rows and
    shards.

    Raises:
        DataError: A record was deleted.
    """
    start = 0
    records = iter_parallel(partial(read_chunk_record, out), [*map(record_path, chunks)])
    for index, record in zip(chunks, records, strict=True):
        if record is None:
            raise DataError(
                f"{out}: the record of chunk {index} was deleted: rerun the same command"
            )
        yield start, record
        start += len(record["rows"]["key"])


def parse_digests(hexadecimal: Sequence[str]) -> np.ndarray:
    """Return the first 128 bits of hex digests.

    Args:
        hexadecimal: N digests of at least 32 hexadecimal digits.

    Returns:
        uint64 [N, 2].
    """
    joined = bytes.fromhex("".join(digest[:32] for digest in hexadecimal))
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64).reshape(-1, 2)


def first_occurrence(
    values: np.ndarray, among: np.ndarray | None = None, is_later: np.ndarray | None = None
) -> np.ndarray:
    """Return for each row the first row that has the same digest.

    Sorts a part of the digests at a time, selected by their first byte, to limit memory.

    Args:
        values: 128-bit digests of the rows, uint64 [N, 2].
        among: Whether each row is compared, bool [N]; None: all are.
        is_later: Whether each row counts as later than those that are False, bool [N]; None: no row
            does, and the order is that of the rows.

    Returns:
        Row numbers [N], int32 (int64 above 2^31 rows). -1 for a row that is the first with its
        digest, and for rows that are not compared.
    """
    out = np.full(len(values), NO_ROW, np.int32 if len(values) < 2**31 else np.int64)
    first_byte = np.ascontiguousarray(values.view(np.uint8)[:, 0])
    num_parts = min(255, 1 + len(values) // MAX_SORTED_ROWS)
    for part in range(num_parts):
        selected = first_byte % num_parts == part
        rows = np.flatnonzero(selected if among is None else selected & among)
        ordered = values[rows]
        later = () if is_later is None else (is_later[rows],)
        # stable: of equal rows the earliest comes first
        order = np.lexsort((*later, ordered[:, 1], ordered[:, 0]))
        rows = rows[order]
        ordered = ordered[order]
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        first = rows[np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))]
        out[rows[~is_first]] = first[~is_first]
    return out


def _first_kept_occurrence(
    packed: PackedRows, among: np.ndarray, is_later: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the earlier kept row with the same image, otherwise the one with the same captions,
    and which it is.

    Works row by row, because a row that is dropped for its captions must not cause another row with
    its image to be dropped. Rows whose image and captions occur once are skipped.
    """
    same_image, same_text = (
        first_occurrence(values, among) for values in (packed.contents, packed.texts)
    )
    first = np.full_like(same_image, NO_ROW)
    reason_code = np.full(len(among), SAME_CONTENT, np.uint8)
    # The kept row of each content, at the index of the first row with that content.
    kept_image = np.full_like(first, NO_ROW)
    kept_text = np.full_like(first, NO_ROW)
    is_repeated = np.zeros(len(among), bool)
    for same in (same_image, same_text):
        is_repeated[same != NO_ROW] = is_repeated[same[same != NO_ROW]] = True
    for row in chain(
        np.flatnonzero(is_repeated & ~is_later), np.flatnonzero(is_repeated & is_later)
    ):
        image, text = (
            row if same[row] == NO_ROW else same[row] for same in (same_image, same_text)
        )
        if kept_image[image] != NO_ROW:
            first[row] = kept_image[image]
        elif kept_text[text] != NO_ROW:
            first[row] = kept_text[text]
            reason_code[row] = SAME_TEXT
        else:
            kept_image[image] = kept_text[text] = row
    return first, reason_code


@dataclass(frozen=True)
class DedupResult:
    """Duplicate rows, and contaminated rows (whose images are also in another set or split).

    Attributes:
        duplicate_of: Number of the kept row that each row repeats, int32 [N] (int64 above 2^31
            rows); -1: not a duplicate.
        reason: uint8 [N], why each row is a duplicate; 0: it is none. 1: it has the same key within
            its split. 2: it has the same images, audio and video; under `prepare.duplicates` = row
            also the same captions, and a conversation always also the same messages. 3: it has the
            same captions, only under `prepare.duplicates` = text.
        contaminated: By number of a contaminated row a sentence for quarantine.jsonl: which row of
            which set it repeats. `dropped`, a mask bool [N], has these rows too. Empty unless
            `prepare.drop_overlap` is set.
    """

    duplicate_of: np.ndarray
    reason: np.ndarray
    contaminated: dict[int, str] = field(default_factory=dict)

    @property
    def dropped(self) -> np.ndarray:
        """Mask of the rows that are left out of the set, bool [N], a new array.

        True for a duplicate, and for a contaminated row, whose image is also in another set or
        split.
        """
        dropped = self.duplicate_of != NO_ROW
        dropped[list(self.contaminated)] = True
        return dropped


@dataclass(frozen=True)
class PackedRows:
    """Columns of the N rows of all chunks (parts of the source that tasks have packed) in source
    order; digests are memory-mapped.

    `read_packed_rows` returns it; `without(dropped)` returns its shards without some rows.

    Attributes:
        keys: Digests uint64 [N, 2] of the split and the key, because keys are unique within a
            split.
        contents: Digests uint64 [N, 2] of the images (audio, video), with `prepare.duplicates`
            `row` of images and captions; of a conversation always of images and messages.
        texts: Digests uint64 [N, 2] of the captions.
        shard_of: int32 [N], index in `shards` of the file that stores each row.
        shards: The shards (files) of all chunks.
        num_bad: Number of bad rows of the chunks, which are not among the N.
    """

    keys: np.ndarray
    contents: np.ndarray
    texts: np.ndarray
    shard_of: np.ndarray
    shards: list[Shard]
    num_bad: int

    @cached_property
    def by_shard(self) -> np.ndarray:
        """The numbers of the N rows, int64 [N], in the order in which the shards store them: by
        shard, and within a shard in source order.
        """
        return np.argsort(self.shard_of, kind="stable")

    def without(self, dropped: np.ndarray) -> list[Shard]:
        """Return the shards without some rows. If one with remaining rows has a split, those
        without one get `train`.

        Args:
            dropped: Whether each row is left out of the set, bool [N] in source order.

        Returns:
            All shards in order, each with the numbers of its left-out rows as `dropped`.
        """
        in_shards = dropped[self.by_shard]
        shards = []
        end = 0
        for shard in self.shards:
            start = end
            end = end + shard.num_rows
            rows = np.flatnonzero(in_shards[start:end]).tolist()
            shards.append(replace(shard, dropped=tuple(rows)))
        if any(shard.split for shard in shards if shard.num_kept):
            shards = [replace(shard, split=shard.split or "train") for shard in shards]
        return shards


def read_packed_rows(out: AnyPath, chunks: Sequence[int], rule: DuplicateRule) -> PackedRows:
    """Read the digests and shards of all rows that tasks have packed, to find duplicates.

    Args:
        chunks: Indices of the chunks, the parts of the source that one task has packed.
        rule: `prepare.duplicates`: `image`, `row`, `text` or `keep`. With `row`, `contents` are
            digests of images and captions, otherwise of the images (of a conversation always with
            its messages).

    Returns:
        A PackedRows of the N rows in source order, whose digests are in unnamed temporary files, 48
        bytes a row.
    """
    content = "row_digest" if rule == "row" else "image_digest"
    files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - _map_digests closes them
    shard_of = [np.zeros(0, np.int32)]
    shards: list[Shard] = []
    num_bad = 0
    for _, record in iter_chunk_records(out, chunks):
        rows = record["rows"]
        # Rows without a split become training rows if others have one.
        splits = [shard["split"] or "train" for shard in record["shards"]]
        names = [
            f"{splits[shard]}/{key}" for shard, key in zip(rows["shard"], rows["key"], strict=True)
        ]
        hashes = [hashlib.blake2b(name.encode(), digest_size=16).hexdigest() for name in names]
        for file, digests in zip(files, (hashes, rows[content], rows["text_digest"]), strict=True):
            file.write(parse_digests(digests).data)
        shard_of.append(np.array(rows["shard"], np.int32) + len(shards))
        shards += map(Shard.from_json, record["shards"])
        num_bad += len(record["bad_rows"])
    keys, contents, texts = map(_map_digests, files)
    return PackedRows(keys, contents, texts, np.concatenate(shard_of), shards, num_bad)


def _map_digests(file: IO[bytes]) -> np.ndarray:
    """Return the digests in a file as a memory-mapped array, uint64 [N, 2]; close the file."""
    with file:
        return (
            np.memmap(file, np.uint64, "r").reshape(-1, 2)
            if file.tell()
            else np.zeros((0, 2), np.uint64)
        )


def find_duplicates(packed: PackedRows, rule: DuplicateRule) -> DedupResult:
    """Find the rows that repeat another one.

    Of equal rows a held-out one is kept, otherwise the earliest. Under each rule but `keep` a row
    whose key (name) an earlier row of its split has is a duplicate too, with reason 1; no other row
    counts as a duplicate of it.

    Args:
        packed: Digests (of images, captions and keys), splits and shards of the rows.
        rule: `prepare.duplicates`: `image` (same images, and same conversation if there is one),
            `row` (same images and captions), `text` (same images or same captions) or `keep`
            (none).

    Returns:
        A DedupResult: `duplicate_of` (int [N], number of the row that is kept for each row; -1: no
        duplicate), `reason` (uint8 [N]: 1 same key; 2 same images, with `row` also same captions; 3
        same captions, only with `text`; 0 none). No row is contaminated in it.
    """
    is_training = ~np.array([shard.split in HELD_OUT_SPLITS for shard in packed.shards], bool)[
        packed.shard_of
    ]
    none = np.zeros(len(is_training), bool) if rule == "keep" else None
    duplicate_of = first_occurrence(packed.keys, none, is_training)
    reason = (duplicate_of != NO_ROW).astype(np.uint8) * np.uint8(SAME_KEY)
    if rule != "keep":
        reason_code: np.ndarray | np.uint8
        if rule == "text":
            first, reason_code = _first_kept_occurrence(packed, reason == 0, is_training)
        else:
            first = first_occurrence(packed.contents, reason == 0, is_training)
            reason_code = np.uint8(SAME_CONTENT)
        repeats = first != NO_ROW
        np.copyto(duplicate_of, first, where=repeats)
        np.copyto(reason, reason_code, where=repeats)
        del first
    return DedupResult(duplicate_of, reason)


def caption_fields(
    packed: PackedRows, dropped: np.ndarray, shards: Sequence[Shard]
) -> dict[str, Any]:
    """Return the fields of the manifest about kept rows with equal captions.

    Args:
        packed: The rows of all chunks.
        dropped: Which of them are left out of the set, bool [N].
        shards: Their shards, with the splits of the set.

    Returns:
        `num_same_text` and `same_text_share`.
    """
    first = first_occurrence(packed.texts, ~dropped)
    repeats = np.flatnonzero(first != NO_ROW)
    firsts = np.unique(first[repeats])
    rows = np.concatenate([firsts, repeats])
    groups = np.concatenate([firsts, first[repeats]])
    shares = {}
    for split in sorted({shard.split or "" for shard in shards}):
        in_split = np.array([(shard.split or "") == split for shard in shards])
        _, sizes = np.unique(groups[in_split[packed.shard_of[rows]]], return_counts=True)
        num_rows = sum(shard.num_kept for shard in shards if (shard.split or "") == split)
        if pairs := int((sizes * (sizes - 1)).sum()):  # ordered pairs
            shares[split] = pairs / (num_rows * (num_rows - 1))
    return {"num_same_text": len(repeats), "same_text_share": shares}


@dataclass
class PrepareResult:
    """The rows that become the set, and counts of the rows that do not.

    Attributes:
        shards: The shards, with the rows of each that are dropped. Rows without a split are
            training rows if others have one.
        quarantine: Name of the file that lists bad and dropped rows.
        reasons: Number of bad and dropped rows by reason, such as {"truncated": 3}.
        examples: By reason the location (`file:line`) and a sentence about one such row, as one
            text.
        counts: A RowCounts of the kept rows, by split, language and kinds of media.
        column_types: By name of a column that `prepare.keep` stores: the types of its values in the
            parts of the source (`bool`, `int64`, `double` or `string`; None: no values).
        notices: `Manifest.notices`; duplicates and contaminated rows count, too.
    """

    shards: list[Shard]
    quarantine: str
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    counts: RowCounts = field(default_factory=RowCounts)
    column_types: dict[str, set[str | None]] = field(default_factory=dict)
    notices: dict[str, Notice] = field(default_factory=dict)


def quarantine_rows(
    out: AnyPath,
    chunks: Sequence[int],
    packed: PackedRows,
    dedup: DedupResult,
    file_name: str,
) -> PrepareResult:
    """Write the rows that are left out of the set (bad, duplicate or contaminated) to a file, in
    source order.

    Args:
        chunks: Indices of the chunks, the parts of the source that one task has packed.
        packed: Digests, splits and shards of their rows.
        dedup: Which rows are dropped as duplicates or as contaminated (also in another set or
            split), and why.
        file_name: Name of the file in the folder. Each line is JSON with the texts `key`, `source`
            (`file:line`), `stage`, `reason` and `detail`, and of a bad row with an image file with
            `image`, {"file", "offset", "length"} of it in the folder of the source.

    Returns:
        A PrepareResult, whose `quarantine` is `file_name`.
    """
    dropped = dedup.dropped
    result = PrepareResult(packed.without(dropped), file_name)
    original_rows = np.unique(dedup.duplicate_of[dedup.duplicate_of != NO_ROW])
    originals: list[pa.Array] = []  # keys of `original_rows`
    for start, record in iter_chunk_records(out, chunks if original_rows.size else ()):
        names = record["rows"]["key"]
        first, last = np.searchsorted(original_rows, (start, start + len(names)))
        originals.append(
            pa.array(
                [names[row - start] for row in original_rows[first:last].tolist()], pa.string()
            )
        )
    original_keys = pa.chunked_array(originals, pa.string())
    with open_output(out / file_name) as file:
        for start, record in iter_chunk_records(out, chunks):
            rows = record["rows"]
            entries = record["bad_rows"]
            drops = dropped[start : start + len(rows["key"])]
            for index in np.flatnonzero(drops).tolist():
                reason = _drop_reason(packed, dedup, start + index, original_rows, original_keys)
                names = {"line": "line", "key": "key", "source": "location"}
                entries.append(
                    {name: rows[column][index] for name, column in names.items()} | reason
                )
            for entry in sorted(entries, key=lambda entry: entry["line"]):
                del entry["line"]
                file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
                result.reasons[entry["reason"]] += 1
                result.examples.setdefault(
                    entry["reason"], f"{entry['source']}: {entry['detail'][:160]}"
                )
            shards = packed.shard_of[start : start + len(drops)].tolist()
            columns = zip(shards, rows["language"], rows["kinds"], drops, strict=True)
            for shard, language, kinds, is_dropped in columns:
                if not is_dropped:
                    result.counts.add(result.shards[shard].split, language, kinds)
            for name, kind in record["columns"].items():
                result.column_types.setdefault(name, set()).add(kind)
            for text, (num_rows, location) in record["notices"].items():
                notice = result.notices.setdefault(text, Notice(num_rows=0, example=location))
                notice["num_rows"] += num_rows
    return result


def _drop_reason(
    packed: PackedRows,
    dedup: DedupResult,
    row: int,
    originals: np.ndarray,
    original_keys: pa.ChunkedArray,
) -> dict[str, str]:
    """Return the quarantine entry of a packed row: why it is dropped.

    `originals` are sorted row numbers.
    """
    original = int(dedup.duplicate_of[row])
    reason = int(dedup.reason[row])
    if original == NO_ROW:
        return {"stage": "leakage", "reason": OVERLAP, "detail": dedup.contaminated[row]}
    key = original_keys[int(np.searchsorted(originals, original))].as_py()
    split, original_split = (packed.shards[packed.shard_of[each]].split for each in (row, original))
    detail = (
        "",
        "another row has this id",
        f"duplicate of row {key}",
        f"same captions as row {key}",
    )[reason]
    if split != original_split and reason != SAME_KEY:
        detail += f" (in split {original_split})"
    return {"stage": "duplicates", "reason": REASONS[reason], "detail": detail}


def max_bad_rows(max_bad_fraction: float, total: int) -> int:
    """Return how many rows of a source may be bad without an error.

    Float rounding has no effect: 0.29 of 100 is 29.

    Args:
        max_bad_fraction: `prepare.max_bad_fraction`, 0 to 1.
    """
    return int(max_bad_fraction * total + 1e-6)


def rejection_error(
    source: str,
    out: AnyPath,
    num_read: int,
    total: int,
    result: PrepareResult,
    max_bad_fraction: float,
    row_needs: str,
) -> DataError:
    """Return (not raise) the error for a source with too many bad rows, or without a good row.

    Args:
        source: Path of the source, for the message.
        num_read: Number of rows that were read, including bad ones.
        total: Number of rows of the source; larger than `num_read` if prepare stopped early.
        result: The PrepareResult, of which `reasons`, `examples` and `quarantine` are read.
        max_bad_fraction: Limit of bad rows as a fraction of `total`, 0 to 1.
        row_needs: What a row of the format needs (Source.row_needs), for the message.
    """
    reasons = result.reasons
    quarantine = f"{out / result.quarantine}"
    bad = reasons.total() - reasons[OVERLAP]
    if reasons[OVERLAP] and reasons.total() == num_read:
        return DataError(
            f"{source}: no row of {num_read:,} is left; {reasons[OVERLAP]:,} are also in other "
            f"sets or splits (prepare.drop_overlap). {quarantine} lists them; compare with other "
            "sets"
        )
    early = f" of {total:,} rows (stopped early)" if num_read < total else ""
    limit = "none is good"
    kinds = reasons.keys() - {OVERLAP}
    advice = "Correct the source: the lines above name what was found, and how to fix it."
    if kinds & _COLUMN_REASONS:
        advice = f"Each row needs {row_needs}."
    if bad < num_read:
        limit = f"the limit is {100 * max_bad_fraction:.3g} %{early} (prepare.max_bad_fraction)"
        keep = ""
        if kinds & set(REASONS):
            keep = ", keep duplicates with --duplicates keep"
        if "duplicate" in kinds:
            keep += ", join the captions of an image with --group image"
        accept = f"accept them with --max-bad-fraction {-(-1000 * bad // total) / 1000:g}"
        advice = f"Correct them{keep}, or {accept}. Then rerun the same command to resume."
    lines = [
        f"{source}: {bad:,} of {num_read:,} rows are bad ({100 * bad / num_read:.3g} %), {limit}",
        *(
            f"  {count:,} {reason}, for example {result.examples[reason]}"
            for reason, count in reasons.most_common(5)
        ),
        f"All of them are in {quarantine}.",
        advice,
    ]
    return DataError("\n".join(lines))


def write_tokenizer(out: AnyPath, manifest: Manifest, vocab_size: int) -> bool:
    """Train a tokenizer on the captions outside the held-out splits, and write its tokenizer.json.

    Args:
        manifest: Its manifest, which need not be written; its shards are read.
        vocab_size: Maximum number of tokens; 0: no tokenizer.

    Returns:
        Whether a tokenizer was written; False also if all splits are held out (`test`, `val`,
        `valid`, `validation`, `dev`, `eval`).
    """
    training_shards = [shard for shard in manifest.shards if shard.split not in HELD_OUT_SPLITS]
    if vocab_size and training_shards:
        captions = sample_captions(
            PreparedSet(out, replace(manifest, shards=tuple(training_shards)))
        )
        write_atomic(out / TOKENIZER, train_tokenizer(captions, vocab_size))
    return bool(vocab_size and training_shards)


def sample_captions(prepared: PreparedSet) -> Iterator[str]:
    """Yield captions of a set to train a tokenizer on, at most about MAX_TRAINING_TEXTS (a
    million).

    They are from evenly spaced groups of adjacent rows; all captions if the set is small. An object
    store sends the groups with their images: at most about MAX_SAMPLED_BYTES (8 GiB), and 1 MiB
    between two groups.
    """
    num_rows = prepared.num_rows
    sampled = min(
        num_rows, MAX_TRAINING_TEXTS, MAX_SAMPLED_BYTES * num_rows // prepared.num_bytes + 1
    )
    num_runs = min(-(-sampled // RECORD_BATCH_ROWS), MAX_RUNS)
    starts = np.arange(num_runs) * num_rows // num_runs
    rows = np.unique(starts[:, None] + np.arange(-(-sampled // num_runs)))
    rows = rows[rows < num_rows]
    for part in np.array_split(rows, -(-len(rows) // ROWS_PER_READ)):
        texts = list(chain.from_iterable(prepared.texts(part)))
        yield from texts[:: -(-len(texts) * len(rows) // (MAX_TRAINING_TEXTS * len(part))) or 1]
