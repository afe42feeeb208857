"""Command line parsing shared by all commands."""

from __future__ import annotations

import builtins
import inspect
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from mmray.builtin import KINDS
from mmray.config import Config, recipes
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import rows_table
from mmray.errors import UsageError
from mmray.storage.paths import check_kept

STYLE = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
BOOLS = {"True": True, "False": False, "true": True, "false": False}  # Python's and YAML's spelling
Parsed = TypeVar("Parsed")
RunPath = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
JsonFile = Annotated[str | None, tyro.conf.arg(help="Write the results to this JSON file.")]
JsonList = Annotated[
    str | None,
    tyro.conf.arg(help="Write the list to this JSON file; `-`: print it instead of the table."),
]

REGISTRY = ConstructorRegistry()


class Command:
    """A command of the command line, whose arguments are the parameters of functions.

    Args:
        run: called with the console and the arguments by name; returns the exit code, None: 0. Its
            parameters after `*` are arguments that `function` does not have, or replace its own.
        function: function of `mmray.api` whose other parameters are the arguments, and whose
            docstring is the help; None: those of `run`.
        name: words of the command after `mmray`; None: the name of the function.
    """

    def __init__(
        self,
        run: Callable[..., int | None],
        function: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.run = run
        self.function = function or run
        self.__name__ = name or self.function.__name__
        self.__doc__ = self.function.__doc__

    def __call__(self, argv: Sequence[str], console: ConsoleReporter) -> int:
        """Parse the arguments, run the command and return its exit code."""
        return self.run(console, **self.parse(argv)) or 0

    def parse(self, argv: Sequence[str], **defaults: Any) -> dict[str, Any]:
        """Return the arguments by name; `defaults` replace those of the functions."""
        return parse_args(self.parameters(**defaults), argv, f"mmray {self.__name__}")

    def parameters(self, **defaults: Any) -> Callable[..., dict[str, Any]]:
        """Return a function for tyro: its parameters are the arguments, which it returns."""

        def arguments(**values: Any) -> dict[str, Any]:
            return values

        own = inspect.signature(self.run).parameters
        others = {name for name, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
        parameters = dict(inspect.signature(self.function).parameters) | dict(own)
        hints = _type_hints(self.function) | _type_hints(self.run)
        arguments.__annotations__ = {
            name: _argument_type(hints[name])
            for name, each in parameters.items()
            if each.kind is not each.VAR_KEYWORD and name not in {"reporter", *others}
        }
        arguments.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameters[name].replace(
                    kind=inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(name, parameters[name].default),
                )
                for name in arguments.__annotations__
            ]
        )
        # A line for each argument, which starts with a capital, as in the help of settings.
        joined = re.sub(r"\n {8,}", " ", inspect.getdoc(self.function) or "")
        arguments.__doc__ = re.sub(
            r"(?m)^ {4}\w+: \w", lambda start: start[0][:-1] + start[0][-1].upper(), joined
        )
        return arguments


def command(
    function: Callable[..., Any] | None = None, name: str | None = None
) -> Callable[[Callable[..., int | None]], Command]:
    """Decorate the `run` of a Command."""
    return lambda run: Command(run, function, name)


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of parameters; those that only type checkers import are `object`."""
    names = vars(builtins) | function.__globals__
    return get_type_hints(function, None, defaultdict(lambda: object, names), include_extras=True)


def _argument_type(hint: Any) -> Any:
    """Return the type of an argument: what may be a text, such as a path, is given as text."""
    if get_origin(hint) is Annotated:
        base, *markers = get_args(hint)
        return Annotated[(_argument_type(base), *markers)]
    kinds = get_args(hint)
    if get_origin(hint) in (Union, UnionType) and str in kinds:
        return str | None if NoneType in kinds else str
    return hint


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
    """Split the arguments of a command that takes a recipe, such as `clip --train.steps 10`."""
    flags = list(argv)
    name = "sample"
    if flags and not flags[0].startswith("-"):
        name = flags.pop(0)
    print_config = "--print-config" in flags
    return name, [flag for flag in flags if flag != "--print-config"], print_config


def flag_values(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of one flag before the flags are parsed."""
    values = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == flag and (equals or following):
            values.append(value if equals else following)
    return values


