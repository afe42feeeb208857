"""`mmray --print-completion`: a shell script that completes commands, recipes and flags without
starting Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from tyro.conf import Positional

from mmray.cli.bench import BENCHES
from mmray.cli.doctor import DoctorCommand
from mmray.cli.evaluate import EvaluateCommand, EvaluateWeightsCommand
from mmray.cli.export import ExportCommand, ExportWeightsCommand
from mmray.cli.prepare import PrepareCommand
from mmray.cli.report import ReportCommand
from mmray.cli.runs import RunsCommand
from mmray.cli.tune import TuneCommand
from mmray.config import Config
from mmray.config.base import Section
from mmray.config.recipes import RECIPES
from mmray.errors import UsageError, suggest

SHELLS = {"bash": "", "zsh": "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n"}
POSITIONAL = get_args(Positional[int])[1]  # the marker of positional arguments
SETTINGS: dict[str, tuple[type[Any], ...]] = {
    "train": (Config,),
    "tune": (TuneCommand,),
    "prepare": (PrepareCommand,),
    "evaluate": (EvaluateCommand, EvaluateWeightsCommand),
    "export": (ExportCommand, ExportWeightsCommand),
    "report": (ReportCommand,),
    "runs": (RunsCommand,),
    "bench": tuple(command for command, _ in BENCHES.values()),
    "doctor": (DoctorCommand,),
}
# files complete others
ARGUMENTS = {"train": tuple(RECIPES), "tune": tuple(RECIPES), "bench": tuple(BENCHES)}

SCRIPT = """\
_mmray() {{
  local names=
  case "$COMP_CWORD ${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD]}}" in
    "1 "*) names="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$names" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _mmray mmray
"""


def completion_script(shell: str, commands: Iterable[str]) -> str:
    """Return the script for bash or zsh. Raises UsageError."""
    if shell not in SHELLS:
        raise UsageError(f"--print-completion: unknown shell `{shell}`; {suggest(shell, SHELLS)}")
    cases = []
    for command, kinds in SETTINGS.items():
        own = {flag for kind in kinds for flag in _flags(kind)} | {"--help"}
        own |= {"--print-config"} if command in ("train", "tune") else set()
        cases.append(f'    *" {command} -"*) names="{" ".join(sorted(own))}" ;;')
        if command in ARGUMENTS:
            cases.append(f'    "2 {command} "*) names="{" ".join(ARGUMENTS[command])}" ;;')
    first = " ".join([*commands, "--help", "--version", "--print-completion"])
    return SHELLS[shell] + SCRIPT.format(commands=first, cases="\n".join(cases))


def _flags(group: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield the flags of a command or section; for a model those of every kind."""
    if issubclass(group, Section):
        fields = {
            field.alias or name: field.annotation for name, field in group.model_fields.items()
        }
    else:
        fields = get_type_hints(group, include_extras=True)
    for name, kind in fields.items():
        if POSITIONAL in get_args(kind):
            continue
        sections = set(_sections(kind))
        for section in sections:
            yield from _flags(
                section,
                prefix if is_dataclass(group) and name == "settings" else f"{prefix}{name}.",
            )
        if not sections:
            yield f"--{prefix}{name}".replace("_", "-")


def _sections(kind: Any) -> Iterator[type[Section]]:
    """Yield the sections in a type: of a union, all."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for member in get_args(kind):
        yield from _sections(member)
