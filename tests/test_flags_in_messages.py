"""Flags that messages name exist in the command that prints the message."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import tyro

from mmray.cli.args import REGISTRY, STYLE
from mmray.cli.completion import parsers
from mmray.cli.lines import Line
from mmray.cli.runs import evaluate
from mmray.cli.train import train
from mmray.config import Clip, recipes

PACKAGE = Path(__file__).parent.parent / "mmray"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]")
OTHER = {
    # tar, hf download, docker run, ray start, pip, ray get-auth-token, git ls-files, git rm
    *(
        "--sort",
        "--local-dir",
        "--shm-size",
        "--node-ip-address",
        "--force-reinstall",
        "--generate",
        "--others",
        "--exclude-standard",
        "--ignored",
        "--directory",
        "--cached",
        "--recurse-submodules",
    ),
    # handled before tyro
    *("--print-config", "--tyro-print-completion", "--version"),
    # with a name after them; and `mmray train --data.train` as the next command
    *("--tyro", "--model", "--cluster", "--model.settings", "--section.field", "--data.train"),
}


def flags(command):
    parser = tyro.extras.get_parser(command, config=STYLE, registry=REGISTRY)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.fixture(scope="module")
def flags_of():
    """Flags by command."""
    out = {name: flags(command) for name, command in parsers().items()}
    configs = [recipe() for recipe in recipes.RECIPES.values()]
    by_kind = {type(config.model): config for config in configs}
    out["train"] = {
        flag
        for config in by_kind.values()
        for flag in flags(train.parser(train.read([config.recipe])))
    }
    weights = Line((), {"run": None, "flags": set()}, {"model": Clip()})
    out["evaluate"] |= flags(evaluate.parser(weights)) | out["export"]
    return out


def docstring_ids(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


@cache
def flags_in(file):
    """(flag, file:line) of each flag in a string of a module that is no docstring."""
    tree = ast.parse(file.read_text())
    docs = docstring_ids(tree)
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]
    place = file.relative_to(PACKAGE)
    return [
        (flag, f"{place}:{each.lineno}") for each in strings for flag in FLAG.findall(each.value)
    ]


def named_flags(*paths):
    """What `flags_in` returns, of these modules and packages."""
    for path in paths:
        for file in sorted((PACKAGE / path).rglob("*.py")) or [PACKAGE / path]:
            yield from flags_in(file)


def test_flags_in_messages_exist(flags_of):
    known = set().union(*flags_of.values()) | OTHER
    named = [each for each in named_flags("") if not each[1].startswith("bench/")]
    unknown = {place: flag for flag, place in named if flag not in known}
    assert not unknown


SELECT = "data/prepare/select.py"


@pytest.mark.parametrize(
    ("commands", "paths"),
    [
        (
            ("prepare",),
            ("data/formats", "data/images", "data/prepare", "data/rows.py", "data/source_row.py"),
        ),
        (("select", "score"), (SELECT,)),  # its messages name the command that writes embeddings
        (("score",), ("training/score.py",)),
        (("evaluate",), ("evaluation", "cli/runs.py", "training/evaluate_export.py")),
    ],
)
def test_messages_of_a_command_name_its_own_flags(flags_of, commands, paths):
    known = OTHER.union(*(flags_of[command] for command in commands))
    unknown = {
        place: flag
        for flag, place in named_flags(*paths)
        if flag not in known and (SELECT in paths or not place.startswith(SELECT))
    }
    assert not unknown
