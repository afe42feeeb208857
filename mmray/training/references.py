"""Log-probabilities of the reference model of dpo that a run reads: columns that `mmray score`
wrote (reference_job.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from mmray.config import Config
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_values import COLUMNS_DIR
from mmray.data.store.selection import SELECTIONS_DIR
from mmray.data.store.shard_table import MappedArray, MappedFile
from mmray.data.vlm.reader import ADAPTERS_OFF, ReferenceLogProbs
from mmray.errors import DataError
from mmray.storage.paths import AnyPath, to_path
from mmray.training import RunReporter

IDENTITY = "score.json"  # file in the folder of a score that names the model that wrote it


def open_references(
    config: Config,
    train_set: PreparedSet | PreparedMixture,
    processor_digest: str,
    reporter: RunReporter,
) -> ReferenceLogProbs:
    """Return the log-probabilities of the reference model for the rows of a run of dpo.

    Args:
        processor_digest: `ProcessorEncoder.digest` of the run's processor.

    Raises:
        DataError: A set has no such columns, or another processor or several models wrote them.
    """
    column = config.objective.reference
    if column == ADAPTERS_OFF:
        return ReferenceLogProbs(column)
    sets = train_set.sets if isinstance(train_set, PreparedMixture) else (train_set,)
    identities = [_read_identity(config, each, processor_digest) for each in sets]
    if len({each["weights_digest"] for each in identities}) > 1:
        names = ", ".join(each["weights"] for each in identities)
        raise DataError(f"objective.reference: several models wrote {column} of the sets: {names}")
    folder = to_path(config.run.storage) / SELECTIONS_DIR
    folder.mkdir(parents=True, exist_ok=True)
    chosen, rejected = (
        np.concatenate([_read_column(each, f"{column}_{answer}") for each in sets])
        for answer in ("chosen", "rejected")
    )
    has_values = ~np.isnan(chosen)
    model = identities[0]
    text = f"{column} of {has_values.sum():,} rows, by {model['weights']}"
    num_missing = int((~has_values).sum())
    if num_missing:
        text += (
            f"; {num_missing:,} rows without a rejected answer, or unreadable ones, are not used"
        )
    reporter.log(text, "reference")
    if not has_values.any():
        raise DataError(f"objective.reference: no row of {config.data.train} has {column}")
    return ReferenceLogProbs(
        column,
        _to_file(folder, chosen),
        _to_file(folder, rejected),
        model["weights"],
        model["weights_digest"],
    )


def _to_file(folder: AnyPath, values: np.ndarray) -> MappedArray:
    return MappedArray(MappedFile.write(folder, "reference-{}.float64", values), "float64")


def check_held_out(
    config: Config,
    eval_sets: Mapping[str, PreparedSet],
    processor_digest: str,
    reporter: RunReporter,
) -> None:
    """Log the held-out rows of a run of dpo that have no log-probabilities of a reference model.

    Raises:
        DataError: Another processor wrote them.
    """
    column = config.objective.reference
    if column == ADAPTERS_OFF:
        return
    for prepared in eval_sets.values():
        if f"{column}_chosen" in prepared.manifest.columns:
            _read_identity(config, prepared, processor_digest)
        else:
            text = f"{prepared.folder} has no column {column} of `mmray score`: no reward metrics"
            reporter.log(text, "evaluate")


def _read_identity(config: Config, prepared: PreparedSet, processor_digest: str) -> dict[str, str]:
    """Return what `mmray score` wrote about the model of the columns. Raises DataError."""
    spec: Any = config.model
    column = config.objective.reference
    command = f"mmray score {prepared.folder} --weights {spec.weights}"
    if column != type(config.objective)().reference:
        command += f" --name {column}"
    if spec.inputs != type(spec.inputs)(max_tokens=spec.inputs.max_tokens):
        command += " --config FILE, where FILE has what `mmray train ... --print-config` prints"
    file = prepared.folder / COLUMNS_DIR / f"{column}_chosen" / IDENTITY
    if f"{column}_chosen" not in prepared.manifest.columns or not file.exists():
        raise DataError(
            f"objective.reference: {prepared.folder} has no log-probabilities `{column}` of a "
            f"reference model: run {command}"
        )
    identity: dict[str, str] = orjson.loads(file.read_bytes())
    if identity.get("processor") != processor_digest:
        raise DataError(
            f"objective.reference: `{column}` of {prepared.folder} is of {identity['weights']} "
            "with another chat template, tokenizer or size of images than the run's: run "
            f"{command}, with another --name and --objective.reference"
        )
    return identity


def _read_column(prepared: PreparedSet, name: str) -> np.ndarray:
    """Return a column of numbers, float64, NaN for missing values."""
    shards: Sequence[Any] = [shard for shard in prepared.shards if shard.num_kept]
    parts = prepared.values.read([shard.key for shard in shards], [name])
    values = [np.zeros(0)]
    for shard, columns in zip(shards, parts, strict=True):
        column = columns[name].to_numpy(zero_copy_only=False)
        values.append(np.delete(column, shard.dropped))
    return np.concatenate(values)
