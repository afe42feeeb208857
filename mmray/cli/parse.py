"""From words typed to settings: what the verbs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

from mmray import recipes
from mmray.config import Config, section_of

STYLE = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)


def split_run(argv: Sequence[str]) -> tuple[str, list[str], bool]:
    """(the recipe's name, the flags, whether the config is only to be printed)."""
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "sample"
    return name, [word for word in rest if word != "--print-config"], "--print-config" in rest


def parse_run(argv: Sequence[str], verb: str) -> tuple[Config, bool]:
    """The config that a recipe name and flags mean, and whether it is only to be printed."""
    name, rest, print_config = split_run(argv)
    recipe = of_kind(recipes.load(name), rest)
    description = (
        f"Train the recipe `{name}`; each setting below has the recipe's value. "
        f"Recipes: {', '.join(recipes.RECIPES)}, or a YAML file. --print-config prints the settings and ends."
    )
    config = tyro.cli(
        Config, args=rest, default=recipe, prog=f"mmray {verb} {name}", description=description, config=STYLE
    )
    return config, print_config


def of_kind(recipe: Config, words: Sequence[str]) -> Config:
    """The recipe, with another kind of model where `--model.kind` among the words asks for it.

    Which flags there are depends on the kind, so it is settled before the rest is read. The other kind begins with its
    own defaults, and with the recipe's inputs.
    """
    kind = next((asked for flag, asked in pairwise(words) if flag == "--model.kind"), None)
    kind = next((word.partition("=")[2] for word in words if word.startswith("--model.kind=")), kind)
    if kind is None or kind == recipe.model.kind:
        return recipe
    section = section_of(kind)
    inputs: Any = section.model_fields["inputs"].annotation
    shared = {name: value for name, value in vars(recipe.model.inputs).items() if name in inputs.model_fields}
    model = section(kind=kind, inputs=inputs(**shared))
    return recipe.model_copy(update={"model": model})


def write_json(file: str | None, value: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(value, indent=2) + "\n")
