"""Every setting of mmray: typed, ranged, documented once, frozen.

A config is built by a recipe (mmray/recipes.py) or read from YAML, changed by `--section.field value` flags, checked
here on the driver before any resource is asked for, and saved unchanged with the run and with each checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import Field

from mmray.config.base import Section
from mmray.config.cluster import Cluster, Run
from mmray.config.data import Augment, Data, Prepare
from mmray.config.model import (
    AnyModel,
    Chat,
    ChatInputs,
    Clip,
    ClipImage,
    ClipText,
    CrossAttention,
    Decoder,
    Fit,
    Fusion,
    Generative,
    ImageTower,
    Inputs,
    Interpolation,
    Lora,
    Model,
    Objective,
    Own,
    Siglip,
    TextTower,
    TwoTower,
    section_of,
)
from mmray.config.training import Batch, Evaluate, Optimizer, Scoring, Train
from mmray.errors import UsageError

LENGTHS = ("train.steps", "train.samples", "train.epochs")  # a run has one of them

__all__ = [
    "LENGTHS",
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
    "Scoring",
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
        """The same run with these settings of `cluster`. Raises UsageError."""
        return self.replace(cluster=self.cluster.replace(**settings))

    def of_kind(self, kind: str) -> Config:
        """The same run of another kind of model, with that kind's defaults and this one's inputs. Raises UsageError."""
        if kind == self.model.kind:
            return self
        section = section_of(kind)
        inputs: Any = section.model_fields["inputs"].annotation
        shared = {name: value for name, value in vars(self.model.inputs).items() if name in inputs.model_fields}
        return self.replace(model=section(kind=kind, inputs=inputs(**shared)))

    def making_way(self, named: Collection[str]) -> Config:
        """The same run without what the `named` settings (`section.field`) take the place of.

        That is its length where one of them is a length, and its global batch where they are micro and accumulation.
        """
        update: dict[str, Any] = {}
        if any(name in LENGTHS for name in named):
            update["train"] = self.train.replace(**dict.fromkeys(name.partition(".")[2] for name in LENGTHS))
        if {"batch.micro", "batch.accumulation"} <= set(named) and "batch.global" not in named:
            update["batch"] = self.batch.replace(global_=None)
        return self.replace(**update)


def to_yaml(config: Section) -> str:
    """YAML that `from_yaml` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def from_yaml(text: str, where: str, recipes: Mapping[str, Callable[[], Config]] = MappingProxyType({})) -> Config:
    """Config of a YAML text; `where` names the file in errors.

    What it leaves out is as in the one of `recipes` that its `recipe` names; else at its default. Raises UsageError.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{where} holds no settings: write `section: {{field: value}}`, as --print-config does")
    try:
        recipe, name = recipes.get(str(values.get("recipe"))), values.get("recipe", "custom")
        if recipes and recipe is None and name != "custom" and "model" not in values:
            known = f"one of {', '.join(recipes)}"
            raise UsageError(f"recipe: there is no `{name}`; name {known}, or leave it out and write a `model` section")
        return Config.model_validate(values if recipe is None else _over(recipe(), values))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _over(recipe: Config, values: dict[str, Any]) -> dict[str, Any]:
    """The recipe's settings as YAML holds them, with these in their place."""
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    named = [f"{name}.{key}" for name, fields in sections.items() for key in fields if fields[key] is not None]
    below = recipe.of_kind(str(sections.get("model", {}).get("kind", recipe.model.kind))).making_way(named)
    return _merged(below.model_dump(mode="json", by_alias=True), values)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Groups of settings one over the other, group by group."""
    both = {
        name: _merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return below | both
