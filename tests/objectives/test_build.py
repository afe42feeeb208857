"""Objectives by name, and what is said about a name that is none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mmray import objectives
from mmray.errors import UsageError
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.protocol import split_objective
from mmray.objectives.sigmoid import CHUNK


def kind(name: str) -> SimpleNamespace:
    return SimpleNamespace(kind=name, label_smoothing=0.1)


@pytest.fixture
def own(monkeypatch):
    """A user's module with one objective and one class that is none."""
    module = ModuleType("own_objectives")
    module.Mine = type("Mine", (Contrastive,), {"__init__": lambda self, section: setattr(self, "section", section)})
    module.Other = type("Other", (), {"__init__": lambda self, section: None, "gathered_outputs": ()})
    monkeypatch.setitem(sys.modules, "own_objectives", module)


def test_built_in():
    assert isinstance(objectives.build(kind("contrastive")), Contrastive)


def test_a_sum_is_of_both_sorts(own):
    combined = objectives.build(kind("contrastive + 0.5*matching + 1e-1 * own_objectives:Mine"))
    assert combined.gathered_outputs == Contrastive.gathered_outputs
    assert combined.scalar_outputs == ("logit_scale",)
    found = split_objective(combined)
    assert found.local_loss.score_outputs == Contrastive.gathered_outputs
    assert found.mining is found.local_loss
    assert found.global_loss.count({"valid": torch.ones(3)}).tolist() == [3, 3]
    assert split_objective(objectives.build(kind("classification"))).global_loss is None
    assert isinstance(split_objective(objectives.build(kind("contrastive + classification"))).global_loss, Contrastive)


@pytest.mark.parametrize(
    "name", ["", "contrastive +", "contrastive + contrastive", "0 * sigmoid", "-1 * sigmoid", "1.2.3*sigmoid"]
)
def test_what_is_no_sum_is_said(name):
    with pytest.raises(UsageError, match="is not an objective or a sum of different ones"):
        objectives.build(kind(name))


def test_settings_reach_the_objective():
    assert objectives.build(kind("sigmoid")).chunk == CHUNK
    assert objectives.build(kind("classification")).label_smoothing == 0.1


def test_a_users_own_is_given_the_section(own):
    section = kind("own_objectives:Mine")
    assert objectives.build(section).section is section


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("contrastiv", "there is no `contrastiv`; take one of contrastive"),
        ("no_such_module:Mine", "cannot be loaded: No module named 'no_such_module'"),
        ("own_objectives:Nobody", "cannot be loaded: .*Nobody"),
        ("own_objectives:Other", "has no scalar_outputs, count, compute_loss"),
    ],
)
def test_what_cannot_be_meant_is_said(own, name, said):
    with pytest.raises(UsageError, match=said):
        objectives.build(kind(name))
