"""Batch shapes are measured in real worker processes: files, out of memory, lost workers,
communication.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import ray.train
import torch
from rich.console import Console

from mmray import cli
from mmray.bench.spawn import spawn_workers
from mmray.cli.console import Terminal
from mmray.cli.tune_shape import split_global_list
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
from mmray.config.search_space import build_space, parse_space
from mmray.engine.batch import BatchShape, resolve_batch_shape
from mmray.engine.collectives import Group
from mmray.errors import OutOfMemoryError, TrainingError, UsageError
from mmray.models.two_tower import TwoTower
from mmray.training.local import WorkerFailed, describe_exit, resolve_on_this_machine
from mmray.tuning import shape_group, shape_probe, shape_worker
from mmray.tuning.shape import (
    FailedShape,
    Measurements,
    Sample,
    ShapeTask,
    fit,
    predict_rows,
    with_measured,
)
from mmray.tuning.shape_probe import best_recipe, candidate_workers, plan_probes, probe_shapes
from mmray.tuning.shape_worker import Stepper, measure_shapes
from tests.bench.test_step import tiny
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, and one worker without Ray, which other tests of this process may have started."""
    monkeypatch.setattr(shape_worker, "WINDOW_S", 0.0)
    monkeypatch.setattr(shape_probe, "needs_ray", lambda cluster: cluster.max_workers > 1)


def at(folder: Path, base: Config) -> Config:
    return base.replace(run=Run(storage=str(folder)))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


