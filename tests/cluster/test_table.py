"""Faults on one Ray of this machine: full disk, small object store, a second process, kills."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from mmray.config import ImageTower, to_yaml
from mmray.errors import UsageError
from mmray.training.driver import train
from tests.cluster.test_faults import assert_same_model, losses_of_one_worker
from tests.cluster.test_stops import start, wait_for_step
from tests.conftest import start_ray
from tests.made import make_set, png, row
from tests.polling import wait_until
from tests.training.runs import (
    STEPS,
    Silent,
    config,
    expected_marks,
    in_double,
    marks,
    same_weights,
    weights,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
FLAT_MIB = 48  # two blocks and memory kept by the allocator
RANDOM_KILLS = int(os.environ.get("MMRAY_TEST_KILLS", "20"))


def process_role(command):
    """Return the title of a Ray worker without its method, or the name of another program."""
    title = command[0] if command else ""
    if title.startswith("ray::DecodeActor"):
        return "stream actor"
    return (
        re.split(r"[.(]", title.removeprefix("ray::"))[0]
        if title.startswith("ray::")
        else Path(title).name
    )


class StartingTwice(Silent):
    """Starts the same command a second time during training."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted, self.refusal = wanted, ""

    def step(self, metrics, total_steps):
        super().step(metrics, total_steps)
        if metrics["step"] == 2:
            with pytest.raises(UsageError) as refused:
                train(self.wanted, Silent())
            self.refusal = str(refused.value)


def test_full_disk_skips_a_checkpoint_and_second_process_is_refused(data, tmp_path, without_ray):
    faults = ("tests.training.faults:FullDiskAtStepSix", "tests.training.faults:Slowly")
    wanted = config(data, tmp_path, "full", callbacks=faults, keep_checkpoints=9).with_cluster(
        workers=1, cpus_per_worker=1
    )
    reporter = StartingTwice(wanted)
    outcome = train(wanted, reporter)
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 0)
    logged = [text for label, text in reporter.notes if label == "storage"]
    # of the log and of the checkpoints, each at once and when it has ended
    failed = [text for text in logged if "File too large" in text]
    assert len(failed) == 2 and all(socket.gethostname() in text for text in logged)
    assert any("metrics.jsonl" in text and "lines are kept" in text for text in failed)
    assert sum("can be used again" in text for text in logged) == 2
    kept = {path.name for path in (outcome.path / "checkpoints").iterdir()}
    assert kept >= {"step-12", "step-3", "step-9"}
    assert marks(outcome.path) == list(expected_marks(STEPS))
    assert "is being trained by process" in reporter.refusal and "--run.name" in reporter.refusal


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_killed_at_random_finish_equal(local_ray, data, tmp_path):
    """MMRAY_TEST_KILLS runs (20), each with a rank killed at a random moment: rows and weights are
    bitwise equal.
    """
    faults = Path(os.environ["MMRAY_TEST_FAULTS"])
    calm = train(config(data, tmp_path, "calm"), Silent())
    restarts = 0
    for number in range(RANDOM_KILLS):
        (faults / "killed-at-random").unlink(missing_ok=True)
        (faults / f"draw-{number}").touch()
        wanted = config(
            data, tmp_path, f"run-{number}", callbacks=("tests.training.faults:KillAtRandom",)
        )
        outcome = train(wanted, Silent())
        assert marks(outcome.path) == marks(calm.path), number
        assert same_weights(weights(outcome.path), weights(calm.path)), number
        restarts += outcome.result["restarts"]
    assert restarts >= RANDOM_KILLS // 2  # a kill may come when the run has just ended


