"""Assemble finished chunks into a prepared set: deduplication, quarantine, tokenizer, manifest.

Runs on the driver after the Ray job, on the records of the chunks. Only digests and one record are in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from mmray.data.prepare.error_budget import LEAKED
from mmray.data.prepare.pack import read_record, shards_of
from mmray.data.store.manifest import QUARANTINE, TOKENIZER, Manifest, Shard, fingerprint
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import DataError
from mmray.storage.storage import Storage

if TYPE_CHECKING:
    from mmray.config import Prepare

NONE = -1
HELD_OUT = ("test", "val", "valid", "validation", "dev", "eval")  # held-out splits, which are not trained on


def parse_digests(hexadecimal: Sequence[str]) -> np.ndarray:
    """Return the first 128 bits of hex digests: uint64 [N, 2]."""
    joined = bytes.fromhex("".join(digest[:32] for digest in hexadecimal))
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64).reshape(-1, 2)


def hash_texts(texts: Sequence[str]) -> np.ndarray:
    """Return a 128-bit hash of each text: uint64 [N, 2]."""
    return parse_digests([hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts])


def first_occurrence(values: np.ndarray) -> np.ndarray:
    """Return the index of the first row equal to each row of `values` [N, 2]; -1 for the first itself."""
    order = np.lexsort((values[:, 1], values[:, 0]))  # stable: of equal rows the earliest comes first
    ordered = values[order]
    is_first = np.ones(len(values), dtype=bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(values)), 0))]
    out = np.full(len(values), NONE, dtype=np.int64)
    out[order[~is_first]] = first[~is_first]
    return out


class Duplicates(NamedTuple):
    """For each row, the kept row with the same key, content or captions: int64 [N], -1 for none."""

    same_key: np.ndarray
    same_content: np.ndarray
    same_text: np.ndarray


def match_duplicates(
    keys: np.ndarray,
    images: np.ndarray,
    rows: np.ndarray,
    texts: np.ndarray,
    rule: Literal["image", "row", "text", "keep"],
    held_out: np.ndarray,
) -> Duplicates:
    """Find the rows that duplicate another, each for one reason.

    Arguments are digests [N, 2] in source order (of keys, images, images with captions, captions) and which rows are in
    a held-out split, bool [N]. Of equal rows a held-out one is kept, otherwise the earliest. A duplicate key is an
    error under each rule, and such a row is never the original of another.
    """
    same_key = first_occurrence(keys)
    same_content, same_text = (np.full(len(keys), NONE, dtype=np.int64) for _ in range(2))
    unique = np.flatnonzero(same_key == NONE)
    unique = unique[np.argsort(~held_out[unique], kind="stable")]
    if rule == "text":
        found = zip((same_content, same_text), _first_kept_occurrence(images[unique], texts[unique]), strict=True)
    else:
        first = (
            np.full(len(unique), NONE)
            if rule == "keep"
            else first_occurrence((images if rule == "image" else rows)[unique])
        )
        found = zip((same_content,), (first,), strict=True)
    for target, first in found:
        target[unique[first != NONE]] = unique[first[first != NONE]]
    return Duplicates(same_key, same_content, same_text)


def _first_kept_occurrence(images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the earlier kept row with the same images, otherwise the one with the same captions; -1 for none.

    Works row by row, because a row that is dropped for its captions must not cause another row with its image to be
    dropped.
    """
    groups = [
        np.where(first == NONE, np.arange(len(first)), first)
        for first in (first_occurrence(images), first_occurrence(texts))
    ]
    out, kept = ([np.full(len(group), NONE, dtype=np.int64) for group in groups] for _ in range(2))
    shared = [np.bincount(group, minlength=len(group))[group] > 1 for group in groups]
    for row in np.flatnonzero(shared[0] | shared[1]).tolist():
        firsts = [int(holder[group[row]]) for holder, group in zip(kept, groups, strict=True)]
        same = next((column for column, first in enumerate(firsts) if first != NONE), None)
        if same is not None:
            out[same][row] = firsts[same]
        else:
            for holder, group in zip(kept, groups, strict=True):
                holder[group[row]] = row
    return tuple(out)


