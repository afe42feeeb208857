"""A run of one worker without Ray: same rows and weights as ever, and what happens if its processes
fail.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import mmray
from mmray.cli import main
from mmray.config import Config, Data, from_yaml
from mmray.errors import DataError, DeviceError, OutOfMemoryError, TrainingError, UsageError
from mmray.processes import ChildDied
from mmray.training import driver
from mmray.training.workers import backend, local, rank
from tests.made import make_set, row
from tests.training.faults import move_storage
from tests.training.readers import StalledReader
from tests.training.runs import (
    HELD_OUT,
    STEPS,
    Silent,
    Stopping,
    config,
    expected_marks,
    lines,
    make_data,
    marks,
    same_weights,
    weights,
)

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(autouse=True)
def faults_folder(without_ray, monkeypatch, tmp_path):
    """Where callbacks of tests.training.faults note what they did."""
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("MMRAY_TEST_FAULTS", str(tmp_path / "faults"))


def one_worker(data, folder, name, callbacks=(), **changes):
    wanted = config(
        data, folder, name, [f"tests.training.faults:{each}" for each in callbacks], **changes
    )
    return wanted.with_cluster(workers=1, cpus_per_worker=1)


@pytest.fixture(scope="module")
def calm_run(data, tmp_path_factory):
    """A run that nothing disturbs, and its reporter."""
    reporter = Silent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "needs_ray", lambda _: False)
        return driver.train(
            one_worker(data, tmp_path_factory.mktemp("runs"), "calm"), reporter
        ), reporter


@pytest.fixture(scope="module")
def calm(calm_run):
    return calm_run[0]


def notes(reporter, label):
    return [text for each, text in reporter.notes if each == label]


def test_run_takes_the_rows_of_the_order(calm):
    assert calm.result["status"] == "finished" and marks(calm.path) == list(expected_marks(STEPS))


def test_saved_config_names_no_device_of_this_machine(calm):
    assert (
        from_yaml((calm.path / "config.yaml").read_text(), "config.yaml").cluster.accelerator
        == "auto"
    )


FOR_WORKER = ["starting 1 worker", "importing the engine", "building the model", "dry run"]
FOR_STEP = ["waiting for the first batch", "first step", "training"]


def test_stages_of_the_start_are_in_the_result(calm):
    (start,) = calm.result["starts"]
    on_driver = ["importing", "checking the settings", "checking the data"]
    assert [each["stage"] for each in start] == [*on_driver, *FOR_WORKER, *FOR_STEP]
    seconds = [each["at_s"] for each in start]
    assert seconds[0] == 0.0 and seconds == sorted(seconds) and seconds[-1] > 0.1


def test_each_evaluation_is_made_once(calm_run):
    """After steps 6 and 12; the scores of the run are those of its last step."""
    calm, reporter = calm_run
    scores = {
        name: value for name, value in lines(calm.path)[-1].items() if name.startswith("evaluate/")
    }
    assert {f"evaluate/{name}": value for name, value in calm.result["scores"].items()} == scores
    assert notes(reporter, "phase") == [
        "evaluating",
        "evaluating",
        "saving the last checkpoint",
        "writing the report",
    ]


def test_run_whose_command_died_after_the_last_checkpoint_finishes_with_equal_result(
    data, tmp_path, calm
):
    """The run keeps the shuffle of its config.yaml, which `auto` would not choose."""
    shutil.copytree(calm.path, tmp_path / "run")
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace("shuffle_blocks: 1x1", "shuffle_blocks: 4x8x2"))
    (tmp_path / "run" / "result.json").unlink()
    reporter = Silent()
    done = driver.train(one_worker(data, tmp_path, "run"), reporter)
    different = ("elapsed_s", "starts")
    assert all(
        done.result[name] == value for name, value in calm.result.items() if name not in different
    )
    assert done.result["scores"] and marks(done.path) == marks(calm.path)
    assert notes(reporter, "resume") and "starting 1 worker" not in notes(reporter, "status")
    assert notes(reporter, "shuffle") == ["4 lanes, 8 adjacent rows per block, 2 blocks per window"]
    assert "shuffle_blocks: 4x8x2" in saved.read_text()


def worker():
    """The worker process of the current attempt."""
    (process,) = (each for each in multiprocessing.active_children() if each.name == "mmray-worker")
    return process


class KillingWorker(Silent):
    """Sends SIGKILL to the worker in its first evaluation, or when AwaitKillOnce waits after it."""

    killed = False

    def phase(self, title):
        super().phase(title)
        if title == "evaluating" and not self.killed:
            self.killed = True
            (Path(os.environ["MMRAY_TEST_FAULTS"]) / "awaited-kill").touch()
            worker().kill()


def test_hung_killed_and_failing_workers_are_replaced_with_equal_weights(data, tmp_path, calm):
    reporter, faults = KillingWorker(), ["HangOnce", "AwaitKillOnce", "FailDeviceOnce"]
    outcome = driver.train(
        one_worker(data, tmp_path, "run", faults).with_cluster(hang_timeout_s=5.0), reporter
    )
    assert outcome.result["wasted_steps"] >= 2  # the first attempt ended after step 5
    assert outcome.result["restarts"] == 3 and marks(outcome.path) == marks(calm.path)
    assert same_weights(weights(outcome.path), weights(calm.path))
    (hung, killed, failed), (kept,) = notes(reporter, "failure"), notes(reporter, "device")
    ended = (
        "the worker process was ended by SIGKILL (the kernel sends it when the machine is out "
        "of memory)"
    )
    assert (
        killed.startswith("worker lost after step ")
        and (f": {ended}; restarting from the checkpoint") in killed
    )
    assert "faults.py" in hung
    assert (
        "device failed after step 7: CUDA error: uncorrectable ECC error encountered (on this"
    ) in failed
    assert "retrying on the same" in kept
    stages = [*FOR_WORKER, "loading the checkpoint", *FOR_STEP]
    assert [each["stage"] for each in outcome.result["starts"][1]] == stages


def test_error_of_user_code_ends_the_run_with_its_traceback(data, tmp_path):
    with pytest.raises(TrainingError, match=r"(?s)faults\.py.*KeyError: 'label'"):
        driver.train(
            one_worker(data, tmp_path, "run", ["RaiseAtStepThree"], checkpoint_every=0), Silent()
        )


def test_worker_that_dies_before_its_attempt_is_replaced(data, tmp_path, monkeypatch):
    class Dying(local.LocalBackend):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._next.kill()

    monkeypatch.setattr(driver, "LocalBackend", Dying)
    reporter = Silent()
    outcome = driver.train(one_worker(data, tmp_path, "run", steps=1), reporter)
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 1)
    (failure,) = notes(reporter, "failure")
    assert (
        "the worker process was ended by SIGKILL" in failure
        and ("restarting from step 0") in failure
    )


@pytest.mark.parametrize(
    ("code", "kind"), [(-11, "lost"), (0, "raised"), (1, "raised"), (None, "lost")]
)
def test_worker_that_exits_has_a_bug_and_one_that_is_killed_is_lost(code, kind):
    ended = {-11: "SIGSEGV", None: "closed its connection"}.get(code, f"exited with code {code}")
    failed = backend.select_cause([ChildDied("worker", code)])
    assert failed.kind == kind and ended in str(failed.cause)
    alone = backend.select_cause([ChildDied("worker", code)], backend.is_process_lost)
    assert alone.kind == kind


def test_broken_connection_of_a_single_worker_is_a_bug():
    broken = BrokenPipeError("Broken pipe")
    assert backend.select_cause([broken]).kind == "lost"
    assert backend.select_cause([broken], backend.is_process_lost).kind == "raised"


BROKEN = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
DIED = ChildDied("rank 1", None)


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
    failure = backend.select_cause(errors)
    assert failure.kind == kind and text in str(failure)


@pytest.mark.parametrize(
    ("world", "state", "ended"),
    [(1, "waiting_for_data", True), (1, "training", False), (2, "waiting_for_data", False)],
)
def test_only_a_single_rank_that_waits_for_data_ends_its_stream_to_stop(
    monkeypatch, tmp_path, world, state, ended
):
    """Other ranks may wait in the step for which this one waits: all stop after it."""
    interrupted = threading.Event()
    beats = threading.Semaphore(0)

    def reply(record):
        beats.release()
        return {"stop"}

    def train_worker(context, start, blocks, device, driver):
        with driver.heartbeat.state(state):
            for _ in range(3):
                assert beats.acquire(timeout=60)
        return {"interrupted": interrupted.is_set()}

    blocks = SimpleNamespace(interrupt=interrupted.set, close=lambda: None)
    monkeypatch.setattr("mmray.engine.heartbeat.INTERVAL_S", 0.01)
    monkeypatch.setattr("mmray.engine.worker.train_worker", train_worker)
    outcome = rank.train_rank(
        SimpleNamespace(folder=tmp_path),
        SimpleNamespace(step=0, plan=SimpleNamespace(world_size=world)),
        {"rank": 0},
        rank.CoordinatorClient(lambda _: None, reply, lambda _: 0),
        lambda *_: blocks,
        lambda: None,
    )
    assert outcome == {"interrupted": ended}


@pytest.mark.parametrize(
    ("cores", "workers", "device", "setting", "processes"),
    [
        (16, 1, "gpu", "auto", 14),  # two cores are left to each training process
        (16, 2, "gpu", "auto", 6),
        (16, 8, "gpu", "auto", 1),
        (16, 2, "cpu", "auto", 1),  # the model trains on all other cores
        (16, 2, "gpu", 3, 2),
        (2, 1, "cpu", "1-6", 6),
    ],
)
def test_data_processes_leave_cores_to_training_unless_their_number_is_set(
    cores, workers, device, setting, processes, monkeypatch
):
    monkeypatch.setattr(local, "cores", lambda: cores)
    wanted = Config(data=Data(train="set", workers=setting)).with_cluster(accelerator=device)
    assert local.num_decode_processes(wanted, workers) == processes


class KillingDataProcess(Stopping):
    """Kills one of the data processes at step 1; later stops the run by SIGTERM to all, as Slurm
    and systemd do.
    """

    def step(self, metrics, total_steps):
        if metrics["step"] == 1:
            children = psutil.Process(worker().pid).children()
            next(each for each in children if "spawn_main" in " ".join(each.cmdline())).kill()
            (Path(os.environ["MMRAY_TEST_FAULTS"]) / "acted").touch()
        if self.at and metrics["step"] >= self.at:
            worker().terminate()
        super().step(metrics, total_steps)


def test_run_replaces_killed_data_process_and_resumes_after_stop_with_equal_weights(
    data, tmp_path, calm
):
    reporter = KillingDataProcess(at=5)
    wanted = one_worker(data, tmp_path, "run", ["AwaitDriver", "AwaitStop"])
    # four blocks a step: the killed process has work in each
    data_changes = {"workers": 2, "block_mb": 0.004}
    two = wanted.replace(data=wanted.data.model_copy(update=data_changes))
    stopped = driver.train(two, reporter)
    assert stopped.result["status"] == "stopped" and 5 <= stopped.result["steps"] < STEPS
    assert stopped.result["restarts"] == 0
    assert any("data process died" in text for text in notes(reporter, "data"))
    reporter = Silent()
    done = driver.train(one_worker(data, tmp_path, "run"), reporter)
    assert done.result["status"] == "finished" and notes(reporter, "resume")
    assert same_weights(weights(done.path), weights(calm.path))


class MountingAgain(Silent):
    """Moves the storage back, once, when a checkpoint could not be written and step 10 is taken."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def log(self, text, label=""):
        super().log(text, label)
        files = (self.folder / "faults" / "away-at-10", self.folder / "away")
        if "steps are kept" in text and all(file.exists() for file in files):
            move_storage(away=False)


