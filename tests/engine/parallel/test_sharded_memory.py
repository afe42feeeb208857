"""Host memory of the ranks that build or resume a sharded model, and the bytes that they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import spawn_ranks
from tests.engine.parallel import memory_ranks
from tests.engine.parallel.memory_ranks import MIB

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
CONSTANT = 40 * MIB  # code, buffers of gloo, a request of 16 MiB


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank by scenario."""
    folder = tmp_path_factory.mktemp("memory")
    return {name: spawn_ranks(memory_ranks.main, folder, 2, name) for name in ("start", "resume")}


def test_only_rank_0_has_a_full_copy_when_a_sharded_model_is_built(results):
    first, other = results["start"]
    assert first["full"] > 280 * MIB and first["shard"] == pytest.approx(
        first["full"] / 2, rel=0.01
    )
    assert first["peak"] < first["full"] + 2 * first["block"] + CONSTANT
    assert other["peak"] < other["shard"] + other["block"] + CONSTANT


def test_resume_takes_the_memory_of_a_shard_and_a_block(results):
    for result in results["resume"]:
        assert result["peak"] < result["shard"] + result["block"] + CONSTANT
        assert result["peak of load"] < result["block"] + CONSTANT


def test_rank_reads_only_its_shard_on_resume(results):
    for result, started in zip(results["resume"], results["start"], strict=True):
        assert result["sum"] == started["sum"] > 0
        assert result["shard"] <= result["read"] < 1.02 * result["shard"]
