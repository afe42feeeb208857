"""Sweeps on Ray: one that is stopped after its first trial and resumed by the same command; one
whose trials fail.
"""

import gc
import io
import json
import os
import signal

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from mmray import cli
from mmray.config import Train, from_yaml, to_yaml
from mmray.console.reporter import ConsoleReporter
from mmray.errors import ResourceError
from mmray.models.two_tower import TwoTower
from mmray.report.sweep import SweepRecord
from mmray.training.resolve import resolve_run
from mmray.tuning.search import search
from mmray.tuning.trials import SweepRequest
from tests.made import make_set, row
from tests.nodes import several_nodes
from tests.spaces import parse_space
from tests.training.runs import Silent, config, lines, make_data

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("forked_data_processes"),  # before Ray starts
]
HERE = "tests.tuning.test_search"
SPACE = ["optimizer.lr=1e-6,1e-3,1e-7"]
RUNGS = (64, 256)  # samples: 4 and 16 steps of 16 rows


def _at_step_two(name, act, rank=None):
    """A callback that acts at the second step, on every rank or on one."""

    def on_step(self, step, metrics):
        if step == 2 and (rank is None or dist.get_rank() == rank):
            act()

    return type(name, (), {"on_step": on_step})


def _run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def _raise():
    raise ValueError("a bug of the user")


def _diverge():
    with torch.no_grad():
        for model in (each for each in gc.get_objects() if isinstance(each, TwoTower)):
            for weight in model.parameters():
                weight.fill_(torch.nan)


OutOfMemory = _at_step_two("OutOfMemory", _run_out_of_memory)
OutOfMemoryOnOneRank = _at_step_two("OutOfMemoryOnOneRank", _run_out_of_memory, rank=1)
Raise = _at_step_two("Raise", _raise)
Kill = _at_step_two("Kill", lambda: os.kill(os.getpid(), signal.SIGKILL))
Diverge = _at_step_two("Diverge", _diverge)


class Watching(Silent):
    """Keeps the rows and requests a stop, like Ctrl-C, after the first rung."""

    def __init__(self, stop=False):
        super().__init__()
        self.stop, self.rows = stop, []

    def trial(self, row, num_rungs):
        assert num_rungs in (1, len(RUNGS))
        self.rows.append(row)
        if self.stop and row.rungs:
            self.stop = False
            os.kill(os.getpid(), 2)


def request_of(recipe, space, goal, concurrency=None, **length):
    """A sweep whose trials have this length."""
    return SweepRequest(recipe, Train(**length), parse_space(space), goal, concurrency=concurrency)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    # a process without Ray Train
    return config(make_data(folder / "set"), folder, "first").with_cluster(workers=1)


@pytest.fixture(scope="module")
def stopped(local_ray, recipe):
    listener = Watching(stop=True)
    sweep = search(request_of(recipe, SPACE, "loss", samples=RUNGS[-1]), listener)
    return sweep, listener


@pytest.fixture(scope="module")
def finished(stopped, recipe):
    """The same command again: exit code, output, sweep folder."""
    folder = stopped[0].folder
    file = folder.parent / "mine.yaml"
    file.write_text(to_yaml(recipe))
    text = io.StringIO()
    words = ["tune", str(file), "--space", *SPACE, "--goal", "loss"]
    code = cli.run(
        [*words, "--train.samples", str(RUNGS[-1])],
        ConsoleReporter(Console(file=text, width=100)),
    )
    return code, text.getvalue(), folder


def rows_of(folder):
    return {row.trial: row for row in SweepRecord.read(folder).trials}


def test_stopped_sweep_keeps_rungs(stopped):
    sweep, listener = stopped
    assert sweep.status == "stopped"
    note = "stopping the running trials; press Ctrl-C again to exit immediately"
    assert ("stop", note) in listener.notes
    first = sweep.trials[0]
    assert first.status == "paused" and [rung.samples for rung in first.rungs] == [64]
    assert sweep.recommendation.best == "t001"
    assert "It has 64 samples only" in sweep.recommendation.why


