"""Which evaluator a model takes: by embeddings, or by what it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from mmray.data.store.prepared_set import PreparedSet
from mmray.evaluate.evaluator import Evaluator
from mmray.evaluate.generation import GenerationEvaluator
from mmray.models import protocol

if TYPE_CHECKING:
    from mmray.config import Config

BEST_METRIC = {
    True: "evaluate/loss",
    False: "evaluate/recall_at_1/mean",
}  # by whether it writes: what the best model is


def build_evaluator(config: Config, prepared: PreparedSet, tokenizer_json: str) -> Any:
    """The evaluator of this run's sort of model over a set of held-out rows."""
    inputs = config.model.inputs
    kind = GenerationEvaluator if is_generative(config) else Evaluator
    return kind(prepared, inputs, tokenizer_json, config.evaluate, config.prepare.max_pixels)


def check_evaluable(config: Config, model: nn.Module) -> None:
    """Raise UsageError where the model lacks what its evaluator calls."""
    if not is_generative(config):
        protocol.validate_embedding_model(model, config.model.kind)


def is_generative(config: Config) -> bool:
    """Whether the model writes, instead of giving embeddings."""
    return hasattr(config.model.inputs, "chat")


def best_metric(config: Config) -> str:
    """The metric by which a checkpoint is kept beside the newest."""
    return BEST_METRIC[is_generative(config)]
