"""The figures of tests/structure.py, on a project of known figures."""

import json

import pytest

from tests import structure

ONE = """
from pkg import two
from typing import ClassVar


class Section:
    kind: ClassVar[str] = ""


class Train(Section):
    # the number of optimizer steps
    steps: int = 3
    lr: float = 0.1


class ShortTrain(Train):
    steps: int = 1


class Config(Section):
    train: Train


def function(x):
    a, b = x, 1
    pair = (a, b)
    if y := max(*pair, *x):
        return lambda: y
"""
EXPECTED = {
    "files": 3,
    "settings": 2,
    "functions": 1,
    "tuple assignments": 1,
    "star-tuples in calls": 1,
    "assignment expressions (:=)": 1,
    "lambdas": 1,
    "lines over 100 columns": 1,
    "full-line comments": 1,
    "import circles": 1,
    "test lines": 2,
    "files with `steps`": 1,
}


@pytest.mark.parametrize("package", ["pkg", "src/pkg"])
def test_figures_of_a_project(tmp_path, capsys, package):
    folder = tmp_path / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "config.py").write_text(ONE)
    (folder / "two.py").write_text("from . import config" + " " * 90 + "\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_one.py").write_text("import pkg\n\nassert pkg\n")
    (tmp_path / "script.py").write_text("steps = 1\n")
    assert structure.main([str(tmp_path), "--json", "--name", "steps"]) == 0
    figures = json.loads(capsys.readouterr().out)[str(tmp_path)]
    assert {name: figures[name] for name in EXPECTED} == EXPECTED
    assert figures["circles:"] == ["pkg.config <-> pkg.two"]
    assert figures["largest functions:"] == ["   5 pkg/config.py:24 function"]


def test_table_compares_projects(tmp_path, capsys):
    for name, code in (("small", "x = 1\n"), ("large", "x = 1\n" * 2000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.py").write_text(code)
    assert structure.main([str(tmp_path / "small"), str(tmp_path / "large")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["small", "large"]
    assert ["code", "lines", "1", "2,000"] in rows


def test_folder_without_python_is_an_error(tmp_path, capsys):
    assert structure.main([str(tmp_path)]) == 2
    assert "no Python files" in capsys.readouterr().err
