"""`torchrun -m mmray train`: the steps of one process, failures, stops and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mmray import cli
from mmray.config import to_yaml
from mmray.console.reporter import ConsoleReporter
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DeviceError, OutOfMemoryError, ResourceError, UsageError
from mmray.processes import ChildDied
from mmray.training import driver, local, local_worker
from mmray.training.backend import select_cause
from tests.conftest import ROOT
from tests.engine.single_worker import run_config
from tests.polling import wait_until
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


def double_run(data, storage, name, callbacks=()):
    """Two workers in the recipe, without dropout, in float64: differences are errors."""
    wanted = config(data, storage, name, [f"tests.training.faults:{each}" for each in callbacks])
    return in_double(wanted).with_cluster(cpus_per_worker=1)


def torchrun(tmp_path, wanted, max_restarts=0):
    """Start `mmray train` with a recipe file in two processes of torchrun; its output goes to
    `output`, and that of torchrun itself too.
    """
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(wanted))
    (tmp_path / "faults").mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", str(max_restarts)]
    with (tmp_path / "output").open("w") as output:
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "mmray", "train", str(recipe)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"MMRAY_TEST_FAULTS": str(tmp_path / "faults")},
        )


def finish(process, tmp_path, code=0):
    """Wait for torchrun and return the output."""
    ended = process.wait(300)
    output = (tmp_path / "output").read_text()
    assert ended == code, output
    return output


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_errors_are_printed_once(data, tmp_path):
    wanted = double_run(data, tmp_path, "run", ["Missing"])
    output = finish(torchrun(tmp_path, wanted), tmp_path, 1)
    assert output.count("error: ") == 1 and "exitcode  : 2 " in output, output
    assert "Unable to shutdown" not in output, output  # torchrun kills what does not end


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_failed_and_stopped_runs_resume_with_the_losses_of_one_process(data, tmp_path):
    """torchrun restarts all processes after rank 1 was killed and after it ran out of memory, with
    smaller micro-batches. After SIGTERM the run ends with a checkpoint; the same command resumes.
    """
    wanted = double_run(
        data, tmp_path, "two", ["KillRankOneOnce", "OomOnRankOneOnce", "AwaitStopOnce"]
    )
    folder = tmp_path / "two"
    process = torchrun(tmp_path, wanted, max_restarts=2)
    log, metrics = tmp_path / "output", folder / "metrics.jsonl"

    def third_attempt_waits_after_step_seven():
        steps = metrics.read_text().count("\n") if metrics.exists() else 0
        return steps >= 7 and len(TRAINS.findall(log.read_text())) == 3

    wait_until(lambda: process.poll() is not None or third_attempt_waits_after_step_seven(), 300)
    assert process.poll() is None, log.read_text()
    process.send_signal(signal.SIGTERM)
    process.wait(300)
    output = log.read_text()
    for message in (
        "out of memory in the optimizer at step 6",
        "stopping after this step, with a checkpoint",
    ):
        assert output.count(message) >= 1, output
    assert output.count("rerun the same command to resume") == 2, output
    assert re.search("^resume +from .*step-", output, re.M), output
    assert json.loads((folder / "smaller_batch.json").read_text())["2"]["micro_batch_size"] == 2
    assert len(lines(folder)) == 8
    output = finish(torchrun(tmp_path, wanted), tmp_path)
    assert "step-8" in output and "mmray evaluate" in output, output
    assert marks(folder) == list(expected_marks(STEPS))
    prepared = PreparedSet.open(str(data), "train")
    held_out = PreparedSet.open(str(data), "test")
    calm = wanted.replace(train=wanted.train.replace(callbacks=()))
    run_config(calm, prepared, tmp_path / "one", held_out)
    one = lines(tmp_path / "one")
    for ours, expected in zip(lines(folder), one, strict=True):
        assert ours["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-9)
    scores = {name: value for name, value in one[-1].items() if "recall" in name}
    assert scores and scores.items() <= lines(folder)[-1].items()
    again = finish(torchrun(tmp_path, wanted), tmp_path)
    assert "finished" in again and not TRAINS.search(again)


def set_torchrun(monkeypatch, rank=0, local_world_size=2):
    """Set the environment variables of a process that torchrun starts, of two."""
    values = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_WORLD_SIZE": local_world_size}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


@pytest.mark.parametrize("rank", [0, 1])
def test_other_commands_are_refused_with_one_message(rank, monkeypatch, capsys):
    set_torchrun(monkeypatch, rank)
    assert cli.run(["evaluate", "runs/sample"], ConsoleReporter()) == UsageError.exit_code
    assert capsys.readouterr().err.count("start `mmray evaluate` without it") == (rank == 0)


def test_several_machines_are_refused(data, tmp_path, monkeypatch):
    set_torchrun(monkeypatch, local_world_size=1)
    with pytest.raises(UsageError, match=r"1 of 2 processes on this machine.*--cluster.workers 2"):
        driver.train(config(data, tmp_path, "run"), Silent())


def test_fewer_gpus_than_workers_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "count_gpus", lambda: 1)
    with pytest.raises(ResourceError, match="auto: 2 workers need 2 GPUs and torch sees 1 on"):
        local.check_gpus(config(data, tmp_path, "run"), workers=2)


BROKEN = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
DIED = ChildDied("rank 1", None)


@pytest.mark.parametrize(
    ("world", "state", "ended"),
    [(1, "waiting_for_data", True), (1, "training", False), (2, "waiting_for_data", False)],
)
def test_only_a_single_rank_that_waits_for_data_ends_its_stream_to_stop(
    monkeypatch, tmp_path, world, state, ended
):
    """Other ranks may wait in the step for which this one waits: all stop after it."""
    if world > 1:
        set_torchrun(monkeypatch)
    interrupted = threading.Event()
    beats = threading.Semaphore(0)

    def call(message):
        beats.release()
        return True, False, None  # a stop is requested

    def train_worker(context, resume_point, blocks, device, driver):
        with driver.heartbeat.state(state):
            for _ in range(3):
                assert beats.acquire(timeout=60)
        return {"interrupted": interrupted.is_set()}

    blocks = SimpleNamespace(interrupt=interrupted.set, close=lambda: None)
    context = Mock(folder=tmp_path, decode_actors=1, fencing_token=1)
    context.config.cluster.accelerator = "cpu"
    monkeypatch.setattr("mmray.engine.heartbeat.INTERVAL_S", 0.01)
    monkeypatch.setattr("mmray.engine.worker.train_worker", train_worker)
    monkeypatch.setattr("mmray.data.stream.local.LocalBlocks", lambda *_, **__: blocks)
    outcome = local_worker._train((context, Mock(step=0)), call, lambda _: None)
    assert outcome == {"interrupted": ended}


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ([BROKEN, DIED], "lost", "the rank 1 process closed its connection"),
        ([BROKEN], "lost", "Connection closed by peer"),
        ([BROKEN, DIED, ValueError("a bug")], "raised", "a bug"),
        ([BROKEN, DeviceError("GPU 1 failed", "here")], "device", "GPU 1 failed"),
        ([BROKEN, UsageError("a setting"), OutOfMemoryError("too large")], "raised", "too large"),
    ],
)
def test_a_broken_connection_is_not_the_cause_of_a_failure(errors, kind, text):
    failure = select_cause(errors)
    assert failure.kind == kind and text in str(failure)
