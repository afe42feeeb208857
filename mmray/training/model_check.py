"""Checks of names of weights in the settings, with a model that has neither memory nor weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmray.builtin import SAMPLE_VLM
from mmray.config import Config, Vlm
from mmray.engine.optimizer import build_optimizer, freeze_parameters
from mmray.models.build import build_without_weights
from mmray.models.protocol import Architecture

_VOCAB_SIZE = 1024  # names of weights do not depend on it


def check_patterns(config: Config) -> None:
    """Check that the patterns of names in the settings match weights of the model, without reading
    weights.

    A model whose layers are only known from weights on the hub or in a checkpoint file is not
    checked.

    Args:
        config: Settings of a run.

    Raises:
        UsageError: A pattern of `optimizer.freeze`, `optimizer.lr_multipliers` or
            `model.lora.targets` matches nothing, or no weight is left to train.
    """
    known, architecture = _architecture(config.model)
    if not known:
        return
    model = build_without_weights(config.model, _VOCAB_SIZE, architecture)
    freeze_parameters(model, config.optimizer.freeze)
    build_optimizer(model, config.optimizer.replace(kind="adamw", settings={}))


def _architecture(spec: Any) -> tuple[bool, Architecture]:
    """Return whether the layers are known without reading weights, and what describes them."""
    from transformers import AutoConfig

    def saved_config(weights: str) -> dict[str, Any] | None:
        try:
            config = AutoConfig.from_pretrained(Path(weights).expanduser(), local_files_only=True)
        except (OSError, ValueError, ImportError):
            return None
        saved: dict[str, Any] = config.to_dict()
        return saved

    weights = getattr(spec, "weights", "none")
    if weights == SAMPLE_VLM:
        return False, None
    if weights != "none":
        config = saved_config(weights)
        return config is not None, {"config": config} | (
            {"unused": []} if isinstance(spec, Vlm) else {}
        )
    towers = {"image": spec.image, "text": spec.text} if hasattr(spec.image, "weights") else {}
    given = {part: tower.weights for part, tower in towers.items() if tower.weights != "none"}
    if not given:
        return True, {}
    configs = {part: saved_config(path) for part, path in given.items()}
    return None not in configs.values() and "image" in given, configs
