"""Batch shapes are measured in real worker processes: files, out of memory, lost workers,
communication.
"""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import ray.train
import torch
from rich.console import Console

from mmray import cli
from mmray.cli.tune import split_global_list
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
from mmray.config.search_space import build_space
from mmray.console.reporter import ConsoleReporter
from mmray.engine import memory_probe
from mmray.engine.batch import resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.errors import OutOfMemoryError, TrainingError, UsageError
from mmray.models.two_tower import TwoTower
from mmray.processes import describe_exit
from mmray.sweep_files import TrialRow
from mmray.training.backend import WorkerFailed
from mmray.training.ray_backend import cause_in_group
from mmray.tuning import shape_probe, shape_worker
from mmray.tuning.shape import Failure, Measurements, ShapeTask, Visit
from mmray.tuning.shape_probe import best_recipe, measure_in_groups, plan_task, probe_shapes
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


_run_worker = shape_probe._run_worker


def _run_worker_briefly(channel: Any, task: ShapeTask) -> Measurements:
    shape_worker.WINDOW_S = 0.0
    return _run_worker(channel, task)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, forked_children: None) -> None:
    """Few steps, and one worker without Ray, which other tests of this process may have started."""
    monkeypatch.setattr(shape_worker, "WINDOW_S", 0.0)
    monkeypatch.setattr(shape_probe, "_run_worker", _run_worker_briefly)
    monkeypatch.setattr(shape_probe, "needs_ray", lambda cluster: cluster.max_workers > 1)


