"""Each strategy takes the steps of one process on one device."""

from __future__ import annotations

import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchvision import models

from mmray.engine.collectives import Group
from mmray.engine.parallel import sharding
from mmray.errors import UsageError
from mmray.models.protocol import find_blocks
from tests.engine import ranks, toy
from tests.engine.conftest import spawn_ranks

OBJECTIVES = tuple(ranks.OBJECTIVES)
HAS_COMPILER = shutil.which("g++") is not None


@pytest.fixture(scope="module")
def single():
    return {
        objective: ranks.train_strategy(Group(), objective, parallel="single")
        for objective in OBJECTIVES
    }


@pytest.mark.parametrize("name", ranks.STRATEGIES)
def test_ranks_under_any_strategy_equal_one_process(two, single, name):
    objective, _ = ranks.STRATEGIES[name]
    expected = single[objective]
    initial = toy.Branched(kind=objective).double().state_dict().values()
    start = torch.cat([tensor.flatten() for tensor in initial])
    for result in two:
        result = result["strategies"][name]
        error = (result["weights"] - expected["weights"]).norm() / (
            expected["weights"] - start
        ).norm()
        assert error <= 1e-9
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-9)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Results of two ranks that compile, by rank."""
    folder = tmp_path_factory.mktemp("compiled")
    return spawn_ranks(ranks.main_compiled, folder, 2, HAS_COMPILER)


@pytest.mark.compile
@pytest.mark.parametrize("name", ranks.COMPILED)
def test_ranks_with_compiled_branches_equal_eager_ones_with_dropout(compiled, name):
    for result in compiled:
        result = result["branches"][name]
        # per block and training forward
        assert result["graphs"] >= (2 if "row-wise" in name else 4)
        toy.assert_equal_weights(result["weights"], result["eager"], result["start"])


@pytest.mark.compile
@pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler")
def test_ranks_with_inductor_equal_eager_ones_and_both_passes_have_equal_dropout(compiled):
    for result in compiled:
        result = result["inductor"]
        eager, start = result["eager"]["weights"], result["start"]["weights"]
        toy.assert_equal_weights(result["compiled"]["weights"], eager, start)
        passes = result["compiled"]["passes"]
        assert len(passes) == 6
        for first, second in zip(passes[::2], passes[1::2], strict=True):
            assert torch.allclose(first, second, rtol=0, atol=1e-12)


def test_checkpoint_resumes_under_another_strategy(two, single):
    for result in two:
        for name in ("ddp to fsdp", "fsdp to ddp"):
            toy.assert_equal_weights(
                result["strategies"][name]["weights"], single["contrastive"]["weights"]
            )
    state = two[1]["strategies"]["fsdp, contrastive"]["state"]
    resumed = ranks.train_strategy(Group(), "contrastive", state, parallel="single")
    toy.assert_equal_weights(resumed["weights"], single["contrastive"]["weights"])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_branches_on_two_devices_equal_one_device(single, objective):
    expected, result = (
        single[objective],
        ranks.train_strategy(Group(), objective, parallel="branches"),
    )
    toy.assert_equal_weights(result["weights"], expected["weights"])
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    resumed = ranks.train_strategy(Group(), objective, result["state"], parallel="branches")
    toy.assert_equal_weights(resumed["weights"], expected["weights"])


class Nodes(Group):
    """A group whose nodes have 4, 4 and 2 ranks, or as many as `ranks`."""

    ranks: tuple[int, ...] = (4, 4, 2)

    def all_gather_objects(self, value: Any) -> list[Any]:
        first = [sum(self.ranks[:node]) for node in range(len(self.ranks))]
        nodes = zip(first, self.ranks, strict=True)
        return [(rank, number) for rank, number in nodes for _ in range(number)]


def test_hsdp_shards_over_ranks_of_one_node(monkeypatch):
    """Equally many on each node; one node is sharded as by fsdp."""
    mesh = partial(SimpleNamespace, get_all_groups=list)
    monkeypatch.setattr(
        sharding, "init_device_mesh", lambda device, shape, **names: mesh(shape=shape)
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(Nodes, "ranks", (4, 4))
    assert sharding._device_mesh(Nodes(0, 8), hybrid=True).shape == (2, 4)
    assert sharding._device_mesh(Nodes(0, 8), hybrid=False).shape == (8,)
    monkeypatch.setattr(Nodes, "ranks", (4,))
    assert sharding._device_mesh(Nodes(0, 4), hybrid=True).shape == (4,)
    monkeypatch.setattr(Nodes, "ranks", (4, 2))
    with pytest.raises(UsageError, match=r"as many consecutive workers, .* \(got \[2, 4\]\)"):
        sharding._device_mesh(Nodes(0, 6), hybrid=True)


def test_hsdp_refuses_ranks_that_alternate_between_nodes(monkeypatch):
    """A replica would span two nodes."""

    class Alternating(Group):
        def all_gather_objects(self, value: Any) -> list[Any]:
            return [(0, 2), (1, 2), (1, 2), (2, 2)]  # ranks 0 and 2 on one node, 1 and 3 on another

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="consecutive workers"):
        sharding._device_mesh(Alternating(0, 4), hybrid=True)


@pytest.mark.parametrize(("name", "blocks"), [("vit_b_16", 12), ("resnet50", 16), ("resnet18", 8)])
def test_blocks_of_sequential_encoders_are_found(name, blocks):
    with torch.device("meta"):
        model = models.get_model(name)
    assert sum(next(block.children(), None) is not None for block in find_blocks(model)) == blocks
