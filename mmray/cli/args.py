"""Command line parsing shared by all commands."""

from __future__ import annotations

import builtins
import inspect
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from mmray.cli.lines import Line
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import rows_table
from mmray.errors import UsageError
from mmray.storage.paths import check_kept

STYLE = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
BOOLS = {"True": True, "False": False, "true": True, "false": False}  # Python's and YAML's spelling
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
            parameters are arguments that `function` does not have, or replace its own.
        function: function of `mmray.api` whose other parameters are the arguments, and whose
            docstring is the help; None: those of `run`. If `run` has a docstring too, the list of
            commands shows its first sentence.
        read: returns what a line defines before its flags are parsed.
        name: words of the command after `mmray`; None: the name of `run`.
    """

    def __init__(
        self,
        run: Callable[..., int | None],
        function: Callable[..., Any] | None = None,
        read: Callable[[Sequence[str]], Line] = Line,
        name: str | None = None,
    ) -> None:
        self.run = run
        self.function = function or run
        self.read = read
        self.__name__ = name or run.__name__
        self.__doc__ = run.__doc__ or self.function.__doc__

    def __call__(self, argv: Sequence[str], console: ConsoleReporter) -> int:
        """Parse the arguments, run the command and return its exit code."""
        return self.run(console, **self.parse(argv)) or 0

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            UsageError: an argument is unknown or invalid.
            SystemExit: --help is given, or a flag is unknown or has a value of a wrong type.
        """
        line = self.read(argv)
        parsed = tyro.cli(
            self.parser(line),
            args=line.words,
            prog=f"mmray {self.__name__} {line.recipe}".rstrip(),
            description=line.description,
            config=STYLE,
            registry=REGISTRY,
        )
        file = parsed.get("json")
        if file not in (None, "-"):
            _check_writable(Path(file))
        return line.given | parsed

    def parser(self, line: Line) -> Callable[..., dict[str, Any]]:
        """Return a function for tyro: its parameters are the arguments, which it returns."""

        def arguments(**values: Any) -> dict[str, Any]:
            return values

        functions = (self.function, self.run)
        parameters = {
            name: each
            for function in functions
            for name, each in inspect.signature(function).parameters.items()
            if each.kind is not each.VAR_KEYWORD
            and name not in {"console", "reporter", *line.given}
        }
        hints = {name: hint for each in functions for name, hint in _type_hints(each).items()}
        arguments.__annotations__ = {name: _argument_type(hints[name]) for name in parameters}
        arguments.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                each.replace(
                    kind=inspect.Parameter.KEYWORD_ONLY,
                    default=line.defaults.get(name, each.default),
                )
                for name, each in parameters.items()
            ]
        )
        # A line for each argument, which starts with a capital, as in the help of settings.
        joined = re.sub(r"\n {8,}", " ", inspect.getdoc(self.function) or "")
        arguments.__doc__ = re.sub(
            r"(?m)^ {4}\w+: \w", lambda start: start[0][:-1] + start[0][-1].upper(), joined
        )
        return arguments


def command(
    function: Callable[..., Any] | None = None,
    read: Callable[[Sequence[str]], Line] = Line,
    name: str | None = None,
) -> Callable[[Callable[..., int | None]], Command]:
    """Decorate the `run` of a Command."""
    return lambda run: Command(run, function, read, name)


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
