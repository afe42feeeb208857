"""Checks of settings that contradict each other, before anything starts. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmray.objectives.build import parse_terms

if TYPE_CHECKING:
    from mmray.config import Config

TWO_TOWER_KINDS = ("two_tower", "clip", "siglip")  # model kinds of an image and a text branch that share only the loss


def unsupported_reasons(config: Config) -> list[str]:
    """Reasons, each with a fix; empty if the settings are supported."""
    train, kind, workers = config.train, config.model.kind, config.cluster.max_workers
    model: Any = config.model
    reasons, batch_norm = evaluation_reasons(config), getattr(model, "batch_norm", "frozen")
    region, head = "region_text" in parse_terms(config.objective.kind), bool(getattr(model, "regions", False))
    if train.grad_compression != "none" and train.parallel != "ddp":
        reasons.append(
            f"train.grad_compression {train.grad_compression} needs `ddp`, not --train.parallel {train.parallel}"
        )
    if train.parallel in ("single", "branches") and workers != 1:
        reasons.append(f"train.parallel {train.parallel} uses one worker; set --cluster.workers 1 (got {workers})")
    if train.parallel == "fsdp":
        if config.cluster.min_workers < 2:
            reasons.append("train.parallel fsdp shards over workers; set --cluster.workers 2 or more, or use `single`")
        if train.precision == "fp16":
            reasons.append("fsdp supports fp32 and bf16; set --train.precision bf16")
        if train.channels_last:
            reasons.append("fsdp needs the default layout; set --train.channels_last False, or use `ddp`")
        if train.ema:
            reasons.append("train.ema needs whole weights, which fsdp shards; use `ddp`, or --train.ema 0")
        if config.evaluate.num_generations:
            reasons.append("evaluate.num_generations needs whole weights, which fsdp shards; set it to 0")
    if train.parallel == "branches":
        if kind not in TWO_TOWER_KINDS:
            reasons.append(f"train.parallel branches needs an image and a text tower, not `{kind}`; use `ddp`")
        if getattr(getattr(model, "text", None), "dropout", 0) or getattr(model, "patch_dropout", 0):
            problem = "train.parallel branches cannot repeat dropout masks"
            reasons.append(f"{problem}; set model.text.dropout and model.patch_dropout to 0")
    if config.batch.micro == "auto" and batch_norm == "synced":
        reasons.append("batch.micro auto does not support model.batch_norm synced; set --batch.micro")
    if region and kind != "fusion" and ":" not in kind:
        reasons.append(f"objective region_text is for model.kind `fusion`, not `{kind}`; set --model.kind fusion")
    if region and kind == "fusion" and not head:
        reasons.append("objective region_text needs a head; set --model.regions True")
    if head and not region:
        reasons.append("model.regions: no objective trains it; add `+ region_text` to --objective.kind")
    if (region or head) and not model.inputs.max_boxes:
        reasons.append("objective region_text needs boxes in the batches; set --model.inputs.max-boxes, for example 32")
    return reasons


def evaluation_reasons(config: Config) -> list[str]:
    """Reasons why the model cannot be evaluated as configured."""
    generative = hasattr(config.model.inputs, "chat")
    if config.evaluate.language is not None and not config.model.inputs.language_token:
        return ["evaluate.language: the model has no language tokens; set --model.inputs.language-token, e.g. '[{}]'"]
    if generative and config.evaluate.classes:
        return ["evaluate.classes: a generative model has no embeddings for classification; leave it empty"]
    if not generative and config.evaluate.num_generations:
        return [f"evaluate.num_generations: model.kind `{config.model.kind}` is not generative; set it to 0"]
    return []