def test_same_command_repeats_no_finished_rung(stopped, finished):
    code, text, folder = finished
    assert code == 0
    before, after = stopped[0].trials[0], rows_of(folder)
    assert after["t001"].rungs[0] == before.rungs[0]
    assert "rung 1 of 2" not in text.split("t002")[0]
    assert [rung.samples for rung in after["t001"].rungs] == list(RUNGS)
    logged = lines(folder / "trials" / "t001")
    # each step once
    assert [line["step"] for line in logged] == list(range(1, 17))


def test_each_trial_has_a_row_with_its_end(finished):
    _, _, folder = finished
    rows = list(rows_of(folder).values())
    good, *others = rows
    assert good.settings["optimizer.lr"] == 1e-6 and good.status == "finished"
    assert [row.settings for row in rows if row.is_recipe] == [{"optimizer.lr": 1e-3}]
    assert sorted((row.status, len(row.rungs)) for row in others) == [
        ("finished", 2),
        ("pruned", 1),
    ]
    assert good.value("loss") < min(row.value("loss") for row in others)
    assert [point.samples for point in good.curve] == [64, 128, 192, 256]
    assert good.curve[-1].value == good.value("loss")
    assert (good.micro, good.accumulation, good.workers, good.global_batch_size) == (4, 4, 1, 16)
    assert good.samples_per_s > 0 and good.peak_gib > 0 and good.elapsed_s > 0


def test_sweep_folder_has_the_files_of_the_report(finished):
    _, text, folder = finished
    summary = json.loads((folder / "sweep.json").read_text())
    assert (summary["kind"], summary["status"], summary["goal"]) == ("sweep", "finished", "loss")
    assert summary["space"] == {"optimizer.lr": [1e-6, 1e-3, 1e-7]}
    assert (summary["concurrency"], summary["rungs"]) == (1, list(RUNGS))
    assert summary["recommendation"]["best"] == "t001"
    assert summary["recommendation"]["why"] in " ".join(text.split())
    assert summary["environment"]["packages"]["ray"]
    assert not (folder / "ray").exists()
    page = (folder / "report.html").read_text()
    assert "held-out loss by samples" in page.lower()


def test_rate_is_constant_at_rungs_and_decays_in_the_best_recipe(finished):
    _, _, folder = finished
    logged = lines(folder / "trials" / "t001")
    # after the warm-up
    assert {line["train/lr"] for line in logged[2:]} == {1e-6}
    best = from_yaml((folder / "best.yaml").read_text(), "best.yaml")
    assert best.optimizer.schedule == "cooldown"


def test_best_config_is_the_recipe_that_the_trial_trained(finished, recipe):
    """Equal but for the length, the measurements and the folder of a trial."""
    _, _, folder = finished
    assert (folder / "best.yaml").read_text().startswith("# t001 has ")
    best = from_yaml((folder / "best.yaml").read_text(), "best.yaml")
    assert best.train == recipe.train  # the length of the recipe, not of the trial
    assert (best.batch.micro, best.batch.global_, best.run.name) == (4, 16, None)
    ours = resolve_run(best, Silent()).config
    trained = from_yaml((folder / "trials" / "t001" / "config.yaml").read_text(), "config.yaml")
    names = ("steps", "samples", "log_every", "checkpoint_every")
    own = {name: getattr(trained.train, name) for name in names}
    cluster = ours.cluster.replace(max_failures=trained.cluster.max_failures)
    measured = ours.replace(train=ours.train.replace(**own), cluster=cluster)
    measured = measured.replace(optimizer=measured.optimizer.replace(schedule="constant"))
    assert measured.replace(evaluate=trained.evaluate, run=trained.run) == trained


