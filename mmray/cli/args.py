"""From words typed to settings: what the verbs share."""

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
SWITCH = {"True": True, "False": False, "true": True, "false": False}  # in Python's words, and in YAML's
NOTHING = ("None", "null")
Command = TypeVar("Command")

_WORDS = ConstructorRegistry()


@_WORDS.primitive_rule
def _switch(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
    """True or False, in either spelling; a switch that stands alone is on."""
    if info.type is not bool:
        return None
    return PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="{True,False}",
        instance_from_str=lambda words: SWITCH[words[0]] if words else True,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
        choices=tuple(SWITCH),
    )


@_WORDS.primitive_rule
def _nothing(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """No value, in either spelling."""
    if info.type is not type(None):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{None}",
        instance_from_str=lambda words: None,
        is_instance=lambda value: value is None,
        str_from_instance=lambda value: ["None"],
        choices=NOTHING,
    )


def split_run(argv: Sequence[str]) -> tuple[str, list[str], bool]:
    """(the recipe's name, the flags, whether the config is only to be printed)."""
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "sample"
    return name, [word for word in rest if word != "--print-config"], "--print-config" in rest


def parse_run(argv: Sequence[str], verb: str) -> tuple[Config, bool]:
    """The config that a recipe name and flags mean, and whether it is only to be printed."""
    name, rest, print_config = split_run(argv)
    named = [word.removeprefix("--").partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")]
    recipe = recipe_for(name, rest).without_conflicting(named)
    description = (
        f"Train the recipe `{name}`; each setting below has the recipe's value. "
        f"Recipes: {', '.join(recipes.RECIPES)}, or a YAML file. --print-config prints the settings and ends."
    )
    return parsed(Config, rest, f"mmray {verb} {name}", recipe, description), print_config


def recipe_for(name: str, words: Sequence[str]) -> Config:
    """The recipe, with another kind of model where `--model.kind` among the words asks for it.

    Which flags there are depends on the kind, so it is settled before the rest is read.
    """
    kind = next((asked for flag, asked in pairwise(words) if flag == "--model.kind"), None)
    kind = next((word.partition("=")[2] for word in words if word.startswith("--model.kind=")), kind)
    recipe = recipes.load(name)
    return recipe if kind is None else recipe.with_model_kind(kind)


def parsed(
    command: type[Command],
    words: Sequence[str],
    prog: str,
    default: Command | None = None,
    description: str | None = None,
) -> Command:
    """What was typed, as the command's own type; the process ends for `--help`, and for words that mean nothing.

    Raises UsageError for a `--json` that cannot be written.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    typed = tyro.cli(
        command, args=list(words), prog=prog, description=description, config=STYLE, registry=_WORDS, **given
    )
    _check_json(vars(typed).get("json"))
    return typed


def at_least_one(command: Any, *names: str) -> None:
    """Raise UsageError where one of these numbers of a command is below 1."""
    for name in names:
        if getattr(command, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')}: at least 1 (got {getattr(command, name)})")


def _check_json(file: str | None) -> None:
    """Raise UsageError, before hours of work, for a file that cannot be written at their end."""
    if file is None:
        return
    if not Path(file).parent.is_dir():
        raise UsageError(f"--json {file}: there is no folder {Path(file).parent}; make it, or name another file")
    if Path(file).is_dir():
        raise UsageError(f"--json {file}: it is a folder; name a file in it")


def write_json(file: str | None, value: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(value, indent=2) + "\n")
