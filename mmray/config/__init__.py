# ruff: noqa: F401 - the sections are imported from here
"""All settings of mmray as typed, validated, immutable sections; a config comes from a recipe or
YAML and flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import Field

from mmray.config.base import Section
from mmray.config.cluster import Cluster, Run
from mmray.config.data import Augment, Data, Prepare
from mmray.config.model import AnyModel, CustomModel, Inputs, Lora, Model, Objective, model_section
from mmray.config.model_kinds import (
    AudioTower,
    CaptionDecoder,
    Clip,
    ClipImage,
    ClipInputs,
    ClipText,
    CrossAttention,
    FrameTransformer,
    ImageTower,
    Naflex,
    NaflexImage,
    NaflexInputs,
    Siglip,
    TextTower,
    Towers,
    TwoTower,
    Vlm,
    VlmInputs,
)
from mmray.config.training import Batch, EvalSettings, Evaluate, Optimizer, Train
from mmray.errors import UsageError

LENGTHS = ("train.steps", "train.samples", "train.epochs")  # mutually exclusive


class Config(Section):
    """The settings of one run."""

    recipe: str = Field("custom", description="Name of the recipe that the settings started from.")
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

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of a row: of dpo those of its two conversations."""
        return int(self.model.inputs.max_tokens) * (2 if self.objective.is_dpo else 1)

    def with_cluster(self, **settings: object) -> Config:
        """Return a copy with some fields of the section `cluster` changed."""
        return self.replace(cluster=self.cluster.replace(**settings))

    def with_model_kind(self, kind: str) -> Config:
        """Return a copy with the default model of another kind, and the inputs that both kinds
        have.

        Raises:
            UsageError: The kind is unknown, or the inputs are invalid for it.
        """
        if kind == self.model.kind:
            return self
        section = model_section(kind)
        inputs = section.model_fields["inputs"].annotation
        assert inputs is not None
        shared = {name: value for name, value in self.model.inputs if name in inputs.model_fields}
        return self.replace(model=section(kind=kind, inputs=inputs(**shared)))

    def without_overridden_length_and_batch(self, given: Collection[str]) -> Config:
        """Return a copy without the length, the settings of the batch and the weights that would
        contradict the settings that are set next.
        """
        train = self.train
        if any(name in LENGTHS for name in given):
            train = train.replace(**dict.fromkeys(name.partition(".")[2] for name in LENGTHS))
        model = self.model
        names = {"model.weights", "model.vision"} & {*given}
        if names == {"model.vision"}:
            model = model.replace(weights="none")
        elif names == {"model.weights"} and isinstance(model, Vlm):
            model = model.replace(vision="none", language="none", projector="mlp")
        return self.replace(train=train, batch=self.batch.without_overridden(given), model=model)


def to_yaml(config: Section) -> str:
    """Format a config or a section as YAML, from which `from_yaml` reads an equal config."""
    return yaml.dump(config.to_json(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes the texts which _Loader would read as numbers."""


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"train": {"steps": 10}} becomes {"train.steps": 10}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


class _Loader(yaml.SafeLoader):
    """A loader that refuses repeated keys: the last would replace the others, such as a whole
    section.
    """

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise yaml.composer.ComposerError(
                    None, None, f"`{key.value}` is given twice", key.start_mark
                )
            names.add(key.value)
        return node


# `1e-3` is a text for PyYAML, and a number for JSON and flags.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"),
        list("-+.0123456789"),
    )


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Return a number, or its text if only YAML 1.1 reads it so: 0100 as 64, and 1:30 as 90."""
    if ":" in node.value or re.fullmatch(r"[-+]?0\d+", node.value):
        return node.value
    return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _construct_number)


def from_yaml(
    text: str | bytes,
    where: str,
    recipes: Mapping[str, Callable[[], Config]] = MappingProxyType({}),
) -> Config:
    """Return the config in a YAML text.

    Settings that are missing have the values of the recipe that the text names (`recipe: clip`).
    Without a recipe of this name they have their defaults.

    Args:
        text: YAML with `section: {field: value}`; bytes must be UTF-8.
        where: Path of the file, for errors.
        recipes: By name of the recipe, a function without arguments that returns its config; {}: no
            recipe is known, and missing settings have their defaults.

    Raises:
        UsageError: The YAML, a setting or the name of the recipe is invalid.
    """
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise UsageError(f"{where} is not valid YAML in UTF-8: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(
            f"{where} contains no settings; write `section: {{field: value}}`, as "
            "--print-config does"
        )
    try:
        recipe = recipes.get(str(values.get("recipe")))
        name = values.get("recipe", "custom")
        if recipes and recipe is None and name != "custom" and "model" not in values:
            known = ", ".join(recipes)
            raise UsageError(
                f"recipe: unknown recipe `{name}`; use one of {known}, or write a "
                "`model` section instead"
            )
        return Config.model_validate(values) if recipe is None else override(recipe(), values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def override(recipe: Config, values: dict[str, Any]) -> Config:
    """Return a recipe with some settings changed and all settings validated.

    A training length (such as `train.steps`) or a batch setting replaces the ones of the recipe
    that contradict it. Another `model.kind` replaces the section `model` by its defaults, except
    for the inputs.

    Args:
        recipe: The config to start from.
        values: {section: {field: value}}, such as {"train": {"steps": 10}}.

    Raises:
        UsageError: A setting is unknown or invalid.
    """
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    overridden_settings = [
        f"{name}.{key}"
        for name, fields in sections.items()
        for key in fields
        if fields[key] is not None
    ]
    kind = str(sections.get("model", {}).get("kind", recipe.model.kind))
    base = recipe.with_model_kind(kind).without_overridden_length_and_batch(overridden_settings)

    def merge(old: object, new: object) -> Any:
        if isinstance(old, dict) and isinstance(new, dict):
            return old | {name: merge(old.get(name), value) for name, value in new.items()}
        return new

    return Config.model_validate(merge(base.to_json(), values))