@pytest.mark.slow  # a minute or two, as in use
def test_command_writes_shapes_and_a_recipe_with_its_reason(tmp_path: Path) -> None:
    """One worker, in a process of this machine, for two global batches."""
    base = at(
        tmp_path,
        tiny(train=Train(steps=9), batch=Batch(micro=4, global_=16), optimizer=Optimizer(lr=0.25)),
    )
    (tmp_path / "mine.yaml").write_text(to_yaml(base))
    text = io.StringIO()
    words = ["tune", str(tmp_path / "mine.yaml"), "--batch.global", "8,12"]
    assert cli.run(words, Terminal(Console(file=text, width=160))) == 0
    folder = tmp_path / "custom-tune"
    rows, summary = rows_of(folder), json.loads((folder / "sweep.json").read_text())
    assert [(row["global"], row["micro"], row["accumulation"]) for row in rows] == [
        *((8, micro, 8 // micro) for micro in (1, 2, 4, 8)),
        *((12, micro, 12 // micro) for micro in (1, 2, 4, 6, 12)),
    ]
    for size in (8, 12):
        statuses = [row["status"] for row in rows if row["global"] == size]
        assert statuses.count("finished") >= 2 and set(statuses) == {"finished", "predicted"}
    why = summary["recommendation"]["why"]
    best = (folder / "best.yaml").read_text()
    assert best.splitlines()[0] == f"# {why}" and "trains" in why
    recipe = from_yaml(best, "best.yaml")
    chosen = next(row for row in rows if row["trial"] == summary["recommendation"]["best"])
    assert (recipe.batch.micro, recipe.batch.global_) == (chosen["micro"], chosen["global"])
    assert recipe.train.steps == -(-9 * 16 // chosen["global"])  # as many samples
    unscaled = {"train": base.train, "optimizer": base.optimizer}
    assert recipe.replace(batch=base.batch, run=base.run, **unscaled) == base
    assert "further micro-batch takes" in text.getvalue() and "best.yaml" in text.getvalue()
    assert chosen["trial"] in (folder / "report.html").read_text()
    measured = {sample["micro"]: sample["step_s"] for sample in summary["probes"][0]["samples"]}
    assert (
        set(measured) == set(summary["fits"][0]["micros"]) == {1, 2, 4, 8, 12}
        and not (folder / "ray").exists()
    )


@pytest.mark.cluster
def test_killed_worker_is_out_of_memory_at_that_size(tmp_path: Path, quick: None) -> None:
    reporter = Silent()
    folder, summary, rows = probe_shapes(at(tmp_path, limited(killed=True)), None, reporter)
    statuses = {row["micro"]: row["status"] for row in rows}
    assert statuses[8] == statuses[16] == "out_of_memory" and statuses[1] != "out_of_memory"
    assert (
        "a micro-batch of 8 rows does not fit: the worker process was ended by SIGKILL"
    ) in rows[-1]["error"]
    best = from_yaml((folder / "best.yaml").read_text(), "best.yaml")
    assert best.batch.micro in (1, 2, 4) and summary["status"] == "finished"
    assert any("measuring shapes that need less memory" in text for _, text in reporter.notes)


def lost(text: str) -> WorkerFailed:
    return WorkerFailed("lost", TrainingError(text))


def run_failing(
    *failures: tuple[int, Exception],
) -> tuple[list[tuple[FailedShape, ...]], list[str]]:
    """Measure in groups that fail at a size; return the failed shapes of each group's task, and the
    log messages.
    """
    remaining, failed, reporter = list(failures), list[tuple[FailedShape, ...]](), Silent()

    def run(task: ShapeTask, on_message: Any) -> Measurements:
        failed.append(task.failed_shapes)
        if remaining:
            size, error = remaining.pop(0)
            on_message({"trying": (size, size)} if size else {})
            raise error
        return Measurements(1, 4.0, samples=[Sample(1, 1, 0.1, 0.01, 1.0)])

    shape_probe._until_it_fits(ShapeTask(tiny(), (16,), (1,)), run, reporter)
    return failed, [text for _, text in reporter.notes]


def test_lost_worker_is_out_of_memory_only_after_a_second_loss_at_that_shape() -> None:
    failed, (note,) = run_failing((8, lost("its node died")))
    assert failed == [(), ()]
    assert note == (
        "a micro-batch of 8 rows: its node died; not known to be out of memory, measuring again"
    )
    failed, notes = run_failing(
        (8, lost("NCCL error")), (4, lost("NCCL error")), (8, lost("NCCL error"))
    )
    reason = "NCCL error, twice at this shape, which counts as out of memory"
    assert failed == [(), (), (), ((8, 8, reason),)] and reason in notes[2]
    with pytest.raises(TrainingError, match="node died"):
        run_failing((0, lost("its node died")), (0, lost("its node died")))


@pytest.mark.parametrize(
    "error", [lost(describe_exit(-signal.SIGKILL)), OutOfMemoryError("8 rows do not fit")]
)
def test_lost_worker_with_a_sign_of_too_little_memory_is_not_repeated(error: Exception) -> None:
    assert run_failing((8, error))[0] == [(), ((8, 8, str(error)),)]


def test_worker_killed_by_the_memory_monitor_is_reported_and_not_its_peer() -> None:
    killed = ray.exceptions.OutOfMemoryError(
        "Task was killed due to the node running low on memory.\nMemory: 9 GB"
    )
    failures = {0: RuntimeError("Connection closed by peer"), 1: killed}
    error = shape_group._find_cause(ray.train.WorkerGroupError("failed", failures))
    assert (
        isinstance(error, WorkerFailed)
        and isinstance(error.cause, OutOfMemoryError)
        and error.kind == "lost"
    )
    assert str(error) == (
        "a worker was lost (Task was killed due to the node running low on memory.)"
    )


@pytest.mark.usefixtures("one_thread")
def test_combination_of_which_no_row_fits_is_a_row(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is measured, and a killed command keeps it."""
    states = []

    def run(task: ShapeTask, report: Any) -> Measurements:
        states.append(
            [json.loads(file.read_text())["status"] for file in tmp_path.glob("*/sweep.json")]
        )
        if task.config.train.precision == "bf16":
            raise OutOfMemoryError("a micro-batch of 1 row does not fit")
        return measure_shapes(task, Group(), report)

    monkeypatch.setattr(shape_probe, "_run_locally", run)
    base = at(tmp_path, tiny(batch=Batch(micro=4, global_=16))).with_cluster(cpus_per_worker=1)
    space = build_space({"train.precision": ["bf16", "fp32"]}, None)
    folder, summary, rows = probe_shapes(base, space, Silent())
    assert states == [[], ["running"]] and summary["status"] == "finished"
    assert (rows[0]["status"], rows[0]["error"]) == (
        "out_of_memory",
        "a micro-batch of 1 row does not fit",
    )
    assert {row["status"] for row in rows[1:]} == {"predicted", "finished"}
    assert from_yaml((folder / "best.yaml").read_text(), "best.yaml").train.precision == "fp32"
    assert "a micro-batch of 1 row does not fit" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("one_thread")
def test_failed_accumulated_step_does_not_refuse_larger_single_steps(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, tried = Stepper.measure, list[tuple[int, int]]()

    def measure_or_fail(stepper: Stepper, rows: int, micro: int) -> Sample | str:
        tried.append((micro, rows))
        if rows > micro >= 4:
            raise OutOfMemoryError("out of memory")
        return measure(stepper, rows, micro)

    monkeypatch.setattr(Stepper, "measure", measure_or_fail)
    monkeypatch.setattr(
        shape_probe, "_run_locally", lambda task, report: measure_shapes(task, Group(), report)
    )
    base = at(tmp_path, tiny(batch=Batch(micro=4, global_=16))).with_cluster(cpus_per_worker=1)
    _, summary, rows = probe_shapes(base, None, Silent())
    assert [row["status"] for row in rows if row["micro"] in (4, 8)] == ["out_of_memory"] * 2
    assert rows[2]["error"] == "a step of 12 rows in micro-batches of 4 does not fit: out of memory"
    assert rows[-1]["micro"] == 16 and rows[-1]["status"] in ("predicted", "finished")
    assert tried.count((4, 12)) == 1 and (8, 24) not in tried
    assert summary["probes"][0]["failed_shapes"] == [
        {"micro": 4, "rows": 12, "reason": "out of memory"}
    ]


def test_model_of_which_no_row_fits_is_an_error(tmp_path: Path, quick: None) -> None:
    with pytest.raises(
        OutOfMemoryError,
        match=r"a micro-batch of 1 row does not fit: CUDA out of memory \(rank 0\)",
    ):
        probe_shapes(at(tmp_path, limited(max_rows=0)), None, Silent())


@pytest.mark.usefixtures("one_thread")
def test_out_of_memory_ends_the_ascent(quick: None) -> None:
    messages: list[dict[str, Any]] = []
    base = limited().replace(model=limited().model.with_vocab(32, None))
    task = ShapeTask(base, (16,), (1,))
    found = measure_shapes(task, Group(), messages.append)
    assert (found.too_large, found.reason) == (8, "CUDA out of memory (rank 0)")
    assert {(sample.micro, sample.accumulation) for sample in found.samples} == {
        (micro, accumulation) for micro in (1, 2, 4) for accumulation in (1, 3)
    }
    assert [message["trying"] for message in messages if "trying" in message][:4] == [
        (micro, micro) for micro in (1, 2, 4, 8)
    ]
    rows = predict_rows(task, found, fit(found))
    assert [row["status"] for row in rows] == ["predicted"] * 3 + ["out_of_memory"] * 2
    assert len(found.pairs[16][0]) >= 2 and set(found.peak_gib[16]) <= {1, 2, 4}


def _measure(base: Config, group: Group, folder: Path, global_rows: int) -> dict[str, Any]:
    shape_worker.WINDOW_S = 0.0
    base = base.replace(model=base.model.with_vocab(32, None))
    messages: list[dict[str, Any]] = []
    found = measure_shapes(ShapeTask(base, (global_rows,), (1, 2)), group, messages.append)
    return asdict(found) | {"messages": messages}


def test_two_ranks_measure_communication_and_agree_on_sizes(forked_workers: None) -> None:
    found = spawn_workers(partial(_measure, global_rows=16), tiny(workers=2))
    assert list(found["sync_s"]) == ["2"] and found["sync_s"]["2"] >= 0
    assert {"status": "communication", "trying": [8, 8]} in found["messages"]
    # 16 rows of one worker of an elastic run
    assert {sample[0] for sample in found["samples"]} == {1, 2, 4, 8, 16}
    assert len(found["pairs"]["16"]) >= 4 and all(
        int(micro) <= 8 for micro in found["peak_gib"]["16"]
    )


def _memory_limits(base: Config, group: Group, folder: Path) -> list[float]:
    shape_worker.free_memory = lambda: (64 << 30) >> group.rank
    return group.all_gather_objects(shape_worker._memory_limit_gib(group))


def test_ranks_with_different_free_memory_have_the_lower_limit(forked_workers: None) -> None:
    first, second = spawn_workers(_memory_limits, tiny(workers=2))
    assert first == second == pytest.approx(32 * 0.8 / 2, abs=2)


def test_other_settings_are_probed_in_turn() -> None:
    base = recipes.load("sample")
    with pytest.raises(UsageError, match="--goal throughput takes no ranges; list the values"):
        plan_probes(base, build_space({"optimizer.eps": "uniform(1e-8,1e-6)"}, 3))
    probes = plan_probes(base, parse_space(["batch.global=64,256", "train.precision=fp32,bf16"]))
    assert [probe.settings for probe in probes] == [
        {"train.precision": "fp32"},
        {"train.precision": "bf16"},
    ]
    assert [probe.task.global_rows for probe in probes] == [(64, 256)] * 2
    assert plan_probes(base, None)[0].task.global_rows == (128,)


def test_fewer_workers_are_predicted_only_if_their_steps_are_equal() -> None:
    elastic = tiny().with_cluster(workers="2-8", cpus_per_worker="auto")
    assert candidate_workers(elastic, 6, "gpu") == (2, 4, 6, 8)
    # threads of a worker depend on the number of workers
    assert candidate_workers(elastic, 6, "cpu") == (6, 8)
    sharded = elastic.replace(train=elastic.train.replace(parallel="fsdp"))
    assert candidate_workers(sharded, 8, "gpu") == (8,)


def test_best_recipe_keeps_an_elastic_range_and_the_number_of_samples() -> None:
    base = recipes.load("sample").with_cluster(workers="1-4")
    best = {"settings": {"train.precision": "bf16"}, "global": 256, "micro": 32, "workers": 4}
    recipe = best_recipe(base, best)
    # of 300 x 128
    assert (recipe.cluster.workers, recipe.train.precision, recipe.train.steps) == (
        "1-4",
        "bf16",
        150,
    )
    assert best_recipe(base, best | {"global": 512}).train.steps == 75
    assert best_recipe(base, best | {"global": 100}).train.steps == 384
    epochs = base.replace(train=base.train.replace(steps=None, epochs=2))
    assert best_recipe(epochs, best).train == epochs.train.replace(precision="bf16")
    assert str(resolve_batch_shape(recipe.batch, 4)) == (
        "micro 32 x accumulation 2 x workers 4 = 256 rows per step"
    )
    assert best_recipe(base, best | {"workers": 2}).cluster.workers == 2


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (128, None),
        (512, " train.steps is 75 instead of 300 for as many samples; the warm-up is scaled too."),
    ],
)
def test_changed_number_of_steps_is_in_the_recommendation(size: int, text: str | None) -> None:
    base = recipes.load("sample")
    probe = plan_probes(base, parse_space([f"batch.global={size}"]))[0]
    world = base.cluster.max_workers
    found = Measurements(
        world, 4.0, samples=[Sample(32, 1, 0.1, 0.01, 1.0)], pairs={size: [{32: 0.1}]}
    )
    found.peak_gib = {size: {32: 1.0}}
    rows = with_measured(predict_rows(probe.task, found, fit(found)), found)
    recommendation = shape_probe._recommend(base, rows, [(probe, found)])
    assert recommendation is not None
    assert (
        recommendation["why"].endswith(text) if text else "train.steps" not in recommendation["why"]
    )


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
    folder, summary, rows = probe_shapes(base, None, Silent())
    statuses = {row["micro"]: row["status"] for row in rows}
    assert statuses[8] == "out_of_memory" and "finished" in statuses.values()
    assert summary["probes"][0]["workers"] == 2 and set(summary["probes"][0]["sync_s"]) == {2}
    assert from_yaml((folder / "best.yaml").read_text(), "best.yaml").cluster.workers == 2
    assert not (folder / "ray").exists()


@pytest.mark.slow
def test_prediction_is_within_15_percent_of_measured_steps_of_the_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 micro-batches x 3 accumulations on all cores; needs an idle machine. Prints the table.

    The shapes are measured between the visits of the probe, so that both have the same speed of a
    shared machine.
    """
    shapes = [BatchShape(micro * many, micro, 1) for micro in (8, 16, 32, 64) for many in (1, 2, 4)]
    times_s: dict[BatchShape, list[float]] = {shape: [] for shape in shapes}
    turns, measure = itertools.cycle(shapes), Stepper.measure

    def measure_pair(stepper: Stepper, rows: int, micro: int) -> Sample | str:
        shape = next(turns)
        sample = measure(stepper, shape.global_batch_size, shape.micro_batch_size)
        assert isinstance(sample, Sample)
        times_s[shape].append(sample.step_s)
        return measure(stepper, rows, micro)

    monkeypatch.setattr(Stepper, "measure", measure_pair)
    base = resolve_on_this_machine(recipes.load("sample"))
    base = base.replace(model=base.model.with_vocab(512, None))
    found = measure_shapes(ShapeTask(base, (64,), (1,)), Group(), lambda _: None)
    model = fit(found)
    typical_s = {shape: statistics.median(seconds) for shape, seconds in times_s.items()}
    errors = {shape: model.step_s(shape) / typical_s[shape] - 1 for shape in shapes}
    with capsys.disabled():
        print(f"\n{model.format()}")
        for shape, seconds in times_s.items():
            noise = max(seconds) / min(seconds) - 1
            ms = f"{1000 * typical_s[shape]:.1f} ms"
            ms += f", predicted {1000 * model.step_s(shape):.1f} ms ({errors[shape]:+.1%})"
            print(
                f"{shape.micro_batch_size:3} x {shape.accumulation}: {ms}, {len(seconds)} visits differ by "
                f"{noise:.1%}"
            )
    assert max(map(abs, errors.values())) < 0.15
