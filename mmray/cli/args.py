"""Command line parsing shared by all commands."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from mmray.config import Config, recipes
from mmray.errors import UsageError

STYLE = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
BOOLS = {"True": True, "False": False, "true": True, "false": False}  # Python's and YAML's spelling
Command = TypeVar("Command")
RunPath = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
SourcePath = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SOURCE")]]
OutPath = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="OUT")]]

REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _parse_bool(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
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


def split_args(argv: Sequence[str]) -> tuple[str, list[str], bool]:
    """Return (recipe name, flags, whether --print-config is given)."""
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "sample"
    return name, [word for word in rest if word != "--print-config"], "--print-config" in rest


def flag_values(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of `--flag value` and `--flag=value`, before the flags are parsed."""
    pairs = [*pairwise(words), *(tuple(word.split("=", 1)) for word in words if "=" in word)]
    return [value for given, value in pairs if given == flag]


def load_recipe(name: str, words: Sequence[str]) -> Config:
    """Return the recipe with the model kind of `--model.kind`, because it determines the other
    flags.
    """
    recipe, kinds = recipes.load(name), flag_values("--model.kind", words)
    return recipe.with_model_kind(kinds[-1]) if kinds else recipe


def parse_config(argv: Sequence[str], command_name: str) -> tuple[Config, bool]:
    """Return the config of a recipe name and flags, and whether --print-config is given."""
    name, rest, print_config = split_args(argv)
    given = [
        word.removeprefix("--").partition("=")[0].replace("-", "_")
        for word in rest
        if word.startswith("--")
    ]
    description = (
        f"Train the recipe `{name}`; the defaults below are the recipe's values. "
        f"Recipes: {', '.join(recipes.RECIPES)}, or a YAML file. --print-config prints the "
        "settings and exits."
    )
    recipe = load_recipe(name, rest).without_overridden_length_and_batch(given)
    return parse_args(
        Config, rest, f"mmray {command_name} {name}", recipe, description
    ), print_config


def parse_args(
    command: type[Command],
    words: Sequence[str],
    prog: str,
    default: Command | None = None,
    description: str | None = None,
) -> Command:
    """Parse the arguments as `command`; exits for --help and invalid flags, UsageError if --json is
    not writable.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    parsed = tyro.cli(
        command,
        args=list(words),
        prog=prog,
        description=description,
        config=STYLE,
        registry=REGISTRY,
        **given,
    )
    file = vars(parsed).get("json")
    if file is not None and not Path(file).parent.is_dir():
        raise UsageError(
            f"--json {file}: folder {Path(file).parent} does not exist; create it or "
            "choose another file"
        )
    if file is not None and Path(file).is_dir():
        raise UsageError(f"--json {file}: is a folder; give a file in it")
    if file not in (None, "-") and not os.access(
        file if Path(file).exists() else Path(file).parent, os.W_OK
    ):
        # before the work, not after it
        raise UsageError(f"--json {file}: not writable; choose another file")
    return parsed


def require_positive(command: Any, *names: str) -> None:
    """Raise UsageError if one of these numbers of the command is not above 0."""
    for name in names:
        value = getattr(command, name, None)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')}: must be above 0 (got {value})")


def write_json(file: str | None, value: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(value, indent=2) + "\n")
