"""Optimizers and schedules by name: the README's example, Muon and Lion train and resume
bitwise.
"""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import torch

from mmray.cli.train import train
from mmray.engine.collectives import Group
from tests.conftest import ROOT
from tests.engine import optimizer_ranks, toy
from tests.engine.conftest import spawn_ranks

README = (ROOT / "mmray/engine/README.md").read_text()
EXAMPLE = next(
    code for code in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S) if "Momentum" in code
)
COMMAND = re.search(r"^mmray train (.*Momentum.*)$", README, re.M)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the module of the README."""
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "my_pkg.py").write_text(EXAMPLE)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return spawn_ranks(optimizer_ranks.main, folder, 2)


@pytest.fixture
def single(folder, tmp_path, monkeypatch):
    """Return the results of one process."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_pkg", raising=False)  # of another test
    return lambda settings, **train: optimizer_ranks.train_twice(
        Group(), tmp_path, settings, **train
    )


def test_documented_command_names_the_example():
    config = train.parse(shlex.split(COMMAND))["settings"]
    own = config.optimizer
    assert {"kind": own.kind, "settings": own.settings.keys(), "schedule": own.schedule} == {
        "kind": optimizer_ranks.OWN["kind"],
        "settings": optimizer_ranks.OWN["settings"].keys(),
        "schedule": optimizer_ranks.OWN["schedule"],
    }


@pytest.mark.parametrize("name", optimizer_ranks.KINDS)
def test_optimizer_trains_and_resumes_bitwise(single, name):
    if name == "lion":
        pytest.importorskip("timm")
    result = single(optimizer_ranks.KINDS[name])
    assert torch.equal(result["whole"], result["resumed"])
    assert result["losses"][-1] < 0.97 * result["losses"][0]


# Muon rounds updates to bf16
@pytest.mark.parametrize(("name", "tolerance"), [("own", 1e-9), ("muon", 3e-2)])
def test_sharded_optimizer_equals_one_process_and_resumes_bitwise(ranks, single, name, tolerance):
    expected, start = (
        single(optimizer_ranks.KINDS[name])["whole"],
        toy.flat(toy.Branched().double()),
    )
    for result in ranks:
        assert torch.equal(result[name]["whole"], result[name]["resumed"])
        assert (result[name]["whole"] - expected).norm() <= tolerance * (expected - start).norm()
