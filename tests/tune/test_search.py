"""A sweep on Ray: stopped after its first trial, resumed by the same command; its best config."""

import io
import json
import os
import re

import pytest
import torch
from rich.console import Console

from mmray import cli
from mmray.cli.console import Terminal
from mmray.config import from_yaml, to_yaml
from mmray.config.search_space import parse_space
from mmray.errors import ResourceError
from mmray.train.resolve import resolve_run
from mmray.tune.search import Sweep, search
from mmray.tune.trials import clear_length_and_derived_batch
from tests.made import make_set, row
from tests.nodes import several_nodes
from tests.train.runs import Silent, config, lines, make_data

pytestmark = pytest.mark.cluster
OOM = "tests.tune.test_search:OutOfMemory"
SPACE = ["batch.micro=4,64", f"train.callbacks=[],[{OOM}]"]  # 64 rows exceed a worker's share of 16


class OutOfMemory:
    """Callback: an OOM at the second step, on every rank."""

    def on_step(self, step, metrics):
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class Watching(Silent):
    """Keeps the rows and requests a stop, like Ctrl-C, after the first trial."""

    def __init__(self, stop=False):
        super().__init__()
        self.stop, self.rows = stop, []

    def ended(self, row):
        self.rows.append(row)
        if self.stop and row["status"] == "finished":
            os.kill(os.getpid(), 2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    return config(make_data(folder / "set"), folder, "first")


@pytest.fixture(scope="module")
def stopped(local_ray, recipe):
    typed = clear_length_and_derived_batch(recipe, ["batch.micro", "train.callbacks"])
    length = typed.replace(train=typed.train.replace(steps=4))
    listener = Watching(stop=True)
    return search(Sweep(recipe, length, parse_space(SPACE)), listener), listener


@pytest.fixture(scope="module")
def finished(stopped, recipe):
    """The same command again: exit code, output, sweep folder."""
    (folder, *_), _ = stopped
    file = folder.parent / "mine.yaml"
    file.write_text(to_yaml(recipe))
    words = [word for space in SPACE for word in ("--space", space)]
    text = io.StringIO()
    code = cli.run(["tune", str(file), *words, "--train.steps", "4"], Terminal(Console(file=text, width=100)))
    return code, text.getvalue(), folder


def rows_of(folder):
    return {row["trial"]: row for row in map(json.loads, (folder / "trials.jsonl").read_text().splitlines())}


def test_stopped_sweep_keeps_finished_rows(stopped):
    (_, summary, rows), listener = stopped
    assert summary["status"] == "stopped"
    assert ("stop", "stopping the running trials; press Ctrl-C again to exit immediately") in listener.notes
    assert listener.rows[0]["trial"] == "t001"
    assert [row["status"] for row in rows][2:] == ["infeasible", "infeasible"]
    assert summary["recommendation"]["best"] == "t001"


def test_same_command_runs_the_remaining_trials(stopped, finished):
    code, text, folder = finished
    assert code == 0
    assert re.search("4 with 64 samples each, . at a time, 1 already measured, 2 infeasible", text)
    assert "t002       batch.micro=4 train.callbacks" in text and "t001       batch.micro" not in text
    before, after = stopped[0][2][0], rows_of(folder)
    assert after["t001"] == before  # measured once
    statuses = [after[name]["status"] for name in sorted(after)]
    assert statuses == ["finished", "out_of_memory", "infeasible", "infeasible"]
    assert "CUDA out of memory" in after["t002"]["error"]


def test_row_holds_metrics_of_its_run(finished):
    _, _, folder = finished
    measured = rows_of(folder)["t001"]
    logged = lines(folder / measured["run"])
    assert (measured["micro"], measured["accumulation"], measured["workers"], measured["global"]) == (4, 2, 2, 16)
    assert (measured["steps"], measured["samples"]) == (logged[-1]["step"], logged[-1]["rows_stop"])
    assert measured["samples"] == 64
    assert measured["loss"] == logged[-1]["train/loss"] and measured["peak_gib"] > 0
    assert 0 < measured["samples_per_s_min"] <= measured["samples_per_s"] <= measured["samples_per_s_max"]
    assert 0 < measured["step_p50_s"] <= measured["step_p95_s"] == logged[-1]["time/step_p95_s"]
    result = json.loads((folder / "trials" / "t001" / "result.json").read_text())
    assert result["status"] == "finished"
    both = [result["scores"][f"recall_at_1/{way}"] for way in ("image_to_text", "text_to_image")]
    assert measured["recall_at_1"] == sum(both) / 2


def test_error_of_user_code_ends_the_run_with_its_message(finished):
    """In result.json and in the report of the run; the error is raised by a callback on every rank."""
    failed = finished[2] / "trials" / "t002"
    result = json.loads((failed / "result.json").read_text())
    assert result["status"] == "failed" and "CUDA out of memory" in result["error"]
    assert "Traceback" in result["error"] and "in on_step" in result["error"]
    assert "CUDA out of memory" in (failed / "report.html").read_text()


def test_sweep_folder_has_the_files_of_the_report(finished):
    _, text, folder = finished
    summary = json.loads((folder / "sweep.json").read_text())
    assert (summary["kind"], summary["status"], summary["goal"]) == ("sweep", "finished", "throughput")
    assert summary["space"] == {"batch.micro": [4, 64], "train.callbacks": [[], [OOM]]}
    assert (summary["samples_per_trial"], summary["concurrency"]) == (64, 1)
    assert summary["recommendation"]["best"] == "t001" and summary["recommendation"]["per_global"] == {"16": "t001"}
    assert summary["recommendation"]["why"] in text and summary["environment"]["packages"]["ray"]
    assert not (folder / "ray").exists()


def test_best_config_is_the_recipe_that_the_trial_trained(finished, recipe):
    """Equal but for the length, the logs and the folder of a trial."""
    _, _, folder = finished
    best = from_yaml((folder / "best.yaml").read_text(), "best.yaml")
    assert best.train == recipe.train  # the length of the recipe, not of the trial
    assert (best.batch.micro, best.batch.global_, best.run.name) == (4, 16, None)
    ours = resolve_run(best, Silent()).config
    trained = from_yaml((folder / "trials" / "t001" / "config.yaml").read_text(), "config.yaml")
    length = {name: getattr(trained.train, name) for name in ("steps", "samples", "log_every", "checkpoint_every")}
    cluster = ours.cluster.replace(max_failures=trained.cluster.max_failures)
    measured = ours.replace(train=ours.train.replace(**length), cluster=cluster)
    assert measured.replace(evaluate=trained.evaluate, run=trained.run) == trained


def test_infeasible_sweep_reports_missing_resources(local_ray, recipe):
    wide = recipe.with_cluster(cpus_per_worker=9.0).replace(run=recipe.run.replace(name="wide"))
    with pytest.raises(ResourceError, match=r"2 training workers of 9 CPU each.* the cluster has 8 CPU"):
        search(Sweep(wide, clear_length_and_derived_batch(wide, []), parse_space(["batch.micro=4"])), Watching())


@pytest.mark.slow
@pytest.mark.timeout(600)  # takes two minutes
def test_two_trials_run_concurrently_on_two_nodes(tmp_path):
    make_set(tmp_path / "set", [row(number) for number in range(50)])
    listener = Watching()
    with several_nodes({"num_cpus": 4}, {"num_cpus": 4}) as nodes:
        recipe = config(tmp_path / "set", tmp_path, "sweep", address=nodes.address)
        # Without dropout, because masks are drawn for each micro-batch.
        recipe = recipe.replace(model=recipe.model.replace(text=recipe.model.text.replace(dropout=0.0)))
        typed = clear_length_and_derived_batch(recipe, [])
        length = typed.replace(train=typed.train.replace(steps=4))
        folder, summary, _ = search(Sweep(recipe, length, parse_space(["batch.micro=4,8"])), listener)
    assert (summary["status"], summary["concurrency"]) == ("finished", 2)
    split, whole = rows_of(folder).values()
    assert (split["accumulation"], whole["accumulation"]) == (2, 1)
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-4)  # one global batch for any split