def at(folder: Path, base: Config) -> Config:
    return base.replace(run=Run(storage=str(folder)))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def test_command_writes_shapes_and_a_recipe_with_its_reason(tmp_path: Path, quick: None) -> None:
    """One worker, in a process of this machine, for two global batches."""
    sections: dict[str, Any] = {
        "train": Train(steps=9),
        "batch": Batch(micro=4, global_=16),
        "optimizer": Optimizer(lr=0.25),
        "cluster": Cluster(workers=1, accelerator="cpu", cpus_per_worker=1),  # one thread
    }
    base = at(tmp_path, tiny(**sections))
    (tmp_path / "mine.yaml").write_text(to_yaml(base))
    text = io.StringIO()
    words = ["tune", str(tmp_path / "mine.yaml"), "--batch.global", "8,12"]
    assert cli.run(words, ConsoleReporter(Console(file=text, width=160))) == 0
    folder = tmp_path / "custom-tune"
    rows, summary = rows_of(folder), json.loads((folder / "sweep.json").read_text())
    assert {row["status"] for row in rows} == {"finished"}
    for size, sizes in ((8, {1, 2, 4, 8}), (12, {1, 2, 3, 4, 6, 12})):
        measured = [row for row in rows if row["global"] == size]
        assert len(measured) >= 3 and {row["micro"] for row in measured} <= sizes
        assert all(row["accumulation"] == -(-size // row["micro"]) for row in measured)
    why = summary["recommendation"]["why"]
    best = (folder / "best.yaml").read_text()
    assert best.splitlines()[0] == f"# {why}" and "trains" in why
    recipe = from_yaml(best, "best.yaml")
    chosen = next(row for row in rows if row["trial"] == summary["recommendation"]["best"])
    assert (recipe.batch.micro, recipe.batch.global_) == (chosen["micro"], chosen["global"])
    assert recipe.train.steps == -(-9 * 16 // chosen["global"])  # as many samples
    unscaled = {"train": base.train, "optimizer": base.optimizer}
    assert recipe.replace(batch=base.batch, run=base.run, **unscaled) == base
    assert "best.yaml" in text.getvalue()
    assert chosen["trial"] in (folder / "report.html").read_text()
    assert not (folder / "ray").exists()


@pytest.mark.cluster
def test_killed_worker_is_out_of_memory_at_that_size(tmp_path: Path, quick: None) -> None:
    """The next worker goes on with the sizes that the killed one measured."""
    reporter = Silent()
    sweep = probe_shapes(at(tmp_path, limited(killed=True)), None, reporter)
    assert [(row.micro, row.status) for row in sweep.trials] == [
        (1, "finished"),
        (2, "finished"),
        (4, "finished"),
        (8, "out_of_memory"),
    ]
    reason = "micro-batches of 8 do not fit: the worker process was ended by SIGKILL"
    assert reason in (sweep.trials[-1].error or "")
    best = from_yaml((sweep.folder / "best.yaml").read_text(), "best.yaml")
    assert best.batch.micro in (1, 2, 4) and sweep.status == "finished"
    assert any("measuring shapes that need less memory" in text for _, text in reporter.notes)


def lost(text: str) -> WorkerFailed:
    return WorkerFailed("lost", TrainingError(text))


def run_failing(*failures: tuple[int, Exception]) -> tuple[list[ShapeTask], list[str]]:
    """Measure in groups that time one row and then fail at a size; return the task of each group,
    and the log messages.
    """
    remaining, tasks, reporter = list(failures), list[ShapeTask](), Silent()
    visit = Visit(16, 1, 0.1, 1.0)

    def run(task: ShapeTask, on_message: Any) -> Measurements:
        tasks.append(task)
        if remaining:
            size, error = remaining.pop(0)
            if size:
                on_message({"trying": (16, 1)})
                on_message({"measured": visit})
                on_message({"trying": (16, size)})
            raise error
        return Measurements(1, 4.0, [visit])

    measure_in_groups(ShapeTask(tiny(), (16,)), run, reporter)
    return tasks, [text for _, text in reporter.notes]


def test_lost_worker_is_out_of_memory_only_after_a_second_loss_at_that_shape() -> None:
    tasks, (note,) = run_failing((8, lost("its node died")))
    assert [task.failures for task in tasks] == [(), ()] and "measuring again" in note
    tasks, notes = run_failing(
        (8, lost("NCCL error")), (4, lost("NCCL error")), (8, lost("NCCL error"))
    )
    reason = "NCCL error, twice at this shape, which counts as out of memory"
    assert [task.failures for task in tasks] == [(), (), (), (Failure(16, 8, reason),)]
    assert reason in notes[2]
    with pytest.raises(TrainingError, match="node died"):
        run_failing((0, lost("its node died")), (0, lost("its node died")))


@pytest.mark.parametrize(
    "error",
    [
        lost(describe_exit(-signal.SIGKILL)),
        WorkerFailed("raised", OutOfMemoryError("8 rows do not fit")),
    ],
)
def test_next_group_continues_below_the_size_that_ran_out_of_memory(error: Exception) -> None:
    tasks, _ = run_failing((8, error))
    assert [task.failures for task in tasks] == [(), (Failure(16, 8, str(error)),)]
    assert tasks[1].visits == (Visit(16, 1, 0.1, 1.0),)


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
        match=r"micro-batches of 1 do not fit: CUDA out of memory",
    ):
        probe_shapes(at(tmp_path, limited(max_rows=0)), None, Silent())


@pytest.mark.usefixtures("one_thread")
def test_out_of_memory_ends_the_ascent(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger global batch is not tried with the micro-batch that did not fit in a smaller one."""
    measure = shape_worker.Stepper.measure

    def measure_faster(stepper: Any, global_batch_size: int, micro: int) -> Visit | Failure:
        """Larger micro-batches are faster, which the times of tiny steps may not show."""
        outcome = measure(stepper, global_batch_size, micro)
        return outcome._replace(step_s=1 / micro) if isinstance(outcome, Visit) else outcome

    monkeypatch.setattr(shape_worker.Stepper, "measure", measure_faster)
    messages: list[dict[str, Any]] = []
    base = limited().replace(model=limited().model.with_vocab(32, None))
    measurements = measure_shapes(ShapeTask(base, (16, 32)), Group(), messages.append)
    assert measurements.failures == [Failure(16, 8, "CUDA out of memory")]
    for size in (16, 32):
        times = measurements.step_times(size)
        assert set(times) == {1, 2, 4} and sum(map(len, times.values())) > 6
    assert [message["trying"] for message in messages if "trying" in message][:4] == [
        (16, micro) for micro in (1, 2, 4, 8)
    ]


def _measure(base: Config, group: Group, folder: Path) -> dict[str, Any]:
    shape_worker.WINDOW_S = 0.0
    base = base.replace(model=base.model.with_vocab(32, None))
    measurements = measure_shapes(ShapeTask(base, (16,)), group, lambda _: None)
    everywhere = group.all_gather_objects(measurements)
    memory_probe.free_memory = lambda: (64 << 30) >> group.rank
    limits = group.all_gather_objects(shape_worker._memory_limit_gib(group))
    equal = all(each == measurements for each in everywhere)
    return {"equal": equal, "limits": limits, **asdict(measurements)}


def test_two_ranks_measure_together_and_agree(forked_children: None) -> None:
    """If their free memory differs, both have the lower limit."""
    measured = spawn_workers(_measure, tiny(workers=2))
    assert measured["equal"] and measured["workers"] == 2
    sizes = [micro for _, micro, *_ in measured["visits"]]
    assert set(sizes) <= {1, 2, 4, 8}  # of the 8 rows of a rank
    assert len(sizes) > len(set(sizes))
    first, second = measured["limits"]
    assert first == second == pytest.approx(32 * 0.8 / 2, abs=2)


def test_global_batches_are_measured_in_ascending_order() -> None:
    base = recipes.load("sample")
    assert plan_task(base, None).global_batch_sizes == (128,)
    assert plan_task(base, build_space({"batch.global": [256, 64]})).global_batch_sizes == (64, 256)
    with pytest.raises(UsageError, match="--goal throughput takes no ranges; list the values"):
        plan_task(base, build_space({"batch.global": "uniform(8,64)"}))


def test_best_recipe_keeps_an_elastic_range_and_the_number_of_samples() -> None:
    base = recipes.load("sample").with_cluster(workers="1-4")
    best = TrialRow("s001", "finished", micro=32, accumulation=2, workers=4, global_batch_size=256)
    recipe = best_recipe(base, best)
    assert (recipe.cluster.workers, recipe.train.steps) == ("1-4", 150)  # of 300 x 128
    assert best_recipe(base, replace(best, global_batch_size=512)).train.steps == 75
    assert best_recipe(base, replace(best, global_batch_size=100)).train.steps == 384
    epochs = base.replace(train=base.train.replace(steps=None, epochs=2))
    assert best_recipe(epochs, best).train == epochs.train
    of_two = TrialRow(
        "s002", "finished", micro=64, accumulation=1, workers=2, global_batch_size=128
    )
    assert best_recipe(base, of_two).batch.micro == 64
    assert str(resolve_batch_shape(recipe.batch, 4)) == (
        "micro 32 x accumulation 2 x workers 4 = 256 rows per step"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (128, None),
        (
            512,
            " train.steps is 75 instead of 300 and optimizer.warmup_steps is 8 instead of 30, for "
            "as many samples.",
        ),
    ],
)
def test_changed_number_of_steps_is_in_the_recommendation(
    size: int, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measurements(1, 4.0, [Visit(size, 32, 0.1, 1.0)])
    monkeypatch.setattr(shape_probe, "measure", lambda *_: measured)
    space = build_space({"batch.global": [size]})
    sweep = probe_shapes(at(tmp_path, recipes.load("sample")), space, Silent())
    assert sweep.recommendation is not None
    why = sweep.recommendation.why
    assert why.endswith(text) if text else "train.steps" not in why


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--batch.global", "8,16", "--goal", "loss"], (["--goal", "loss"], ["batch.global=8,16"])),
        (
            ["--train.seed", "1", "--batch.global=8,16"],
            (["--train.seed", "1"], ["batch.global=8,16"]),
        ),
        (["--batch.global", "8"], (["--batch.global", "8"], [])),
    ],
)
def test_global_batch_can_be_a_list(
    words: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert split_global_list(words) == expected


@pytest.mark.cluster
def test_ray_workers_measure_and_are_replaced_after_out_of_memory(
    local_ray: None, tmp_path: Path
) -> None:
    base = at(
        tmp_path,
        limited(killed=True, cluster=Cluster(workers=2, accelerator="cpu", cpus_per_worker=1)),
    )
    sweep = probe_shapes(base, None, Silent())
    statuses = {row.micro: row.status for row in sweep.trials}
    assert statuses[8] == "out_of_memory" and "finished" in statuses.values()
    assert sweep.summary["workers"] == 2
    assert from_yaml((sweep.folder / "best.yaml").read_text(), "best.yaml").cluster.workers == 2
    assert not (sweep.folder / "ray").exists()
