"""Every setting of mmray: typed, ranged, documented once, frozen.

A config is built by a recipe (mmray/recipes.py) or read from YAML, changed by `--section.field value` flags, checked
here on the driver before any resource is asked for, and saved unchanged with the run and with each checkpoint.
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import Field

from mmray.config.augment import Augment
from mmray.config.data import Data, Prepare
from mmray.config.inputs import Chat, ChatInputs, Fit, Inputs, Interpolation
from mmray.config.model import (
    AnyModel,
    Clip,
    ClipImage,
    ClipText,
    CrossAttention,
    Decoder,
    Fusion,
    Generative,
    ImageTower,
    Lora,
    Model,
    Objective,
    Own,
    Siglip,
    TextTower,
    TwoTower,
    section_of,
)
from mmray.config.place import Cluster, Run
from mmray.config.section import Section
from mmray.config.training import Batch, Evaluate, Optimizer, Train
from mmray.errors import UsageError

__all__ = [
    "Augment",
    "Batch",
    "Chat",
    "ChatInputs",
    "Clip",
    "ClipImage",
    "ClipText",
    "Cluster",
    "Config",
    "CrossAttention",
    "Data",
    "Decoder",
    "Evaluate",
    "Fit",
    "Fusion",
    "Generative",
    "ImageTower",
    "Inputs",
    "Interpolation",
    "Lora",
    "Model",
    "Objective",
    "Optimizer",
    "Own",
    "Prepare",
    "Run",
    "Section",
    "Siglip",
    "TextTower",
    "Train",
    "TwoTower",
    "from_yaml",
    "section_of",
    "to_yaml",
]


class Config(Section):
    """One run, whole."""

    recipe: str = Field("custom", description="The recipe it began as.")
    model: AnyModel = TwoTower()
    objective: Objective = Objective()
    prepare: Prepare = Prepare()
    data: Data = Data()
    augment: Augment = Augment()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    cluster: Cluster = Cluster()
    run: Run = Run()

    def on_cluster(self, **settings: Any) -> Config:
        """The same run with these settings of `cluster`."""
        return self.model_copy(update={"cluster": self.cluster.model_copy(update=settings)})


def to_yaml(config: Section) -> str:
    """YAML that `from_yaml` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def from_yaml(text: str, where: str) -> Config:
    """Config of a YAML text; `where` names the file in errors. Raises UsageError."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{where} holds no settings: write `section: {{field: value}}`, as --print-config does")
    try:
        return Config.model_validate(values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