def test_each_failure_is_a_row_with_its_reason_and_one_good_trial_a_good_sweep(local_ray, recipe):
    faults = ["", *(f"{HERE}:{name}" for name in ("OutOfMemory", "Raise", "Kill", "Diverge"))]
    space = [
        f"train.callbacks={','.join(f'[{name}]' for name in faults)}",
        "cluster.cpus_per_worker=1,64",
    ]
    base = recipe.replace(run=recipe.run.replace(name="failures"))
    sweep = search(request_of(base, space, "loss", samples=RUNGS[0]), Watching())
    assert (sweep.status, sweep.recommendation.best) == ("finished", "t001")
    ends = {
        row.settings["train.callbacks"][0].partition(":")[2]: (row.status, row.error)
        for row in sweep.trials
        if row.settings["train.callbacks"] and row.settings["cluster.cpus_per_worker"] == 1
    }
    status, error = ends["OutOfMemory"]
    assert status == "out_of_memory" and "Tried to allocate" in error
    failed = sweep.folder / next(row.run for row in sweep.trials if row.status == "out_of_memory")
    result = json.loads((failed / "result.json").read_text())
    assert result["status"] == "failed" and "CUDA out of memory" in result["error"]
    assert "CUDA out of memory" in (failed / "report.html").read_text()
    assert ends["Raise"] == ("failed", "ValueError: a bug of the user")
    assert ends["Kill"][0] == "failed" and "SIGKILL" in ends["Kill"][1]
    assert ends["Diverge"] == ("failed", "evaluate/loss is not finite")
    never = [row for row in sweep.trials if row.settings["cluster.cpus_per_worker"] == 64]
    assert len(never) == 5 and {row.status for row in never} == {"infeasible"}
    assert all("1 training worker of 64 CPU" in row.error for row in never)


def test_infeasible_sweep_reports_missing_resources(local_ray, recipe):
    wide = recipe.with_cluster(workers=2, cpus_per_worker=9.0).replace(
        run=recipe.run.replace(name="wide")
    )
    with pytest.raises(
        ResourceError, match=r"2 training workers of 9 CPU each.* the cluster has 8 CPU"
    ):
        search(request_of(wide, ["batch.micro=4"], "throughput"), Watching())


def test_listed_batch_shapes_are_measured_in_trials(local_ray, recipe):
    base = recipe.replace(run=recipe.run.replace(name="shapes"))
    space = ["batch.micro=4,8,32"]
    sweep = search(request_of(base, space, "throughput", steps=3), Watching())
    small, large, too_large = sweep.trials
    assert sweep.status == "finished" and (small.status, large.status) == ("finished", "finished")
    assert [(row.micro, row.accumulation, row.global_batch_size) for row in (small, large)] == [
        (4, 4, 16),
        (8, 2, 16),
    ]
    assert min(small.samples_per_s, large.samples_per_s, small.peak_gib, large.peak_gib) > 0
    assert too_large.status == "infeasible" and "more than 16 rows per worker" in too_large.error
    best = from_yaml((sweep.folder / "best.yaml").read_text(), "best.yaml")
    assert best.batch.micro == sweep.best.micro and best.optimizer == base.optimizer


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_24_configurations_on_two_cores_do_not_wait_for_each_other(tmp_path):
    # the logical CPUs that mmray starts Ray with on two cores
    with several_nodes(head={"num_cpus": 3}) as nodes:
        recipe = config(
            make_data(tmp_path / "set"), tmp_path, "many", address=nodes.address
        ).with_cluster(workers=1)
        rates = ",".join(f"{number}e-4" for number in range(1, 25))
        request = request_of(
            recipe, [f"optimizer.lr={rates}"], "throughput", concurrency=24, steps=2
        )
        sweep = search(request, Watching())
    assert sweep.status == "finished" and len(sweep.trials) == 24
    assert {row.status for row in sweep.trials} == {"finished"}


@pytest.mark.slow
@pytest.mark.timeout(600)  # takes two minutes
def test_two_trials_run_concurrently_on_two_nodes(tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(50)])
    listener = Watching()
    with several_nodes({"num_cpus": 4}, {"num_cpus": 4}) as nodes:
        recipe = config(tmp_path / "set", tmp_path, "sweep", address=nodes.address)
        space = [f"train.callbacks=[],[{HERE}:OutOfMemoryOnOneRank]", "batch.micro=4,8"]
        sweep = search(request_of(recipe, space, "throughput", steps=4), listener)
    assert (sweep.status, sweep.summary["concurrency"]) == ("finished", 2)
    split, whole, *failed = sweep.trials
    assert (split.accumulation, whole.accumulation) == (2, 1)
    assert {row.status for row in failed} == {"out_of_memory"}
    assert all("Tried to allocate" in row.error for row in failed)