@dataclass(frozen=True)
class DedupResult:
    """Duplicate rows, and rows that are dropped as leaks."""

    same: Duplicates
    num_leaks: int  # rows whose image is also in another split
    num_same_text: int = 0  # kept rows with the captions of an earlier one
    leaked: dict[int, str] = field(default_factory=dict)  # row -> detail in the quarantine

    @cached_property
    def first(self) -> np.ndarray:
        """The original of each duplicate; -1 for rows that are kept."""
        return np.max(self.same, axis=0)  # each has at most one reason

    @property
    def dropped(self) -> np.ndarray:
        """Whether each row is dropped: bool [N]."""
        dropped = self.first != NONE
        dropped[list(self.leaked)] = True
        return dropped

    @property
    def num_rows(self) -> int:
        """Number of packed rows, including duplicates."""
        return len(self.same.same_key)

    @property
    def num_dropped(self) -> int:
        return int(self.dropped.sum())


def find_duplicates(out: Storage, chunks: Iterable[int], rule: Any) -> DedupResult:
    """Find duplicates in the rows of these chunks, in source order."""
    columns: list[tuple[np.ndarray, ...]] = []
    for _, record in records(out, chunks):
        rows = record["rows"]
        splits = [str(record["shards"][shard]["split"]) for shard in rows["shard"]]
        digests = [parse_digests(rows[name]) for name in ("image", "row", "text")]
        held_out = np.array([split in HELD_OUT for split in splits], bool)
        columns.append((hash_texts(rows["key"]), *digests, hash_texts(splits)[:, 0], held_out))
    keys, images, whole, texts, split, held = (np.concatenate(column) for column in zip(*columns, strict=True))
    first = first_occurrence(images)
    num_leaks = int(((first != NONE) & (split != split[first])).sum())
    found = DedupResult(match_duplicates(keys, images, whole, texts, rule, held), num_leaks)
    return replace(found, num_same_text=int((first_occurrence(texts[~found.dropped]) != NONE).sum()))


def write_quarantine(
    out: Storage, chunks: Iterable[int], found: DedupResult
) -> tuple[list[Shard], Counter[str], Counter[str]]:
    """Write quarantine.jsonl; return the shards with their dropped rows, counts by reason, kept rows by language.

    One object per line, in source order: key, source (`file:line`), stage, reason, detail.
    """
    shards: list[Shard] = []
    reasons: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    originals, dropped, start = _Originals(found, out, chunks), found.dropped, 0
    with out.open_output(QUARANTINE) as file:
        for _, record in records(out, chunks):
            for fault in sorted(record["faults"] + originals.faults(record, start), key=lambda fault: fault["line"]):
                del fault["line"]
                file.write(orjson.dumps(fault, option=orjson.OPT_APPEND_NEWLINE))
                reasons[fault["reason"]] += 1
            shards.extend(_with_dropped_rows(record, dropped[start:]))
            names = enumerate(record["rows"]["language"], start)
            languages.update(name for row, name in names if name and not dropped[row])
            start += len(record["rows"]["key"])
    return shards, reasons, languages


def default_splits(shards: list[Shard]) -> tuple[list[Shard], dict[str, int]]:
    """Return the shards and the rows of each split; if some rows have a split, those without one are `train`."""
    if any(shard.split for shard in shards):
        shards = [shard if shard.split else replace(shard, split="train") for shard in shards]
    splits: Counter[str] = Counter()
    for shard in shards:
        if shard.split:
            splits[shard.split] += shard.num_live
    return shards, {split: rows for split, rows in splits.items() if rows}


def fit_tokenizer(out: Storage, shards: list[Shard], vocab_size: int) -> str | None:
    """Return a tokenizer trained on the captions outside the held-out splits; None if there are none."""
    used = [shard for shard in shards if shard.split not in HELD_OUT and shard.num_live]
    if not vocab_size or not used:
        return None
    return train_tokenizer((text for shard in used for text in _texts(out, shard)), vocab_size)


