"""`torchrun -m mmray train`: the steps of one process, a failure, and the command after it."""

import os
import subprocess
import sys

import pytest

from mmray import cli
from mmray.config import to_yaml
from mmray.console.reporter import ConsoleReporter
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import UsageError
from mmray.training import driver
from tests.conftest import ROOT
from tests.engine.single_worker import run_config
from tests.training.runs import (
    STEPS,
    TRAINS,
    Silent,
    config,
    expected_marks,
    in_double,
    lines,
    make_data,
    marks,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "set")


def torchrun(tmp_path, wanted):
    """Run `mmray train` in two processes of torchrun; return the exit code and the output."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(wanted))
    (tmp_path / "faults").mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "mmray", "train", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"MMRAY_TEST_FAULTS": str(tmp_path / "faults")},
        timeout=400,
    )
    return done.returncode, done.stdout


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_failed_run_resumes_with_the_losses_of_one_process(data, tmp_path):
    """Rank 1 is killed after step 5. In float64, without dropout: differences are errors."""
    callbacks = ["tests.training.faults:KillRankOneOnce"]
    wanted = in_double(config(data, tmp_path, "two", callbacks)).with_cluster(cpus_per_worker=1)
    folder = tmp_path / "two"
    code, output = torchrun(tmp_path, wanted)
    # Rank 0 notices the lost rank, or torchrun's SIGTERM, which comes 0.1 s later, stops it first.
    assert code == 1 and "run the same command to resume" in output, output
    code, output = torchrun(tmp_path, wanted)
    assert code == 0 and "mmray evaluate" in output, output
    assert marks(folder) == list(expected_marks(STEPS))
    prepared = PreparedSet.open(str(data), "train")
    held_out = PreparedSet.open(str(data), "test")
    calm = wanted.replace(train=wanted.train.replace(callbacks=()))
    run_config(calm, prepared, tmp_path / "one", held_out)
    for ours, expected in zip(lines(folder), lines(tmp_path / "one"), strict=True):
        assert ours["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-9)
    code, again = torchrun(tmp_path, wanted)
    assert code == 0 and "finished" in again and not TRAINS.search(again), again


def set_torchrun(monkeypatch, local_world_size=2):
    """Set the environment variables of the first of two processes that torchrun starts."""
    values = {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_WORLD_SIZE": local_world_size}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


def test_other_commands_are_refused(monkeypatch, capsys):
    set_torchrun(monkeypatch)
    assert cli.run(["evaluate", "runs/sample"], ConsoleReporter()) == UsageError.exit_code
    assert "start `mmray evaluate` without it" in capsys.readouterr().err


def test_several_machines_are_refused(data, tmp_path, monkeypatch):
    set_torchrun(monkeypatch, local_world_size=1)
    with pytest.raises(UsageError, match=r"1 of 2 processes on this machine.*--cluster.workers 2"):
        driver.train(config(data, tmp_path, "run"), Silent())
