"""Checks of settings that contradict each other, before anything starts. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from mmray.objectives.build import parse_terms

if TYPE_CHECKING:
    from mmray.config import Config


TWO_BRANCHES = ("two_tower", "clip", "siglip")  # model kinds whose branches share only the loss


def validate(config: Config) -> None:
    """Raise UsageError with every reason why these settings cannot be combined."""
    reasons = unsupported_reasons(config)
    if reasons:
        raise UsageError("\n".join(reasons))


def unsupported_reasons(config: Config) -> list[str]:
    """Reasons, each with a fix; empty if the settings are supported."""
    train, workers = config.train, config.cluster.max_workers
    reasons = []
    if train.grad_compression != "none" and train.parallel != "ddp":
        reasons.append(
            f"train.grad_compression {train.grad_compression} needs `ddp` (got --train.parallel {train.parallel})"
        )
    if train.parallel in ("single", "branches") and workers != 1:
        reasons.append(f"train.parallel {train.parallel} uses one worker; set --cluster.workers 1 (got {workers})")
    if train.parallel == "fsdp":
        reasons += _fsdp_reasons(config)
    if train.parallel == "branches":
        reasons += _branches_reasons(config)
    if config.batch.micro == "auto" and getattr(config.model, "batch_norm", "") == "synced":
        reasons.append("batch.micro auto does not support model.batch_norm synced; set --batch.micro")
    return reasons + evaluation_reasons(config) + _region_reasons(config)


def evaluation_reasons(config: Config) -> list[str]:
    """Reasons why the model cannot be evaluated as configured."""
    generative = hasattr(config.model.inputs, "chat")
    if config.evaluate.language is not None and not config.model.inputs.language_token:
        return [
            "evaluate.language: the model has no language tokens; set --model.inputs.language-token, for example '[{}]'"
        ]
    if generative and config.evaluate.classes:
        return ["evaluate.classes: a generative model has no embeddings for classification; leave it empty"]
    if not generative and config.evaluate.num_generations:
        return [f"evaluate.num_generations: model.kind `{config.model.kind}` is not generative; set it to 0"]
    return []


def _region_reasons(config: Config) -> list[str]:
    """Reasons why objective `region_text` and its head do not fit together."""
    model, learned = config.model, "region_text" in parse_terms(config.objective.kind)
    head = bool(getattr(model, "regions", False))
    reasons = []
    if learned and model.kind != "fusion" and ":" not in model.kind:
        reasons.append(f"objective region_text is for model.kind `fusion`, not `{model.kind}`; set --model.kind fusion")
    elif learned and model.kind == "fusion" and not head:
        reasons.append("objective region_text needs a region head; set --model.regions True")
    if head and not learned:
        reasons.append("model.regions: no objective trains the head; add `+ region_text` to --objective.kind")
    if (learned or head) and not model.inputs.max_boxes:
        reasons.append("objective region_text needs boxes in the batches; set --model.inputs.max-boxes, for example 32")
    return reasons


def _fsdp_reasons(config: Config) -> list[str]:
    reasons = []
    if config.cluster.min_workers < 2:
        reasons.append("train.parallel fsdp shards over workers; set --cluster.workers 2 or more, or use `single`")
    if config.train.precision == "fp16":
        reasons.append("train.parallel fsdp supports fp32 and bf16; set --train.precision bf16")
    if config.train.channels_last:
        reasons.append(
            "train.channels_last: FSDP shards do not preserve channels_last; use `ddp`, or --train.channels_last False"
        )
    if config.train.ema:
        reasons.append("train.ema needs whole weights, which FSDP shards; use `ddp`, or --train.ema 0")
    return reasons


def _branches_reasons(config: Config) -> list[str]:
    model, reasons = config.model, []
    if model.kind not in TWO_BRANCHES:
        reasons.append(f"train.parallel branches needs two branches, not model.kind `{model.kind}`; use `ddp`")
    if (
        getattr(getattr(model, "image", None), "name", "").startswith(("resnet", "transformers"))
        and getattr(model, "batch_norm", "frozen") != "frozen"
    ):
        reasons.append(
            "train.parallel branches splits micro-batches, which changes BatchNorm; set --model.batch-norm frozen"
        )
    if getattr(getattr(model, "text", None), "dropout", 0):
        reasons.append("train.parallel branches cannot repeat dropout masks; set --model.text.dropout 0")
    if getattr(model, "patch_dropout", 0):
        reasons.append("train.parallel branches cannot repeat dropout masks; set --model.patch-dropout 0")
    return reasons


MAX_LABELS = 20_000  # the text branch embeds each label in every micro-batch
SAMPLED_ROWS = 128  # of a set, to find boxes


def with_region_labels(model: Any, train_sets: Sequence[PreparedSet], eval_set: PreparedSet | None) -> Any:
    """The `model` section with `region_labels`; by default the label names of the training sets.

    Raises UsageError if there are none, or sets name a label differently; DataError if no sampled row has a labelled
    box.
    """
    if not getattr(model, "regions", False):
        return model
    names = model.region_labels or _label_names(train_sets)
    if eval_set is not None and not model.region_labels:
        _merge_names([*train_sets, eval_set])
    if not any(_has_boxes(each) for each in train_sets):
        raise DataError(
            f"none of {SAMPLED_ROWS} rows of {train_sets[0].storage.address} has a labelled box: use a source with "
            "boxes (COCO instances, or rows with `boxes` and `box_labels`), or set --model.regions False"
        )
    return model.replace(region_labels=names)


def _label_names(sets: Sequence[PreparedSet]) -> tuple[str, ...]:
    """Label names by number, empty if a label has none. Raises UsageError."""
    known = _merge_names(sets)
    if not known:
        raise UsageError(
            f"model.regions: {sets[0].storage.address} has no names of its box labels; set the names of labels "
            "0, 1, ... with --model.region-labels"
        )
    if max(known) >= MAX_LABELS:
        raise UsageError(
            f"model.regions: {sets[0].storage.address} has a box label {max(known)} ({known[max(known)]}); they count "
            f"from 0 and are fewer than {MAX_LABELS:,}: renumber them in the source"
        )
    return tuple(known.get(label, "") for label in range(max(known) + 1))


def _merge_names(sets: Sequence[PreparedSet]) -> dict[int, str]:
    """Merge the label names of the sets. Raises UsageError if two sets name a label differently."""
    known: dict[int, str] = {}
    for each in sets:
        for label, name in ((int(label), name) for label, name in each.manifest.box_names.items()):
            if known.setdefault(label, name) != name:
                raise UsageError(
                    f"model.regions: box label {label} is `{known[label]}` in one set and `{name}` in "
                    f"{each.storage.address}; use the same label numbers in both sources"
                )
    return known


def _has_boxes(prepared: PreparedSet) -> bool:
    """Return whether a sampled row has a labelled box."""
    rows = np.unique(np.linspace(0, prepared.num_rows - 1, SAMPLED_ROWS).astype(np.int64))
    return any(_has_box(prepared, row) for row in rows)


def _has_box(prepared: PreparedSet, row: int) -> bool:
    try:
        return bool(prepared.read(np.array([row]))[0].box_labels)
    except (OSError, ValueError):  # a damaged row is reported during training
        return False