def make_manifest(
    settings: Prepare,
    source: dict[str, Any],
    shards: list[Shard],
    reasons: Counter[str],
    languages: Counter[str],
    found: DedupResult,
    leakage: dict[str, Any],
    has_tokenizer: bool,
    box_names: dict[str, str],
    class_names: tuple[str, ...],
) -> Manifest:
    shards, splits = default_splits([shard for shard in shards if shard.num_live])
    num_rows = sum(shard.num_live for shard in shards)
    return Manifest(
        num_rows=num_rows,
        num_read=num_rows + reasons.total(),
        num_quarantined=reasons.total(),
        reasons=dict(reasons.most_common()),
        num_leaks=found.num_leaks,
        splits=splits,
        fingerprint=fingerprint(shards),
        tokenizer=TOKENIZER if has_tokenizer else None,
        source=source,
        settings=settings.model_dump(mode="json"),
        shards=tuple(shards),
        num_same_text=found.num_same_text,
        leakage=leakage,
        box_names=box_names,
        class_names=class_names,
        languages=dict(sorted(languages.items())),
    )


class _Originals:
    """Key and split of the originals of duplicates, collected while iterating over the records in source order."""

    def __init__(self, found: DedupResult, out: Storage, chunks: Iterable[int]) -> None:
        self.found = found
        self.wanted = set(found.first[found.first != NONE].tolist())
        self.known: dict[int, tuple[str, str | None]] = {}
        if (found.first > np.arange(len(found.first))).any():  # a held-out original after its duplicate
            start = 0
            for _, record in records(out, chunks):
                self._collect(record, start)
                start += len(record["rows"]["key"])

    def _collect(self, record: dict[str, Any], start: int) -> None:
        """Collect from a record whose first row is row `start` of the set."""
        for row, (key, shard) in enumerate(zip(record["rows"]["key"], record["rows"]["shard"], strict=True), start):
            if row in self.wanted:
                self.known[row] = (key, record["shards"][shard]["split"])

    def faults(self, record: dict[str, Any], start: int) -> list[dict[str, Any]]:
        """Return quarantine entries of a record (duplicates and leaks) whose first row is row `start` of the set."""
        self._collect(record, start)
        rows, faults = record["rows"], []
        columns = (rows["line"], rows["origin"], rows["key"], rows["shard"])
        for row, (line, origin, key, shard) in enumerate(zip(*columns, strict=True), start):
            if self.found.first[row] != NONE:
                reason = self._duplicate(row, record["shards"][shard]["split"])
            elif row in self.found.leaked:
                reason = {"stage": "leakage", "reason": LEAKED, "detail": self.found.leaked[row]}
            else:
                continue
            faults.append({"line": line, "key": key, "source": origin} | reason)
        return faults

    def _duplicate(self, row: int, split: str | None) -> dict[str, str]:
        if self.found.same.same_key[row] != NONE:
            return {"stage": "duplicates", "reason": "duplicate-key", "detail": "an earlier row has this id"}
        original, original_split = self.known[int(self.found.first[row])]
        where = f" (in split {original_split})" if split != original_split else ""
        if self.found.same.same_text[row] != NONE:
            detail = f"same captions as row {original}{where}"
            return {"stage": "duplicates", "reason": "duplicate-text", "detail": detail}
        return {"stage": "duplicates", "reason": "duplicate", "detail": f"duplicate of row {original}{where}"}


def records(out: Storage, chunks: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (chunk, record) of finished chunks. Raises DataError if one no longer exists."""
    for index in chunks:
        record = read_record(out, index)
        if record is None:
            raise DataError(f"{out.address}: the record of chunk {index} was deleted: rerun the same command")
        yield index, record


def _with_dropped_rows(record: dict[str, Any], dropped: np.ndarray) -> list[Shard]:
    """Return the shards of a record with the numbers of their dropped rows."""
    shard_of = np.asarray(record["rows"]["shard"], np.int64)
    drops = (np.flatnonzero(dropped[: len(shard_of)][shard_of == number]) for number in range(len(record["shards"])))
    return [replace(shard, dropped=tuple(drop.tolist())) for shard, drop in zip(shards_of(record), drops, strict=True)]


def _texts(out: Storage, shard: Shard) -> Iterator[str]:
    """Yield the captions of the kept rows of a shard; images are not read."""
    dropped, row = set(shard.dropped), 0
    only_texts = pa.ipc.IpcReadOptions(included_fields=[2])
    with pa.ipc.open_file(out.open(shard.file, mapped=True), options=only_texts) as reader:
        for batch in range(reader.num_record_batches):
            for texts in reader.get_batch(batch).column("texts").to_pylist():
                if row not in dropped:
                    yield from texts
                row += 1
