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
from mmray.cli.console import Terminal
from mmray.config import from_yaml, to_yaml
from mmray.config.search_space import parse_space
from mmray.errors import ResourceError
from mmray.models.two_tower import TwoTower
from mmray.training.resolve import resolve_run
from mmray.tuning.search import search
from mmray.tuning.sweep import Sweep
from mmray.tuning.trials import clear_length_and_derived_batch
from tests.made import make_set, row
from tests.nodes import several_nodes
from tests.training.runs import Silent, config, lines, make_data

pytestmark = pytest.mark.cluster
HERE = "tests.tuning.test_search"
OOM = f"{HERE}:OutOfMemory"
SPACE = ["optimizer.lr=1e-6,1e-3,1e-7", f"train.callbacks=[],[{OOM}]"]
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

    def progress(self, row, rungs):
        assert rungs == RUNGS or len(rungs) == 1
        self.rows.append(row)
        if self.stop and row["rungs"]:
            self.stop = False
            os.kill(os.getpid(), 2)

    def table(self, rows, rungs, time_left):
        assert time_left.elapsed_s > 0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    # a process without Ray Train
    return config(make_data(folder / "set"), folder, "first").with_cluster(workers=1)


@pytest.fixture(scope="module")
def stopped(local_ray, recipe):
    typed = clear_length_and_derived_batch(recipe, [])
    length = typed.replace(train=typed.train.replace(samples=RUNGS[-1]))
    listener = Watching(stop=True)
    return search(Sweep(recipe, length, parse_space(SPACE), goal="loss"), listener), listener


@pytest.fixture(scope="module")
def finished(stopped, recipe):
    """The same command again: exit code, output, sweep folder."""
    folder = stopped[0][0].path
    file = folder.parent / "mine.yaml"
    file.write_text(to_yaml(recipe))
    words = [word for space in SPACE for word in ("--space", space)]
    text = io.StringIO()
    options = ["--goal", "loss", "--train.samples", str(RUNGS[-1])]
    code = cli.run(["tune", str(file), *words, *options], Terminal(Console(file=text, width=100)))
    return code, text.getvalue(), folder


def rows_of(folder):
    return {
        row["trial"]: row
        for row in map(json.loads, (folder / "trials.jsonl").read_text().splitlines())
    }


def test_stopped_sweep_keeps_rungs(stopped):
    (_, summary, rows), listener = stopped
    assert summary["status"] == "stopped"
    assert (
        "stop",
        "stopping the running trials; press Ctrl-C again to exit immediately",
    ) in listener.notes
    assert rows[0]["status"] == "paused" and [rung["samples"] for rung in rows[0]["rungs"]] == [64]
    assert (
        summary["recommendation"]["best"] == "t001"
        and ("It has 64 samples only") in summary["recommendation"]["why"]
    )


def test_same_command_repeats_no_finished_rung(stopped, finished):
    code, text, folder = finished
    assert code == 0
    before, after = stopped[0][2][0], rows_of(folder)
    assert (
        after["t001"]["rungs"][0] == before["rungs"][0]
        and ("rung 1 of 2") not in text.split("t002")[0]
    )
    assert [rung["samples"] for rung in after["t001"]["rungs"]] == list(RUNGS)
    logged = lines(folder / "trials" / "t001")
    # each step once
    assert [line["step"] for line in logged if line["step"] <= 16] == list(range(1, 17))


