"""What a strategy cannot serve, said before anything starts: a pure look at the settings. For trainer.py and bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from mmray.objectives.build import parse_terms

if TYPE_CHECKING:
    from mmray.config import Config


TWO_BRANCHES = ("two_tower", "clip", "siglip")  # kinds of models whose branches share nothing but the loss


def validate(config: Config) -> None:
    """Raise UsageError with every reason why these settings do not go together."""
    reasons = unsupported_reasons(config)
    if reasons:
        raise UsageError("\n".join(reasons))


def unsupported_reasons(config: Config) -> list[str]:
    """Reasons, each with what to do; none: it can be served."""
    train, workers = config.train, config.cluster.max_workers
    reasons = []
    if train.grad_compression != "none" and train.parallel != "ddp":
        reasons.append(
            f"train.grad_compression {train.grad_compression} needs `ddp` (got --train.parallel {train.parallel})"
        )
    if train.parallel in ("single", "branches") and workers != 1:
        reasons.append(f"train.parallel {train.parallel} is one worker's; set --cluster.workers 1 (got {workers})")
    if train.parallel == "fsdp":
        reasons += _sharded(config)
    if train.parallel == "branches":
        reasons += _apart(config)
    if config.batch.micro == "auto" and getattr(config.model, "batch_norm", "") == "synced":
        reasons.append("batch.micro auto cannot be tried with model.batch_norm synced; give --batch.micro")
    return reasons + evaluation_reasons(config) + _regional(config)


def evaluation_reasons(config: Config) -> list[str]:
    """What is asked of an evaluation that the model cannot give."""
    writes = hasattr(config.model.inputs, "chat")
    if config.evaluate.language is not None and not config.model.inputs.language_token:
        return [
            "evaluate.language: the model has no token of a language; set --model.inputs.language-token, as to '[{}]'"
        ]
    if writes and config.evaluate.classes:
        return ["evaluate.classes: a model that writes has no embeddings to tell classes apart by; leave it empty"]
    if not writes and config.evaluate.num_generations:
        return [f"evaluate.num_generations: model.kind `{config.model.kind}` does not write; set it to 0"]
    return []


def _regional(config: Config) -> list[str]:
    """What objective `region_text` and the head for it lack."""
    model, learned = config.model, "region_text" in parse_terms(config.objective.kind)
    head = bool(getattr(model, "regions", False))
    reasons = []
    if learned and model.kind != "fusion" and ":" not in model.kind:
        reasons.append(f"objective region_text is for model.kind `fusion`, not `{model.kind}`; set --model.kind fusion")
    elif learned and model.kind == "fusion" and not head:
        reasons.append("objective region_text needs a head that names boxes; set --model.regions True")
    if head and not learned:
        reasons.append("model.regions: nothing teaches the head; add `+ region_text` to --objective.kind")
    if (learned or head) and not model.inputs.max_boxes:
        reasons.append("objective region_text needs boxes in the batches; set --model.inputs.max-boxes, as to 32")
    return reasons


def _sharded(config: Config) -> list[str]:
    reasons = []
    if config.cluster.min_workers < 2:
        reasons.append("train.parallel fsdp shards over workers; set --cluster.workers 2 or more, or take `single`")
    if config.train.precision == "fp16":
        reasons.append("train.parallel fsdp takes fp32 or bf16; set --train.precision bf16")
    if config.train.channels_last:
        reasons.append(
            "train.channels_last: what fsdp cuts up is laid out row by row; take `ddp`, or --train.channels_last False"
        )
    if config.train.ema:
        reasons.append("train.ema averages whole weights, which fsdp cuts up; take `ddp`, or --train.ema 0")
    return reasons


def _apart(config: Config) -> list[str]:
    model, reasons = config.model, []
    if model.kind not in TWO_BRANCHES:
        reasons.append(f"train.parallel branches needs two branches, not model.kind `{model.kind}`; take `ddp`")
    if (
        getattr(getattr(model, "image", None), "name", "").startswith(("resnet", "transformers"))
        and getattr(model, "batch_norm", "frozen") != "frozen"
    ):
        reasons.append(
            "train.parallel branches cuts micro-batches, which BatchNorm sees; set --model.batch-norm frozen"
        )
    if getattr(getattr(model, "text", None), "dropout", 0):
        reasons.append("train.parallel branches cannot draw dropout twice alike; set --model.text.dropout 0")
    if getattr(model, "patch_dropout", 0) or (model.lora.rank and model.lora.dropout):
        reasons.append(
            "train.parallel branches cannot draw what is dropped twice alike; set --model.patch-dropout 0 and "
            "--model.lora.dropout 0"
        )
    return reasons


# What a head for regions needs of the data, settled before anything starts: names of the labels, and boxes at all.
MOST_LABELS = 20_000  # each is read by the text branch in every micro-batch
LOOKED_AT = 128  # rows of a set


def with_region_labels(model: Any, train_sets: Sequence[PreparedSet], eval_set: PreparedSet | None) -> Any:
    """The `model` section with `region_labels`; those that are not set are the training sets' own.

    Raises UsageError where there are none, or sets mean different things by a label; DataError where no row of a
    sample has a labelled box.
    """
    if not getattr(model, "regions", False):
        return model
    names = model.region_labels or _names(train_sets)
    if eval_set is not None and not model.region_labels:
        _agree([*train_sets, eval_set])
    if not any(_has_boxes(each) for each in train_sets):
        raise DataError(
            f"none of {LOOKED_AT} rows of {train_sets[0].storage.address} has a box with a label: use a source that "
            "has (COCO's instances, or rows with `boxes` and `box_labels`), or leave --model.regions off"
        )
    return model.replace(region_labels=names)


def _names(sets: Sequence[PreparedSet]) -> tuple[str, ...]:
    """Names by label, empty where a label has none. Raises UsageError."""
    known = _agree(sets)
    if not known:
        raise UsageError(
            f"model.regions: {sets[0].storage.address} does not know what its box labels are called; give the names of "
            "labels 0, 1, ... with --model.region-labels"
        )
    if max(known) >= MOST_LABELS:
        raise UsageError(
            f"model.regions: {sets[0].storage.address} has a box label {max(known)} ({known[max(known)]}); they count "
            f"from 0 and are fewer than {MOST_LABELS:,}: number them anew in the source"
        )
    return tuple(known.get(label, "") for label in range(max(known) + 1))


def _agree(sets: Sequence[PreparedSet]) -> dict[int, str]:
    """The names of all sets. Raises UsageError where two of them call a label differently."""
    known: dict[int, str] = {}
    for each in sets:
        for label, name in ((int(label), name) for label, name in each.manifest.box_names.items()):
            if known.setdefault(label, name) != name:
                raise UsageError(
                    f"model.regions: box label {label} is `{known[label]}` in one set and `{name}` in "
                    f"{each.storage.address}; number the labels of both alike in their sources"
                )
    return known


def _has_boxes(prepared: PreparedSet) -> bool:
    """Whether some of a sample of rows, spread over the set, has a labelled box."""
    rows = np.unique(np.linspace(0, prepared.num_rows - 1, LOOKED_AT).astype(np.int64))
    return any(_has_box(prepared, row) for row in rows)


def _has_box(prepared: PreparedSet, row: int) -> bool:
    try:
        return bool(prepared.read(np.array([row]))[0].box_labels)
    except (OSError, ValueError):  # a damaged row is named where it is trained on
        return False
