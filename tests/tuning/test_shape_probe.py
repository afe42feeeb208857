"""Batch shapes are measured in real worker processes: files, out of memory, lost workers,
communication.
"""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import ray.train
import torch
from rich.console import Console

from mmray import cli
from mmray.config import (
    Batch,
    Cluster,
    Config,
    CustomModel,
    Optimizer,
    Run,
    Train,
    from_yaml,
    recipes,
    to_yaml,
)
from mmray.console.reporter import ConsoleReporter
from mmray.engine import memory_probe
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.errors import OutOfMemoryError, TrainingError
from mmray.models.two_tower import TwoTower
from mmray.sweep_files import TrialRow
from mmray.training.workers.ray_backend import cause_in_group
from mmray.tuning import shape_probe, shape_worker
from mmray.tuning.shape import Measurements
from mmray.tuning.shape_probe import best_recipe, probe_shapes
from mmray.tuning.shape_worker import measure_shapes
from tests.bench.test_step import tiny
from tests.spawn import spawn_workers
from tests.training.runs import Silent

MAX_ROWS = 4


class Limited(TwoTower):
    """Ends its process, or raises, in a forward of more than MAX_ROWS rows."""

    def __init__(self, spec: Any, vocab_size: int) -> None:
        super().__init__(tiny().model.replace(inputs=spec.inputs), vocab_size)
        self.settings = spec.settings

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if len(batch["image"]) > self.settings["max_rows"]:
            if self.settings["killed"]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(batch)


def limited(killed: bool = False, max_rows: int = MAX_ROWS, **sections: Any) -> Config:
    settings = {"killed": killed, "max_rows": max_rows}
    model = CustomModel(
        kind="tests.tuning.test_shape_probe:Limited", inputs=tiny().model.inputs, settings=settings
    )
    return tiny(model=model, **{"batch": Batch(micro=4, global_=16), **sections})


_measure_in_worker = shape_probe._measure_in_worker


def _measure_briefly(*arguments: Any, **options: Any) -> Measurements:
    shape_worker.WINDOW_S = 0.0
    return _measure_in_worker(*arguments, **options)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, forked_children: None) -> None:
    """Few steps, and one worker without Ray, which other tests of this process may have started."""
    monkeypatch.setattr(shape_worker, "WINDOW_S", 0.0)
    monkeypatch.setattr(shape_probe, "_measure_in_worker", _measure_briefly)
    monkeypatch.setattr(shape_probe, "needs_ray", lambda cluster: cluster.max_workers > 1)