def test_each_trial_has_a_row_with_its_end(finished):
    _, _, folder = finished
    rows = list(rows_of(folder).values())
    good, *others = (row for row in rows if not row["settings"]["train.callbacks"])
    failed, *skipped = (row for row in rows if row["settings"]["train.callbacks"])
    assert good["settings"]["optimizer.lr"] == 1e-6 and good["status"] == "finished"
    assert [row["settings"] for row in rows if row["is_recipe"]] == [
        {"optimizer.lr": 1e-3, "train.callbacks": []}
    ]
    assert sorted((row["status"], len(row["rungs"])) for row in others) == [
        ("finished", 2),
        ("pruned", 1),
    ]
    assert failed["status"] == "out_of_memory" and "CUDA out of memory" in failed["error"]
    assert [row["status"] for row in skipped] == ["infeasible", "infeasible"]
    assert all(f"{failed['trial']} ran out of memory" in row["error"] for row in skipped)
    assert good["eval_loss"] == good["rungs"][-1]["value"] < min(row["eval_loss"] for row in others)
    samples, losses, seconds = zip(*good["curve"], strict=True)
    assert samples == (64, 128, 192, 256) and losses[-1] == good["eval_loss"]
    assert 0 < seconds[0] < seconds[-1] < good["elapsed_s"]
    assert (good["micro"], good["accumulation"], good["workers"], good["global"]) == (4, 4, 1, 16)
    assert (
        0 < good["samples_per_s_min"] <= good["samples_per_s"] <= good["samples_per_s_max"]
        and good["peak_gib"] > 0
    )


def test_error_of_user_code_ends_the_run_with_its_message(finished):
    """In result.json and in the report of the run; the error is raised by a callback on every
    rank.
    """
    rows = rows_of(finished[2]).values()
    failed = finished[2] / next(row["run"] for row in rows if row["status"] == "out_of_memory")
    result = json.loads((failed / "result.json").read_text())
    assert result["status"] == "failed" and "CUDA out of memory" in result["error"]
    assert "Traceback" in result["error"] and "in on_step" in result["error"]
    assert "CUDA out of memory" in (failed / "report.html").read_text()


def test_sweep_folder_has_the_files_of_the_report(finished):
    _, text, folder = finished
    summary = json.loads((folder / "sweep.json").read_text())
    assert (summary["kind"], summary["status"], summary["goal"]) == ("sweep", "finished", "loss")
    assert summary["space"] == {"optimizer.lr": [1e-6, 1e-3, 1e-7], "train.callbacks": [[], [OOM]]}
    assert (summary["concurrency"], summary["rungs"]) == (1, list(RUNGS))
    assert summary["recommendation"]["best"] == "t001" and summary["recommendation"][
        "per_global"
    ] == {"16": "t001"}
    assert (
        summary["recommendation"]["why"] in " ".join(text.split())
        and summary["environment"]["packages"]["ray"]
    )
    assert summary["gpu_hours"] > 0 and summary["saved_gpu_hours"] > 0
    assert not (folder / "ray").exists()
    page = (folder / "report.html").read_text()
    assert "held-out loss by samples" in page and "held-out loss by training time" in page


def test_best_trial_ends_with_a_cooldown(finished):
    _, text, folder = finished
    summary = json.loads((folder / "sweep.json").read_text())
    cooldown, logged = summary["recommendation"]["cooldown"], lines(folder / "trials" / "t001")
    assert cooldown["samples"] == logged[-1]["rows_stop"] > RUNGS[-1]
    assert {line["train/lr"] for line in logged if 2 < line["step"] <= 16} == {1e-6}
    assert logged[-1]["train/lr"] < 5e-7 and "after a cooldown" in text


def test_best_config_is_the_recipe_that_the_trial_trained(finished, recipe):
    """Equal but for the length, the measurements and the folder of a trial."""
    _, _, folder = finished
    assert (folder / "best.yaml").read_text().startswith("# t001 has held-out loss ")
    best = from_yaml((folder / "best.yaml").read_text(), "best.yaml")
    assert best.train == recipe.train  # the length of the recipe, not of the trial
    assert (best.batch.micro, best.batch.global_, best.run.name) == (4, 16, None)
    ours = resolve_run(best, Silent()).config
    trained = from_yaml((folder / "trials" / "t001" / "config.yaml").read_text(), "config.yaml")
    names = ("steps", "samples", "log_every", "checkpoint_every")
    own = {name: getattr(trained.train, name) for name in names}
    cluster = ours.cluster.replace(max_failures=trained.cluster.max_failures)
    measured = ours.replace(train=ours.train.replace(**own), cluster=cluster)
    assert measured.replace(evaluate=trained.evaluate, run=trained.run) == trained


