"""Strategies benchmark: same rows for all strategies, metrics per row, reasons for failures."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmray.bench import step, strategies
from mmray.bench.spawn import WorkerFailed
from mmray.bench.strategies import BASELINE, bench_strategies
from mmray.config import Batch, Optimizer
from mmray.data.stream.order import SamplePlan
from mmray.engine.batch import BatchShape
from mmray.errors import ResourceError
from tests.bench.test_step import tiny


def test_rows_are_measured(forked_children):
    """With a large Adam epsilon the gradient scale changes the loss, so wrong gradient scaling is
    detected.
    """
    sensitive = Optimizer(lr=1.0, settings={"eps": 1.0}, warmup_steps=0, clip_norm=0)
    config = tiny(workers=2, optimizer=sensitive, batch=Batch(micro=3, global_=12))
    notes = []
    result = bench_strategies(config, steps=2, only=("branches fp32",), notify=notes.append)
    base, branches = result["rows"]
    names = [BASELINE, "branches fp32"]
    assert [line.partition(":")[0] for line in notes] == [
        f"{n} of 2, {name}" for n, name in enumerate(names, 1)
    ]
    assert all(line.endswith(" samples/s") for line in notes)
    assert [row["strategy"] for row in result["rows"]] == names
    assert result["batch"] == "micro 3 x accumulation 2 x workers 2 = 12 rows per step"
    assert base["loss_vs_ddp"] == 0
    assert branches["loss"] == pytest.approx(base["loss"], rel=1e-4)
    assert 0 < base["comm_share"] < 1
    assert (branches["comm_share"], branches["workers"]) == (0, 1)
    assert base["p50_s"] <= base["p95_s"]
    assert result["ratios"]["branches_fp32_vs_ddp"] == pytest.approx(
        branches["samples_per_s"] / base["samples_per_s"]
    )
    json.dumps(result)


@pytest.fixture
def workers(monkeypatch):
    """Fixed figures instead of worker processes, with an error for DDP if `fails`; records (kind,
    workers).
    """
    calls = SimpleNamespace(kinds=[], fails=False)

    def spawn_workers(measure, config, kind):
        calls.kinds.append((kind, config.cluster.workers))
        if calls.fails and config.train.parallel == "ddp":
            raise WorkerFailed("RuntimeError: no memory")
        return {"samples_per_s": 1.0, "loss": 1.0}

    monkeypatch.setattr(strategies, "spawn_workers", spawn_workers)
    return calls


def test_failed_baseline_has_a_reason_and_leaves_other_rows_without_ratios(workers):
    workers.fails, notes = True, []
    result = bench_strategies(tiny(workers=2), steps=2, only=("fsdp fp32",), notify=notes.append)
    assert notes[0].endswith("failed") and notes[1].endswith(" samples/s")
    ddp, fsdp = result["rows"]
    assert ddp["error"] == "RuntimeError: no memory" and "samples_per_s" not in ddp
    assert (fsdp["error"], fsdp["samples_per_s"]) == (None, 1) and "loss_vs_ddp" not in fsdp
    assert result["ratios"] == {} and result["notes"][1:] == ["ddp fp32: RuntimeError: no memory"]


def test_batch_of_auto_is_the_measured_one(workers):
    result = bench_strategies(tiny(workers=2, batch=Batch(micro="auto", global_=12)), steps=2)
    assert result["batch"] == "micro 6 x accumulation 1 x workers 2 = 12 rows per step"


def test_all_rows_use_the_same_device_type(workers, monkeypatch):
    """A worker uses the CPU if the baseline has too few GPUs; an explicit GPU request is an
    error.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    bench_strategies(tiny().with_cluster(accelerator="auto"), steps=2, only=("single fp32",))
    assert workers.kinds == [("cpu", 2), ("cpu", 1)]
    with pytest.raises(ResourceError, match="2 workers need a GPU each, this machine has 1"):
        bench_strategies(tiny().with_cluster(accelerator="gpu"), steps=2, only=("single fp32",))


def test_ranks_split_the_global_batch():
    batches = [
        {"image": torch.arange(10) + 100 * index, "pos": torch.zeros(10)} for index in range(2)
    ]
    for world in (1, 2, 3):
        plan = SamplePlan(2**30, 10, world, 0, 2)
        shares = [
            [strategies.rank_share(batch, rank, world) for batch in batches]
            for rank in range(world)
        ]
        for number in range(2):
            parts = [
                list(step.micro_batches(plan, BatchShape(10, 2, world), rank, shares[rank]))[number]
                for rank in range(world)
            ]
            rows = torch.cat(
                [
                    micro["image"][micro["valid"]]
                    for micro_batches in parts
                    for micro in micro_batches
                ]
            )
            assert torch.equal(rows, batches[number]["image"])
            pos = torch.cat([micro["pos"] for micro_batches in parts for micro in micro_batches])
            assert np.array_equal(
                pos, np.concatenate([plan.positions(number, rank) for rank in range(world)])
            )
