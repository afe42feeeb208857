"""Finished chunks become a set: duplicates over all of them, the quarantine, the tokenizer, and what the manifest says.

Runs on the driver after the Ray job, over the records that the tasks left; memory holds digests and one record.
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


# Duplicates over a whole set, found in a few sorted arrays: 16 bytes a row, whatever the rows are.
NONE = -1
HELD_OUT = ("test", "val", "valid", "validation", "dev", "eval")  # names of splits that are not trained on


def parse_digests(hexadecimal: Sequence[str]) -> np.ndarray:
    """The first 128 bits of hex digests: uint64 [N, 2]."""
    joined = bytes.fromhex("".join(digest[:32] for digest in hexadecimal))
    return np.frombuffer(joined, dtype=">u8").astype(np.uint64).reshape(-1, 2)


def hash_texts(texts: Sequence[str]) -> np.ndarray:
    """128 bits of each text: uint64 [N, 2]."""
    return parse_digests([hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts])


def first_occurrence(values: np.ndarray) -> np.ndarray:
    """For each row of `values` [N, 2] the index of the first row that is equal to it; -1 where that is itself."""
    order = np.lexsort((values[:, 1], values[:, 0]))  # stable: of equal rows the earliest stands first
    ordered = values[order]
    begins = np.ones(len(values), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = order[np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))]
    out = np.full(len(values), NONE, dtype=np.int64)
    out[order[~begins]] = first[~begins]
    return out


class Duplicates(NamedTuple):
    """For each row the one that stays with the same key, the same content, the same captions: int64 [N], -1 where none
    does."""

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
    """The rows that repeat another, each for one reason.

    Arguments are digests [N, 2] in source order: of keys, of images, of images and captions, of captions; and which
    rows are of a held-out split, bool [N]. Of equal rows a held-out one stays, so that what is measured on stays as it
    is, else the earliest. A repeated key is a fault whatever the rule, and such a row is no one's first.
    """
    same_key = first_occurrence(keys)
    same_content, same_text = (np.full(len(keys), NONE, dtype=np.int64) for _ in range(2))
    unique = np.flatnonzero(same_key == NONE)
    unique = unique[np.argsort(~held_out[unique], kind="stable")]
    if rule == "text":
        for target, found in zip(
            (same_content, same_text), _first_kept_occurrence(images[unique], texts[unique]), strict=True
        ):
            target[unique[found != NONE]] = unique[found[found != NONE]]
    elif rule != "keep":
        found = first_occurrence((images if rule == "image" else rows)[unique])
        same_content[unique[found != NONE]] = unique[found[found != NONE]]
    return Duplicates(same_key, same_content, same_text)


def _first_kept_occurrence(images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, ...]:
    """For each row the kept row before it with the same images, else the one with the same captions; -1 where none is.

    Row by row: one that went for its captions must not take along another that has its image, nor the other way.
    """
    groups = [
        np.where(first == NONE, np.arange(len(first)), first)
        for first in (first_occurrence(images), first_occurrence(texts))
    ]
    out, kept = ([np.full(len(group), NONE, dtype=np.int64) for group in groups] for _ in range(2))
    shared = [np.bincount(group, minlength=len(group))[group] > 1 for group in groups]
    for row in np.flatnonzero(shared[0] | shared[1]).tolist():
        firsts = [int(holder[group[row]]) for holder, group in zip(kept, groups, strict=True)]
        same = next((each for each, first in enumerate(firsts) if first != NONE), None)
        if same is not None:
            out[same][row] = firsts[same]
        else:
            for holder, group in zip(kept, groups, strict=True):
                holder[group[row]] = row
    return tuple(out)


@dataclass(frozen=True)
class DedupResult:
    """What a look over all rows found: rows that repeat an earlier one, and rows that stand in two splits."""

    same: Duplicates
    num_leaks: int
    num_same_text: int = 0  # rows that stay, with the captions of an earlier one
    leaked: dict[int, str] = field(default_factory=dict)  # rows that are set aside as leaks, and what is said of them

    @cached_property
    def first(self) -> np.ndarray:
        """The row for which each duplicate is dropped; -1 for rows that stay."""
        return np.max(self.same, axis=0)  # each has one reason at most

    @property
    def dropped(self) -> np.ndarray:
        """Whether each row is set aside: bool [N]."""
        dropped = self.first != NONE
        dropped[list(self.leaked)] = True
        return dropped

    @property
    def num_rows(self) -> int:
        """Rows that were packed, duplicates among them."""
        return len(self.same.same_key)

    @property
    def num_dropped(self) -> int:
        return int(self.dropped.sum())


def find_duplicates(out: Storage, chunks: Iterable[int], rule: Any) -> DedupResult:
    """Duplicates among the rows of these chunks, in source order."""
    keys, images, rows, texts, splits, held_out = [], [], [], [], [], []
    for _, record in records(out, chunks):
        keys.append(hash_texts(record["rows"]["key"]))
        images.append(parse_digests(record["rows"]["image"]))
        rows.append(parse_digests(record["rows"]["row"]))
        texts.append(parse_digests(record["rows"]["text"]))
        names = [str(record["shards"][shard]["split"]) for shard in record["rows"]["shard"]]
        splits.append(hash_texts(names)[:, 0])
        held_out.append(np.array([name in HELD_OUT for name in names], bool))
    all_images, split = np.concatenate(images), np.concatenate(splits)
    all_texts = np.concatenate(texts)
    kept_first = np.concatenate(held_out)
    same = match_duplicates(np.concatenate(keys), all_images, np.concatenate(rows), all_texts, rule, kept_first)
    twin = first_occurrence(all_images)
    findings = DedupResult(same, int(((twin != NONE) & (split != split[twin])).sum()))
    same_text = first_occurrence(all_texts[~findings.dropped]) != NONE
    return replace(findings, num_same_text=int(same_text.sum()))


def write_quarantine(
    out: Storage, chunks: Iterable[int], findings: DedupResult
) -> tuple[list[Shard], Counter[str], Counter[str]]:
    """Write quarantine.jsonl; the shards with what they drop, rows by why they went, rows that stay by language.

    One object a line, in source order: key, source (`file:line`), stage, reason, detail.
    """
    shards: list[Shard] = []
    reasons: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    firsts = _FirstSeen(findings, out, chunks)
    with out.open_output(QUARANTINE) as file:
        start = 0
        dropped = findings.dropped
        for _, record in records(out, chunks):
            faults = record["faults"] + firsts.faults(record, start)
            for fault in sorted(faults, key=lambda item: item["line"]):
                del fault["line"]
                file.write(orjson.dumps(fault, option=orjson.OPT_APPEND_NEWLINE))
                reasons[fault["reason"]] += 1
            shards.extend(_with_dropped_rows(record, dropped[start:]))
            spoken = record["rows"].get("language", ())  # records of an earlier version say nothing of it
            languages.update(each for place, each in enumerate(spoken, start) if each and not dropped[place])
            start += len(record["rows"]["key"])
    return shards, reasons, languages


def default_splits(shards: list[Shard]) -> tuple[list[Shard], dict[str, int]]:
    """Shards and rows of each split; where some rows have a split, those without one are `train`."""
    if any(shard.split for shard in shards):
        shards = [shard if shard.split else replace(shard, split="train") for shard in shards]
    splits: Counter[str] = Counter()
    for shard in shards:
        if shard.split:
            splits[shard.split] += shard.num_live
    return shards, {split: rows for split, rows in splits.items() if rows}


def fit_tokenizer(out: Storage, shards: list[Shard], vocab_size: int) -> str | None:
    """A tokenizer trained on the captions outside the held-out splits; None where there are none."""
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
    findings: DedupResult,
    leakage: dict[str, Any],
    has_tokenizer: bool,
    box_names: dict[str, str],
    class_names: tuple[str, ...],
) -> Manifest:
    """The manifest of a finished set."""
    shards, splits = default_splits([shard for shard in shards if shard.num_live])
    num_rows = sum(shard.num_live for shard in shards)
    return Manifest(
        num_rows=num_rows,
        num_read=num_rows + reasons.total(),
        num_quarantined=reasons.total(),
        reasons=dict(reasons.most_common()),
        num_leaks=findings.num_leaks,
        splits=splits,
        fingerprint=fingerprint(shards),
        tokenizer=TOKENIZER if has_tokenizer else None,
        source=source,
        settings=settings.model_dump(mode="json"),
        shards=tuple(shards),
        num_same_text=findings.num_same_text,
        leakage=leakage,
        box_names=box_names,
        class_names=class_names,
        languages=dict(sorted(languages.items())),
    )


class _FirstSeen:
    """Remembers key and split of rows that others repeat, as the records pass in source order; of the held-out ones
    that an earlier row repeats, beforehand."""

    def __init__(self, findings: DedupResult, out: Storage, chunks: Iterable[int]) -> None:
        self.findings = findings
        self.wanted = set(findings.first[findings.first != NONE].tolist())
        self.known: dict[int, tuple[str, str | None]] = {}
        if (findings.first > np.arange(len(findings.first))).any():
            start = 0
            for _, record in records(out, chunks):
                self._remember(record, start)
                start += len(record["rows"]["key"])

    def _remember(self, record: dict[str, Any], start: int) -> None:
        """The rows of this record that others repeat; its first row is row `start` of the set."""
        for row, (key, shard) in enumerate(zip(record["rows"]["key"], record["rows"]["shard"], strict=True), start):
            if row in self.wanted:
                self.known[row] = (key, record["shards"][shard]["split"])

    def faults(self, record: dict[str, Any], start: int) -> list[dict[str, Any]]:
        """Quarantine entries of the duplicates in this record, whose first row is row `start` of the set."""
        self._remember(record, start)
        rows, faults = record["rows"], []
        columns = (rows["line"], rows["origin"], rows["key"], rows["shard"])
        for place, (line, origin, key, shard) in enumerate(zip(*columns, strict=True)):
            split, first = record["shards"][shard]["split"], int(self.findings.first[start + place])
            if first != NONE:
                named = {"line": line, "key": key, "source": origin}
                faults.append(named | self._fault(start + place, split, *self.known[first]))
            elif told := self.findings.leaked.get(start + place):
                fault = {"stage": "leakage", "reason": LEAKED, "detail": told}
                faults.append({"line": line, "key": key, "source": origin} | fault)
        return faults

    def _fault(self, row: int, split: str | None, first: str, first_split: str | None) -> dict[str, str]:
        if self.findings.same.same_key[row] != NONE:
            return {"stage": "duplicates", "reason": "duplicate-key", "detail": "an earlier row has this id"}
        leak = f" (which is in split {first_split})" if split != first_split else ""
        if self.findings.same.same_text[row] != NONE:
            detail = f"the captions of row {first}{leak} again"
            return {"stage": "duplicates", "reason": "duplicate-text", "detail": detail}
        return {"stage": "duplicates", "reason": "duplicate", "detail": f"the same as row {first}{leak}"}


def records(out: Storage, chunks: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(chunk, record) of finished chunks. Raises DataError where one is gone."""
    for index in chunks:
        record = read_record(out, index)
        if record is None:
            raise DataError(f"{out.address}: the record of chunk {index} is gone: run the same command again")
        yield index, record


def _with_dropped_rows(record: dict[str, Any], dropped: np.ndarray) -> list[Shard]:
    """The shards of a record, each with the numbers of its rows that are set aside."""
    numbers: Counter[int] = Counter()
    drops: list[list[int]] = [[] for _ in record["shards"]]
    for place, shard in enumerate(record["rows"]["shard"]):
        if dropped[place]:
            drops[shard].append(numbers[shard])
        numbers[shard] += 1
    return [replace(shard, dropped=tuple(drop)) for shard, drop in zip(shards_of(record), drops, strict=True)]


def _texts(out: Storage, shard: Shard) -> Iterator[str]:
    """All captions of the rows of a shard that count; no image is read."""
    dropped, row = set(shard.dropped), 0
    only_texts = pa.ipc.IpcReadOptions(included_fields=[2])
    with pa.ipc.open_file(out.open(shard.file, mapped=True), options=only_texts) as reader:
        for batch in range(reader.num_record_batches):
            for texts in reader.get_batch(batch).column("texts").to_pylist():
                if row not in dropped:
                    yield from texts
                row += 1