def test_each_failure_is_a_row_with_its_reason_and_one_good_trial_a_good_sweep(local_ray, recipe):
    faults = ["", *(f"{HERE}:{name}" for name in ("OutOfMemory", "Raise", "Kill", "Diverge"))]
    space = [
        f"train.callbacks={','.join(f'[{name}]' for name in faults)}",
        "cluster.cpus_per_worker=1,64",
    ]
    base = recipe.replace(run=recipe.run.replace(name="failures"))
    typed = clear_length_and_derived_batch(base, [])
    length = typed.replace(train=typed.train.replace(samples=RUNGS[0]))
    _, summary, rows = search(Sweep(base, length, parse_space(space), "loss"), Watching())
    assert (summary["status"], summary["recommendation"]["best"]) == ("finished", "t001")
    ends = {
        row["settings"]["train.callbacks"][0].partition(":")[2]: (row["status"], row["error"])
        for row in rows
        if row["settings"]["train.callbacks"] and row["settings"]["cluster.cpus_per_worker"] == 1
    }
    assert (
        ends["OutOfMemory"][0] == "out_of_memory"
        and ("Tried to allocate") in ends["OutOfMemory"][1]
    )
    assert ends["Raise"] == ("failed", "ValueError: a bug of the user")
    assert ends["Kill"][0] == "failed" and "SIGKILL" in ends["Kill"][1]
    assert ends["Diverge"] == ("failed", "evaluate/loss is not finite")
    never = [row for row in rows if row["settings"]["cluster.cpus_per_worker"] == 64]
    assert len(never) == 5 and {row["status"] for row in never} == {"infeasible"}
    assert all("1 training worker of 64 CPU" in row["error"] for row in never)


def test_infeasible_sweep_reports_missing_resources(local_ray, recipe):
    wide = recipe.with_cluster(workers=2, cpus_per_worker=9.0).replace(
        run=recipe.run.replace(name="wide")
    )
    with pytest.raises(
        ResourceError, match=r"2 training workers of 9 CPU each.* the cluster has 8 CPU"
    ):
        search(
            Sweep(
                wide,
                clear_length_and_derived_batch(wide, []),
                parse_space(["batch.micro=4"]),
                "memory",
            ),
            Watching(),
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_24_configurations_on_two_cores_do_not_wait_for_each_other(tmp_path):
    # the logical CPUs that mmray starts Ray with on two cores
    with several_nodes(head={"num_cpus": 3}) as nodes:
        recipe = config(
            make_data(tmp_path / "set"), tmp_path, "many", address=nodes.address
        ).with_cluster(workers=1)
        typed = clear_length_and_derived_batch(recipe, [])
        length = typed.replace(train=typed.train.replace(steps=2))
        rates = ",".join(f"{number}e-4" for number in range(1, 25))
        space = parse_space([f"optimizer.lr={rates}"])
        _, summary, rows = search(
            Sweep(recipe, length, space, "memory", concurrency=24), Watching()
        )
    assert summary["status"] == "finished" and [row["status"] for row in rows] == ["finished"] * 24


@pytest.mark.slow
@pytest.mark.timeout(600)  # takes two minutes
def test_two_trials_run_concurrently_on_two_nodes(tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(50)])
    listener = Watching()
    with several_nodes({"num_cpus": 4}, {"num_cpus": 4}) as nodes:
        recipe = config(tmp_path / "set", tmp_path, "sweep", address=nodes.address)
        # Without dropout, because masks are drawn for each micro-batch.
        recipe = recipe.replace(
            model=recipe.model.replace(text=recipe.model.text.replace(dropout=0.0))
        )
        typed = clear_length_and_derived_batch(recipe, [])
        length = typed.replace(train=typed.train.replace(steps=4))
        space = parse_space(
            [f"train.callbacks=[],[{HERE}:OutOfMemoryOnOneRank]", "batch.micro=4,8"]
        )
        folder, summary, _ = search(Sweep(recipe, length, space, "memory"), listener)
    assert (summary["status"], summary["concurrency"]) == ("finished", 2)
    split, whole, *failed = rows_of(folder.path).values()
    assert failed[0]["status"] == "out_of_memory" and "Tried to allocate" in failed[0]["error"]
    assert (split["accumulation"], whole["accumulation"]) == (2, 1)
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-4)  # one global batch for any split