def test_run_resumes_at_same_row_after_cluster_restart(data, tmp_path, monkeypatch):
    """Driver, head and workers get SIGKILL at once; the same command starts a new Ray and
    resumes.
    """
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("MMRAY_TEST_FAULTS", str(tmp_path / "faults"))
    made = in_double(config(data, tmp_path, "run", ("tests.training.faults:AwaitKillOnce",)))
    recipe, run = tmp_path / "mine.yaml", tmp_path / "run"
    recipe.write_text(to_yaml(made))
    killed = start(recipe)
    wait_for_step(killed, run, 7)
    wait_until((tmp_path / "faults" / "awaited-kill").exists)
    everything = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
    assert any(
        "raylet" in process.name() or "gcs_server" in process.name() for process in everything
    )
    for process in everything:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    killed.wait()
    done = start(recipe)
    try:
        done.wait(timeout=300)
    except subprocess.TimeoutExpired:
        done.kill()
        raise
    text = done.log.read_text()
    assert done.returncode == 0, text
    assert "resume" in text and marks(run) == list(expected_marks(STEPS))
    losses_of_one_worker(made, tmp_path / "calm")
    assert_same_model(run, tmp_path / "calm")


class KillingAReader(Silent):
    """Kills a process of the stream at step 16; measures memory of stream processes at a third and
    at the end.
    """

    killed = None

    def __init__(self):
        super().__init__()
        self.held_mib = {"a third": {}, "the end": {}}  # when: {role: maximum of one process}

    def step(self, metrics, total_steps):
        super().step(metrics, total_steps)
        if metrics["step"] >= 16 and self.killed is None:
            below = psutil.Process().children(recursive=True)
            self.killed = next(
                each for each in below if process_role(each.cmdline()) == "stream actor"
            )
            self.killed.kill()
        for when, first in (("a third", 26), ("the end", 56)):
            if first <= metrics["step"] < first + 10:
                self.measure(self.held_mib[when])

    def measure(self, held_mib):
        """Exclude shared pages, because the object store counts in the resident size of each
        process.
        """
        for process in psutil.Process().children(recursive=True):
            try:
                role, memory = process_role(process.cmdline()), process.memory_info()
            except psutil.Error:  # the process ended meanwhile
                continue
            held_mib[role] = max(held_mib.get(role, 0), (memory.rss - memory.shared) / 2**20)


def test_object_store_of_80_mb_streams_four_times_that(tmp_path):
    """An epoch of 4,224 rows of 160 pixels, 324 MB decoded: no deadlock, no spilling, flat memory.

    Half of the blocks (147 MB) pass each process between the two measurements, so a leak would be
    visible.
    """
    ray.shutdown()
    started = start_ray(object_store_memory=80 * 10**6)
    try:
        grays = [png(gray, 160) for gray in range(64)]
        make_set(tmp_path / "set", [row(number, grays[number % 64]) for number in range(4224)])
        wanted = config(tmp_path / "set", tmp_path, "tiny", steps=66, checkpoint_every=0)
        wanted = wanted.replace(
            model=wanted.model.replace(
                inputs=wanted.model.inputs.replace(image_side=160),
                image=ImageTower(name="vit", width=8, depth=1, heads=2, patch=40),
            ),
            batch=wanted.batch.replace(micro=16, global_=64),
            data=wanted.data.replace(block_mb=24.0),
        )
        assert 4 * 80e6 < 4224 * 3 * 160**2
        reporter = KillingAReader()
        outcome = train(wanted, reporter)
        state = get_state_from_address(started.address_info["address"])
        spilled = get_memory_info_reply(state).store_stats.spilled_bytes_total
    finally:
        ray.shutdown()
    assert (outcome.result["status"], outcome.result["restarts"], spilled) == ("finished", 0, 0)
    assert marks(outcome.path) == list(expected_marks(66, rows=4224, global_batch_size=64))
    assert len([text for _, text in reporter.notes if "died and was restarted" in text]) == 1
    early, late = reporter.held_mib.values()
    print({role: (round(early[role]), round(late.get(role, 0))) for role in early})
    assert all(late[role] < early[role] + FLAT_MIB for role in ("stream actor", "RayTrainWorker"))
