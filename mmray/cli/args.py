"""Command line parsing shared by all commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from mmray.config import Config, recipes
from mmray.errors import UsageError

STYLE = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
BOOLS = {"True": True, "False": False, "true": True, "false": False}  # Python's and YAML's spelling
NONE_REGISTRY = ("None", "null")
Command = TypeVar("Command")

_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _switch(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
    """Parse True or False, in either spelling; a flag without a value is True."""
    if info.type is not bool:
        return None
    return PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="{True,False}",
        instance_from_str=lambda words: BOOLS[words[0]] if words else True,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
        choices=tuple(BOOLS),
    )


@_REGISTRY.primitive_rule
def _nothing(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """Parse None or null."""
    if info.type is not type(None):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{None}",
        instance_from_str=lambda words: None,
        is_instance=lambda value: value is None,
        str_from_instance=lambda value: ["None"],
        choices=NONE_REGISTRY,
    )


def split_args(argv: Sequence[str]) -> tuple[str, list[str], bool]:
    """Return (recipe name, flags, whether --print-config is given)."""
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "sample"
    return name, [word for word in rest if word != "--print-config"], "--print-config" in rest


def parse_run(argv: Sequence[str], verb: str) -> tuple[Config, bool]:
    """Return the config of a recipe name and flags, and whether --print-config is given."""
    name, rest, print_config = split_args(argv)
    named = [word.removeprefix("--").partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")]
    recipe = recipe_for(name, rest).without_conflicting(named)
    description = (
        f"Train the recipe `{name}`; the defaults below are the recipe's values. "
        f"Recipes: {', '.join(recipes.RECIPES)}, or a YAML file. --print-config prints the settings and exits."
    )
    return parse(Config, rest, f"mmray {verb} {name}", recipe, description), print_config


def recipe_for(name: str, words: Sequence[str]) -> Config:
    """Return the recipe with the model kind of `--model.kind`, because it determines the other flags."""
    kind = next((asked for flag, asked in pairwise(words) if flag == "--model.kind"), None)
    kind = next((word.partition("=")[2] for word in words if word.startswith("--model.kind=")), kind)
    recipe = recipes.load(name)
    return recipe if kind is None else recipe.with_model_kind(kind)


def parse(
    command: type[Command],
    words: Sequence[str],
    prog: str,
    default: Command | None = None,
    description: str | None = None,
) -> Command:
    """Parse the arguments as `command`; exit the process for `--help` and invalid flags.

    Raises UsageError for a `--json` that cannot be written.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    typed = tyro.cli(
        command, args=list(words), prog=prog, description=description, config=STYLE, registry=_REGISTRY, **given
    )
    _check_json(vars(typed).get("json"))
    return typed


def require_positive(command: Any, *names: str) -> None:
    """Raise UsageError if one of these numbers is below 1."""
    for name in names:
        if getattr(command, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')}: must be at least 1 (got {getattr(command, name)})")


def _check_json(file: str | None) -> None:
    """Raise UsageError before the work starts if the file cannot be written."""
    if file is None:
        return
    if not Path(file).parent.is_dir():
        raise UsageError(f"--json {file}: folder {Path(file).parent} does not exist; create it or choose another file")
    if Path(file).is_dir():
        raise UsageError(f"--json {file}: is a folder; give a file in it")


def write_json(file: str | None, value: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(value, indent=2) + "\n")
