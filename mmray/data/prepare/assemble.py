"""Assemble finished chunks into a prepared set: quarantine, limit of bad rows, tokenizer.

Runs on the driver after the Ray job. In memory are the summaries of the chunks, and the rows that
are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import orjson
import pyarrow as pa

from mmray.data.formats.source import Source
from mmray.data.prepare.duplicates import NO_ROW, SAME_KEY, DedupResult
from mmray.data.prepare.records import PackedRows
from mmray.data.rows import HELD_OUT_SPLITS
from mmray.data.store.manifest import (
    RECORD_BATCH_ROWS,
    TOKENIZER,
    Manifest,
    Notice,
)
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.shard_table import Shard
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, open_output, write_atomic

OVERLAP = "overlap"  # the reason of rows that --drop-overlap quarantines; they do not count as bad
REASONS = (OVERLAP, "duplicate-key", "duplicate")
# Reasons of rows of which a column is missing under its name.
_COLUMN_REASONS = {"no-image", "no-text"}
# more hardly change a vocabulary of some thousand tokens, and all are in memory
MAX_TRAINING_TEXTS = 1_000_000
# Rows with the texts for the tokenizer: bytes and runs of adjacent rows at most, rows a read.
MAX_SAMPLED_BYTES = 8 << 30
MAX_RUNS = 8192
ROWS_PER_READ = 1 << 16


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
        counts: Number of kept rows by split ("": none) and kinds of media.
        column_types: By name of a column that `prepare.keep` stores: the types of its values in the
            parts of the source (`bool`, `int64`, `double` or `string`; None: no values).
        notices: `Manifest.notices`; duplicates and contaminated rows count, too.
    """

    shards: list[Shard]
    quarantine: str
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    column_types: dict[str, set[str | None]] = field(default_factory=dict)
    notices: dict[str, Notice] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of rows of the set."""
        return sum(shard.num_kept for shard in self.shards)


def quarantine_rows(packed: PackedRows, dedup: DedupResult, file_name: str) -> PrepareResult:
    """Write the rows that are left out of the set (bad, duplicate or contaminated) to a file, in
    source order.

    Args:
        dedup: Which rows are dropped as duplicates or as contaminated (also in another set or
            split), and why.
        file_name: Name of the file in the folder. Each line is JSON with the texts `key`, `source`
            (`file:line`), `stage`, `reason` and `detail`.

    Returns:
        A PrepareResult, whose `quarantine` is `file_name`.
    """
    dropped = packed.select(dedup.rows)
    result = PrepareResult(packed.without(dropped), file_name)
    _count_rows(packed, dropped, result)
    entries = pa.concat_tables([packed.select(), _with_reasons(packed, dedup, dropped)])
    with open_output(packed.out / file_name) as file:
        for batch in entries.sort_by("row").to_batches(max_chunksize=4096):
            for row in batch.to_pylist():
                entry = {"key": row["key"], "source": row["location"]}
                entry |= {name: row[name] for name in ("stage", "reason", "detail")}
                file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
                result.reasons[row["reason"]] += 1
                example = f"{row['location']}: {row['detail'][:160]}"
                result.examples.setdefault(row["reason"], example)
    return result


def _count_rows(packed: PackedRows, dropped: pa.Table, result: PrepareResult) -> None:
    """Add the counts of the kept rows, the types of kept columns and the notices to a result."""
    first_shard = 0
    for record in packed.records:
        for shard, kinds, number in record.counts:
            result.counts[result.shards[first_shard + shard].split or "", kinds] += number
        first_shard += len(record.shards)
        for name, kind in record.columns.items():
            result.column_types.setdefault(name, set()).add(kind)
        for text, (num_rows, location) in record.notices.items():
            notice = result.notices.setdefault(text, Notice(num_rows=0, example=location))
            notice["num_rows"] += num_rows
    groups = dropped.group_by(["shard", "kinds"]).aggregate([([], "count_all")])
    for row in groups.to_pylist():
        split = result.shards[row["shard"]].split or ""
        result.counts[split, row["kinds"]] -= row["count_all"]


def _with_reasons(packed: PackedRows, dedup: DedupResult, dropped: pa.Table) -> pa.Table:
    """Return dropped rows with the stage, reason and detail of their quarantine entries."""
    original_rows = np.unique(dedup.originals[dedup.originals != NO_ROW])
    originals = packed.select(original_rows)
    keys = originals["key"]
    shards = np.asarray(originals["shard"])
    index = np.searchsorted(original_rows, dedup.originals)
    details = []
    own_shards = np.asarray(dropped["shard"])
    for row, number, reason, shard in zip(
        dedup.rows.tolist(), index.tolist(), dedup.reasons.tolist(), own_shards, strict=True
    ):
        if row in dedup.contaminated:
            detail = dedup.contaminated[row]
        elif reason == SAME_KEY:
            detail = "another row has this id"
        else:
            detail = f"duplicate of row {keys[number]}"
            original_split = packed.shards[shards[number]].split
            if packed.shards[shard].split != original_split:
                detail += f" (in split {original_split})"
        details.append(detail)
    columns = dict(zip(dropped.column_names, dropped.columns, strict=True))
    columns["stage"] = np.where(dedup.reasons == 0, "leakage", "duplicates")
    columns["reason"] = np.array(REASONS)[dedup.reasons]
    columns["detail"] = details
    return pa.table(columns, dropped.schema)


def max_bad_rows(max_bad_fraction: float, total: int) -> int:
    """Return how many rows of a source may be bad without an error."""
    return int(max_bad_fraction * total + 1e-6)  # 0.29 of 100 is 29


def rejection_error(
    source: Source, out: AnyPath, total: int, result: PrepareResult, max_bad_fraction: float
) -> DataError:
    """Return (not raise) the error for a source with too many bad rows, or without a good row.

    Args:
        total: Number of rows of the source; more than those of `result` if prepare stopped early.
        result: The PrepareResult, of which `reasons`, `examples` and `quarantine` are read.
        max_bad_fraction: Limit of bad rows as a fraction of `total`, 0 to 1.
    """
    path = source.folder / source.name
    reasons = result.reasons
    num_read = result.num_rows + reasons.total()
    quarantine = f"{out / result.quarantine}"
    bad = reasons.total() - reasons[OVERLAP]
    if reasons[OVERLAP] and reasons.total() == num_read:
        return DataError(
            f"{path}: no row of {num_read:,} is left; {reasons[OVERLAP]:,} are also in other "
            f"sets or splits (prepare.drop_overlap). {quarantine} lists them; compare with other "
            "sets"
        )
    early = f" of {total:,} rows (stopped early)" if num_read < total else ""
    limit = "none is good"
    advice = "Correct the source: the lines above name what was found, and how to fix it."
    if reasons.keys() & _COLUMN_REASONS:
        advice = f"Each row needs {source.row_needs}."
    if bad < num_read:
        limit = f"the limit is {100 * max_bad_fraction:.3g} %{early} (prepare.max_bad_fraction)"
        keep = ""
        if any("duplicate" in reason for reason in reasons):
            keep = (
                ", keep duplicates with --duplicates keep, join the captions of an image with "
                "--group image"
            )
        accept = f"accept them with --max-bad-fraction {-(-1000 * bad // total) / 1000:g}"
        advice = f"Correct them{keep}, or {accept}. Then rerun the same command to resume."
    lines = [
        f"{path}: {bad:,} of {num_read:,} rows are bad ({100 * bad / num_read:.3g} %), {limit}",
        *(
            f"  {count:,} {reason}, for example {result.examples[reason]}"
            for reason, count in reasons.most_common()
        ),
        f"All of them are in {quarantine}.",
        advice,
    ]
    return DataError("\n".join(lines))


def write_tokenizer(out: AnyPath, manifest: Manifest, vocab_size: int) -> bool:
    """Train a tokenizer of at most vocab_size tokens on the captions outside the held-out splits.

    Returns:
        Whether one was written: not with 0 tokens, or if all splits are held out.
    """
    shards = [shard for shard in manifest.shards if shard.split not in HELD_OUT_SPLITS]
    if not vocab_size or not shards:
        return False
    captions = sample_captions(PreparedSet(out, replace(manifest, shards=tuple(shards))))
    write_atomic(out / TOKENIZER, train_tokenizer(captions, vocab_size))
    return True


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
