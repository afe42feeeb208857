"""Objectives by name, and what is said about a name that is none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mmray import objectives
from mmray.errors import UsageError
from mmray.objectives.contrastive import Contrastive


def kind(name: str) -> SimpleNamespace:
    return SimpleNamespace(kind=name)


@pytest.fixture
def own(monkeypatch):
    """A user's module with one objective and one class that is none."""
    module = ModuleType("own_objectives")
    module.Mine = type("Mine", (Contrastive,), {"__init__": lambda self, section: setattr(self, "section", section)})
    module.Other = type("Other", (), {"__init__": lambda self, section: None, "coupled": ()})
    monkeypatch.setitem(sys.modules, "own_objectives", module)


def test_built_in():
    assert isinstance(objectives.build(kind("contrastive")), Contrastive)


def test_a_users_own_is_given_the_section(own):
    section = kind("own_objectives:Mine")
    assert objectives.build(section).section is section


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("contrastiv", "there is no `contrastiv`; take one of contrastive"),
        ("no_such_module:Mine", "cannot be loaded: No module named 'no_such_module'"),
        ("own_objectives:Nobody", "cannot be loaded: .*Nobody"),
        ("own_objectives:Other", "has no shared, count, measure"),
    ],
)
def test_what_cannot_be_meant_is_said(own, name, said):
    with pytest.raises(UsageError, match=said):
        objectives.build(kind(name))