def load_recipe(name: str, words: Sequence[str]) -> Config:
    """Return the recipe with the defaults that depend on `--model.kind` and `--model.weights`.

    `--model.kind` determines which flags of `--model` exist. Weights on the local disk, given as a
    flag or in the recipe file, define image size, preprocessing and tokenizer of a `clip` or
    `siglip` model; inputs in the recipe file take precedence. Other flags are not applied.

    Args:
        name: name of a built-in recipe, or a YAML file.
        words: arguments of the command after the recipe, such as `["--model.kind", "siglip"]`.

    Raises:
        UsageError: the recipe, its kind or its weights cannot be loaded.
    """
    recipe = recipes.load(name)
    kinds = flag_values("--model.kind", words)
    if kinds:
        recipe = recipe.with_model_kind(kinds[-1])
    model = _model_of_file(name)
    weights = flag_values("--model.weights", words) or [str(model.get("weights", "none"))]
    kind = KINDS.get(recipe.model.kind)
    # The weights of a kind of transformers define the preprocessing.
    if kind is not None and kind.hf_type and Path(weights[-1]).expanduser().exists():
        # It imports transformers.
        from mmray.models.pretrained import pretrained_settings

        settings = pretrained_settings(weights[-1])
        if settings["kind"] == recipe.model.kind:
            given = model.get("inputs", {})
            own = {key: value for key, value in settings["inputs"].items() if key not in given}
            inputs = recipe.model.inputs.replace(**own)
            recipe = recipe.replace(model=recipe.model.replace(inputs=inputs))
    return recipe


def _model_of_file(name: str) -> dict[str, Any]:
    """Return the section `model` of a recipe file, {} for a built-in recipe."""
    if Path(name).suffix not in (".yaml", ".yml"):
        return {}
    values = yaml.safe_load(Path(name).read_bytes())  # recipes.load has checked it
    return dict((values or {}).get("model") or {})


def parse_config(argv: Sequence[str], command_name: str) -> tuple[Config, bool]:
    """Parse a recipe name and the flags of its settings.

    Args:
        argv: arguments after the command, such as `["clip", "--train.steps", "10"]`.
        command_name: the command, such as `train`, for messages and --help.

    Returns:
        The config, and whether --print-config is given.

    Raises:
        UsageError: the recipe or a setting is unknown or invalid.
        SystemExit: --help is given, or a flag is unknown or has a value of a wrong type.
    """
    name, rest, print_config = split_args(argv)
    flags = [
        word.removeprefix("--").partition("=")[0].replace("-", "_")
        for word in rest
        if word.startswith("--")
    ]
    description = (
        f"Train the recipe `{name}`; the defaults below are the recipe's values. "
        f"Recipes: {', '.join(recipes.RECIPES)}, or a YAML file. --print-config prints the "
        "settings and exits."
    )
    recipe = load_recipe(name, rest).without_overridden_length_and_batch(flags)
    config = parse_args(Config, rest, f"mmray {command_name} {name}", recipe, description)
    return config, print_config


def parse_args(
    command: Callable[..., Parsed],
    words: Sequence[str],
    prog: str,
    default: Parsed | None = None,
    description: str | None = None,
) -> Parsed:
    """Parse the arguments of a command with tyro."""
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    parsed = tyro.cli(
        command,
        args=list(words),
        prog=prog,
        description=description,
        config=STYLE,
        registry=REGISTRY,
        **defaults,
    )
    file = (parsed if isinstance(parsed, dict) else vars(parsed)).get("json")
    if file not in (None, "-"):
        _check_writable(Path(file))
    return parsed


def first_sentence(command: Callable[..., int]) -> str:
    """Return the first sentence of the help of a command, without its period."""
    sentence, _, _ = (command.__doc__ or "").partition(".\n")
    return " ".join(sentence.split()).rstrip(".")


def _check_writable(file: Path) -> None:
    """Raise UsageError if the file of --json cannot be written; called before the work."""
    check_kept("--json", file)
    folder = file.parent
    if not folder.is_dir():
        raise UsageError(
            f"--json {file}: folder {folder} does not exist; create it or choose another file"
        )
    if file.is_dir():
        raise UsageError(f"--json {file}: is a folder; give a file in it")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"--json {file}: not writable; choose another file")


def write_json(file: str | None, value: dict[str, Any]) -> None:
    """Write an object as indented JSON to the file of --json."""
    if file is not None:
        Path(file).write_text(json.dumps(value, indent=2) + "\n")


def show_rows(
    rows: list[dict[str, Any]],
    name: str,
    json_file: str | None,
    console: ConsoleReporter,
    columns: dict[str, tuple[str, str]],
    shown: Callable[[dict[str, Any]], dict[str, Any]],
    empty: str,
) -> None:
    """Print a list as a table, or as JSON if the file of --json is `-`."""
    if json_file == "-":
        console.print_raw(json.dumps({name: rows}, indent=2))
        return
    write_json(json_file, {name: rows})
    if rows:
        console.print(rows_table([row | shown(row) for row in rows], columns))
    else:
        console.log(empty)