def at(folder: Path, base: Config) -> Config:
    return base.replace(run=Run(storage=str(folder)))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def test_command_writes_shapes_and_a_recipe_with_its_reason(tmp_path: Path, quick: None) -> None:
    """One worker, in a process of this machine."""
    sections: dict[str, Any] = {
        "train": Train(steps=9),
        "batch": Batch(micro=4, global_=16),
        "optimizer": Optimizer(lr=0.25),
        "cluster": Cluster(workers=1, accelerator="cpu", cpus_per_worker=1),  # one thread
    }
    base = at(tmp_path, tiny(**sections))
    (tmp_path / "mine.yaml").write_text(to_yaml(base))
    text = io.StringIO()
    words = ["tune", str(tmp_path / "mine.yaml"), "--batch.global", "12"]
    assert cli.run(words, ConsoleReporter(Console(file=text, width=160))) == 0
    folder = tmp_path / "custom-tune"
    rows, summary = rows_of(folder), json.loads((folder / "sweep.json").read_text())
    assert {row["status"] for row in rows} == {"finished"}
    assert len(rows) >= 3 and {row["micro"] for row in rows} <= {1, 2, 3, 4, 6, 12}
    assert all(row["accumulation"] == -(-12 // row["micro"]) for row in rows)
    why = summary["recommendation"]["why"]
    best = (folder / "best.yaml").read_text()
    assert best.splitlines()[0] == f"# {why}" and "samples/s" in why
    recipe = from_yaml(best, "best.yaml")
    chosen = next(row for row in rows if row["trial"] == summary["recommendation"]["best"])
    assert (recipe.batch.micro, recipe.batch.global_) == (chosen["micro"], 12)
    assert recipe.replace(batch=base.batch, run=base.run) == base
    assert "best.yaml" in text.getvalue()
    assert chosen["trial"] in (folder / "report.html").read_text()
    assert not (folder / "ray").exists()


def test_largest_size_is_the_one_of_the_dry_run(tmp_path: Path, quick: None) -> None:
    sweep = probe_shapes(at(tmp_path, limited()), Silent())
    assert [(row.micro, row.status) for row in sweep.trials] == [
        (1, "finished"),
        (2, "finished"),
        (4, "finished"),
        (8, "out_of_memory"),
    ]
    best = from_yaml((sweep.folder / "best.yaml").read_text(), "best.yaml")
    assert best.batch.micro in (1, 2, 4) and sweep.status == "finished"


def test_killed_worker_ends_the_search_with_the_likely_cause(tmp_path: Path, quick: None) -> None:
    with pytest.raises(TrainingError, match=r"SIGKILL .*out of memory"):
        probe_shapes(at(tmp_path, limited(killed=True)), Silent())
    assert json.loads((tmp_path / "custom-tune" / "sweep.json").read_text())["status"] == "failed"


def test_worker_killed_by_the_memory_monitor_is_the_cause_and_not_its_peer() -> None:
    killed = ray.exceptions.OutOfMemoryError(
        "Task was killed due to the node running low on memory.\nMemory: 9 GB"
    )
    failures = {0: RuntimeError("Connection closed by peer"), 1: killed}
    failed = cause_in_group(ray.train.WorkerGroupError("failed", failures))
    assert (failed.kind, failed.cause) == ("lost", killed)


def test_model_of_which_no_row_fits_is_an_error(tmp_path: Path, quick: None) -> None:
    with pytest.raises(
        OutOfMemoryError,
        match="a single row does not fit",
    ):
        probe_shapes(at(tmp_path, limited(max_rows=0)), Silent())


def _measure(base: Config, group: Group, folder: Path) -> dict[str, Any]:
    shape_worker.WINDOW_S = 0.0
    base = base.replace(model=base.model.with_vocab(32, None))
    memory_probe.free_memory = lambda: (64 << 30) >> 33 * group.rank
    measurements = measure_shapes(base, group, lambda _: None)
    everywhere = group.all_gather_objects(measurements)
    return {"equal": all(each == measurements for each in everywhere), **asdict(measurements)}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_measure_together_and_agree(parallel: str, forked_children: None) -> None:
    """If their free memory differs, the micro-batch fits on both."""
    base = tiny(workers=2, batch=Batch(micro=1, global_=4), train=Train(parallel=parallel))
    measured = spawn_workers(_measure, base)
    assert measured["equal"] and measured["workers"] == 2
    assert measured["largest"] == 1
    sizes = [micro for micro, *_ in measured["visits"]]
    assert set(sizes) == {1}  # of the 2 rows of a rank


def test_best_recipe_keeps_an_elastic_range_and_the_length() -> None:
    base = recipes.load("sample").with_cluster(workers="1-4")  # 128 rows of a step
    best = TrialRow("s001", "finished", micro=16, accumulation=2, workers=4)
    recipe = best_recipe(base, best)
    assert (recipe.cluster.workers, recipe.train) == ("1-4", base.train)
    assert str(resolve_batch_shape(recipe.batch, 4)) == (
        "micro 16 x accumulation 2 x workers 4 = 128 rows per step"
    )
    of_two = TrialRow("s002", "finished", micro=64, accumulation=1, workers=2)
    assert best_recipe(base, of_two).batch.micro == 64


@pytest.mark.cluster
def test_ray_workers_measure(local_ray: None, tmp_path: Path) -> None:
    cluster = Cluster(workers=2, accelerator="cpu", cpus_per_worker=1)
    sweep = probe_shapes(at(tmp_path, limited(cluster=cluster)), Silent())
    statuses = {row.micro: row.status for row in sweep.trials}
    assert statuses[8] == "out_of_memory" and "finished" in statuses.values()
    assert sweep.summary["workers"] == 2
    assert from_yaml((sweep.folder / "best.yaml").read_text(), "best.yaml").cluster.workers == 2
    assert not (sweep.folder / "ray").exists()
