"""Objectives by name, and errors for invalid names."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from mmray import objectives
from mmray.builtin import OBJECTIVES
from mmray.config import Objective
from mmray.errors import UsageError
from mmray.objectives.contrastive import CHUNK, Contrastive
from mmray.objectives.protocol import split_objective


def kind(name: str) -> Objective:
    return Objective(kind=name)


@pytest.fixture
def own(monkeypatch):
    """A user's module with one objective and one other class."""
    module = ModuleType("own_objectives")
    module.Mine = type(
        "Mine",
        (Contrastive,),
        {"__init__": lambda self, section: setattr(self, "section", section)},
    )
    module.Other = type(
        "Other", (), {"__init__": lambda self, section: None, "gathered_outputs": ()}
    )
    monkeypatch.setitem(sys.modules, "own_objectives", module)


def test_sum_splits_into_global_and_local_loss(own):
    combined = objectives.build(kind("contrastive + 0.5*matching + 1e-1 * own_objectives:Mine"))
    assert combined.gathered_outputs == Contrastive.gathered_outputs
    assert combined.scalar_output_names == ("logit_scale",)
    parts = split_objective(combined)
    assert parts.local_loss.score_outputs == Contrastive.gathered_outputs
    assert parts.mining_loss is parts.local_loss
    assert parts.global_loss.count({"valid": torch.ones(3)}).tolist() == [3, 3]
    assert split_objective(objectives.build(kind("classification"))).global_loss is None
    assert (
        split_objective(objectives.build(kind("sigmoid + classification"))).pairwise_loss
        is not None
    )
    assert isinstance(
        split_objective(objectives.build(kind("contrastive + classification"))).global_loss,
        Contrastive,
    )


@pytest.mark.parametrize("name", ["cosine", "tests.objectives.cosine_distance:CosineDistance"])
def test_added_objective_is_a_term_of_a_sum(monkeypatch, name):
    entry = "tests.objectives.cosine_distance:CosineDistance"
    if name == "cosine":
        monkeypatch.setitem(OBJECTIVES, name, entry)
    combined = objectives.build(kind(f"contrastive + 0.5 * {name}"))
    batch = {"valid": torch.tensor([True, True, False])}
    outputs = {"image_embed": torch.eye(3), "text_embed": torch.eye(3).flip(0)}
    losses, counts, _ = split_objective(combined).local_loss.compute_loss(outputs, batch)
    assert losses.tolist() == [0.5] and counts.tolist() == [2]


def test_metrics_of_equal_names_are_kept_apart(own):
    outputs = {
        "image_embed": torch.eye(2),
        "text_embed": torch.eye(2),
        "logit_scale": torch.tensor(1.0),
    }
    combined = objectives.build(kind("contrastive + 2 * own_objectives:Mine"))
    _, _, metrics = combined.compute_loss(outputs, {"valid": torch.ones(2, dtype=torch.bool)})
    assert (
        metrics["loss_image_to_text"][0] == metrics["loss_image_to_text_own_objectives:Mine"][1] > 0
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        "contrastive +",
        "contrastive + contrastive",
        "0 * sigmoid",
        "-1 * sigmoid",
        "1.2.3*sigmoid",
    ],
)
def test_invalid_sum_raises(name):
    with pytest.raises(UsageError, match="cannot parse"):
        objectives.build(kind(name))


def test_settings_are_passed_to_the_objective(own):
    assert objectives.build(kind("sigmoid")).chunk_rows == CHUNK
    section = kind("own_objectives:Mine")
    assert objectives.build(section).section is section


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("contrastiv", "no `contrastiv`; use one of contrastive"),
        (
            "no_such_module:Mine",
            "cannot load `no_such_module:Mine`: No module named 'no_such_module'",
        ),
        ("own_objectives:Nobody", "cannot load `own_objectives:Nobody`"),
        ("own_objectives:Other", "lacks scalar_output_names, count, compute_loss"),
    ],
)
def test_invalid_name_raises(own, name, message):
    with pytest.raises(UsageError, match=message):
        objectives.build(kind(name))