def test_run_whose_storage_vanishes_takes_the_same_steps(data, tmp_path, calm):
    """Training continues, and the newest checkpoint is written when the storage is back."""
    (tmp_path / "runs").mkdir()
    reporter = MountingAgain(tmp_path)
    outcome = driver.train(
        one_worker(data, tmp_path / "runs", "run", callbacks=["StorageAway"]), reporter
    )
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 0)
    assert marks(outcome.path) == marks(calm.path)
    assert same_weights(weights(outcome.path), weights(calm.path))
    logged = [text for text in notes(reporter, "storage") if f"{outcome.path} can" in text]
    assert "cannot be used on" in logged[0] and "can be used again" in logged[-1]
    assert all(socket.gethostname() in text for text in logged)


class StoppingWhenStalled(Silent):
    """Stops the run by SIGINT two seconds after step 5."""

    def step(self, metrics, total_steps):
        super().step(metrics, total_steps)
        if metrics["step"] == 5:
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_run_that_waits_for_a_stalled_file_system_stops_with_a_checkpoint(
    data, tmp_path, calm, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(backend, "RowReader", StalledReader)
        wanted = one_worker(data, tmp_path, "run")
        stopped = driver.train(wanted, StoppingWhenStalled())
    assert (stopped.result["status"], stopped.result["steps"]) == ("stopped", 5)
    done = driver.train(one_worker(data, tmp_path, "run"), Silent())
    assert done.result["status"] == "finished"
    assert same_weights(weights(done.path), weights(calm.path))


def test_too_many_bad_rows_end_the_run_and_are_named(tmp_path):
    rows = [row(number, b"broken" if number % 2 == 0 else None) for number in range(50)]
    make_set(tmp_path / "set", rows)
    reporter = Silent()
    with pytest.raises(DataError, match=r"17 rows could not be read.*row-\d+, made:\d+"):
        driver.train(one_worker(tmp_path / "set", tmp_path, "bad"), reporter)
    (summary,) = notes(reporter, "quarantined")
    assert re.match(r"\d+ rows were not used: \d+ format; see .*quarantine.jsonl", summary)
    named = [
        json.loads(line)
        for line in (tmp_path / "bad" / "quarantine.jsonl").read_text().splitlines()
    ]
    assert all(entry["row"] % 2 == 0 and entry["stage"] == "train" for entry in named)
    assert all(entry["reason"] == "format" and entry["detail"] for entry in named)


def run_command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0


def test_evaluate_command_gives_same_metrics_as_training(calm, tmp_path, capfd):
    """tests/cluster/test_object_store.py evaluates on Ray."""
    make_set(tmp_path / "set", HELD_OUT)
    run_command(
        "evaluate", calm.path, "--data", tmp_path / "set", "--json", tmp_path / "scores.json"
    )
    scores = json.loads((tmp_path / "scores.json").read_text())["metrics"]
    final = calm.result["metrics"]
    assert scores == pytest.approx({name: final[name] for name in scores}, rel=1e-6)
    text = capfd.readouterr().out
    assert "median rank" in text and f"loss │ {final['loss']:.3f}" in text and "rows │ 20" in text


def test_exported_run_loads(calm, tmp_path, capfd):
    run_command("export", calm.path, tmp_path / "out")
    assert "mmray.load(" in capfd.readouterr().out
    assert mmray.load(tmp_path / "out").embed_texts(["a red one"]).shape == (1, 16)
