"""Columns by other models that a run reads, which `mmray score` wrote: log-probabilities of the
reference model of dpo, and embeddings of the teacher of distillation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from mmray.config import Clip, Config
from mmray.config.model import Objective
from mmray.config.model_kinds import TowerModel
from mmray.config.sets import parse_captions
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import column_types
from mmray.data.store.row_values import COLUMNS_DIR
from mmray.data.stream.reader import Teacher
from mmray.data.vlm.reader import ADAPTERS_OFF, ReferenceLogProbs
from mmray.errors import DataError, UsageError
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
    sets = _sets_of(train_set)
    identities = [_read_identity(config, each, processor_digest) for each in sets]
    model = _only_model("objective.reference", column, identities, "weights_digest")
    num_missing = sum(_num_missing(each, f"{column}_chosen") for each in sets)
    num_known = sum(each.num_rows for each in sets) - num_missing
    text = f"{column} of {num_known:,} rows, by {model['weights']}"
    if num_missing:
        text += (
            f"; {num_missing:,} rows without a rejected answer, or unreadable ones, are not used"
        )
    reporter.log(text, "reference")
    if not num_known:
        raise DataError(f"objective.reference: no row of {config.data.train} has {column}")
    return ReferenceLogProbs(column, model["weights"], model["weights_digest"])


def embedding_columns(name: str) -> tuple[str, str]:
    """Return the columns of a score NAME with the embeddings of captions and of images."""
    return f"{name}_captions", f"{name}_embedding"


def open_teacher(
    config: Config, train_set: PreparedSet | PreparedMixture, reporter: RunReporter
) -> tuple[Teacher, str]:
    """Return the embeddings of the teacher for the rows of a run, and the hash of its model.

    Raises:
        DataError: A set has no such columns, or several models wrote them.
        UsageError: They are of other captions, or have another width than the model.
    """
    column = config.objective.teacher
    texts, image = embedding_columns(column)
    sets = _sets_of(train_set)
    used = tuple(parse_captions(config.data.captions or ""))
    identities = []
    for prepared in sets:
        option = "" if column == Objective().teacher else f" --name {column}"
        command = f"mmray score {prepared.folder} --weights TEACHER --embeddings{option}"
        identity = _read_json(prepared, column)
        known = column_types(prepared.manifest.columns)
        if not {texts, image} <= {*known} or identity.get("logit_scale") is None:
            raise DataError(
                f"objective.teacher: {prepared.folder} has no embeddings `{column}` of a teacher: "
                f"run {command}"
            )
        if prepared.manifest.text_columns and used != (identity["captions"],):
            raise UsageError(
                f"objective.teacher: `{column}` of {prepared.folder} is of the captions "
                f"{identity['captions']}: set --data.captions {identity['captions']}, or run "
                f"{command} --captions with the column that is trained on"
            )
        identities.append(identity)
        missing = prepared.values.num_missing([each.key for each in prepared.shards], image)
        if missing:
            text = f"{missing:,} rows of {prepared.folder} have no {image}, and no distillation"
            reporter.log(text, "teacher")
    model = _only_model("objective.teacher", column, identities, "digest")
    width = int(known[image].removeprefix("float16[").removesuffix("]"))
    own_width = config.model.embed_dim if isinstance(config.model, TowerModel | Clip) else width
    is_known = config.model.initial_weights == "none"
    if "feature_distillation" in config.objective.terms and is_known and width != own_width:
        raise UsageError(
            f"objective feature_distillation: embeddings of {model['weights']} have {width} "
            f"dimensions: set --model.embed-dim {width} (not {own_width}), or use objective "
            "distillation"
        )
    reporter.log(f"{column} by {model['weights']}, {width} dimensions", "teacher")
    return Teacher(image, texts, width, model["logit_scale"]), model["digest"]


def _sets_of(train_set: PreparedSet | PreparedMixture) -> Sequence[PreparedSet]:
    return train_set.sets if isinstance(train_set, PreparedMixture) else (train_set,)


def _only_model(
    setting: str, column: str, identities: Sequence[dict[str, Any]], digest: str
) -> dict[str, Any]:
    """Return the model that wrote a column of all sets. Raises DataError if they are several."""
    if len({each[digest] for each in identities}) > 1:
        names = ", ".join(each["weights"] for each in identities)
        raise DataError(f"{setting}: several models wrote {column} of the sets: {names}")
    return identities[0]


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
    spec = config.model
    column = config.objective.reference
    command = f"mmray score {prepared.folder} --weights {spec.initial_weights}"
    if column != type(config.objective)().reference:
        command += f" --name {column}"
    if spec.inputs != type(spec.inputs)(max_tokens=spec.inputs.max_tokens):
        command += " --config FILE, where FILE has what `mmray train ... --print-config` prints"
    identity = _read_json(prepared, f"{column}_chosen")
    if f"{column}_chosen" not in prepared.manifest.columns or not identity:
        raise DataError(
            f"objective.reference: {prepared.folder} has no log-probabilities `{column}` of a "
            f"reference model: run {command}"
        )
    if identity.get("processor") != processor_digest:
        raise DataError(
            f"objective.reference: `{column}` of {prepared.folder} is of {identity['weights']} "
            "with another chat template, tokenizer, size of images, or version of transformers or "
            f"mmray than those of the run: run {command}, with another --name and "
            "--objective.reference"
        )
    return identity


def _read_json(prepared: PreparedSet, group: str) -> dict[str, Any]:
    """Return the content of the file IDENTITY in a folder of columns; {} without it."""
    file = prepared.folder / COLUMNS_DIR / group / IDENTITY
    return orjson.loads(file.read_bytes()) if file.exists() else {}


def _num_missing(prepared: PreparedSet, name: str) -> int:
    """Return the number of rows without a value of a column, of those that a run uses."""
    shards = [shard for shard in prepared.shards if shard.num_kept]
    parts = prepared.values.read([shard.key for shard in shards], [name])
    missing = 0
    for shard, columns in zip(shards, parts, strict=True):
        is_null = columns[name].is_null().to_numpy(zero_copy_only=False)
        missing += int(is_null[shard.kept].sum())
    return missing
