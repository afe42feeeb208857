"""Background saves store the state at the call, and failing or stalled storage does not stop
training.
"""

import socket
import threading
import time
from collections import Counter

import pytest
import torch

from mmray.engine.checkpoint import files, manager, state_io
from mmray.engine.checkpoint.manager import (
    CheckpointManager,
    CheckpointSchedule,
    steps_between_checkpoints,
)
from mmray.engine.heartbeat import Heartbeat, HeartbeatState
from mmray.engine.worker import _closing
from mmray.errors import StorageError, TrainingError
from mmray.storage import outage, requests
from mmray.storage.lease import Lease
from mmray.storage.paths import to_path
from tests.polling import wait_until


class Checkpoints:
    """A manager, its log and its lease."""

    def __init__(self, run, world=1):
        self.run, self.logged, self.lease = run, [], Lease(run)
        self.manager = CheckpointManager(
            run,
            self.lease.acquire(),
            {"world": world},
            lambda *line: self.logged.append(line),
            keep=2,
            metric="evaluate/recall_at_1/mean",
            max_wait_s=60 if world > 1 else None,
        )

    def save(self, step, last=False, metrics=None):
        self.manager.save(step, step, state(step), metrics or {}, last)

    def names(self):
        return files.list_checkpoint_names(self.run / "checkpoints")


@pytest.fixture
def local(tmp_path):
    (tmp_path / "run").mkdir()
    yield (checkpoints := Checkpoints(tmp_path / "run"))
    checkpoints.lease.release()


@pytest.fixture
def stored(s3, monkeypatch):
    monkeypatch.setattr(requests, "ATTEMPTS", 1)
    yield (checkpoints := Checkpoints(to_path(s3.address) / "run"))
    checkpoints.lease.release()


@pytest.fixture
def gate(monkeypatch):
    """Blocks all writes until set."""
    event, write = threading.Event(), state_io.CheckpointWriter.write_data
    monkeypatch.setattr(
        state_io.CheckpointWriter, "write_data", lambda *args: event.wait(60) and write(*args)
    )
    return event


def state(step):
    return {"model": {"w": torch.full((5,), float(step))}, "progress": {"step": step}}


def wait_done(manager):
    while not manager._pending.done():
        time.sleep(0.001)


def test_saved_state_is_the_state_at_the_call(local, gate):
    weights = torch.arange(6.0).reshape(2, 3)
    expected, moments = weights.clone(), {"state": {"a": {"m": weights * 2}}}
    state = {
        "model": {"a": weights, "tied": weights},
        "optimizer": moments,
        "progress": {"step": 3},
    }
    local.manager.save(3, 3, state, {}, False)
    weights.add_(100)  # the next step
    state["progress"]["step"] = 4
    gate.set()
    local.manager.close()
    loaded = state_io.load(local.run / "checkpoints" / "step-3")
    assert all(torch.equal(loaded["model"][name], expected) for name in ("a", "tied"))
    assert torch.equal(loaded["optimizer"]["state"]["a"]["m"], expected * 2) and loaded[
        "progress"
    ] == {"step": 3}
    assert local.manager.save_duration_s > 0


def test_storage_that_fails_for_a_while_costs_one_checkpoint(stored, s3):
    s3.fail("PUT", "step-6/", 1000, status=400)
    for step in (3, 6):
        stored.save(step)
    wait_until(lambda: stored.logged)
    stored.manager.poll()
    stored.save(9)  # replaces it
    stored.manager.close()
    assert stored.names() == ["step-3", "step-9"]
    (_, failed), (_, ended) = stored.logged
    assert "cannot be used on" in failed and "its steps are kept in memory" in failed
    assert "can be used again" in ended


@pytest.mark.parametrize("last", [False, True])
def test_save_is_repeated_until_the_storage_is_mounted_again(local, tmp_path, monkeypatch, last):
    """An empty folder in its place is no take-over, and nothing is written there."""
    monkeypatch.setattr(outage, "RETRY_EVERY_S", 0.01)
    monkeypatch.setattr(outage, "LOG_EVERY_S", 0.05)
    local.save(3)
    wait_done(local.manager)
    local.run.rename(tmp_path / "away")
    local.run.mkdir()
    local.save(6, last)
    wait_until(lambda: len(local.logged) >= 3)  # a line at once, then each minute
    assert not list(local.run.iterdir())
    local.run.rmdir()
    (tmp_path / "away").rename(local.run)
    wait_done(local.manager)
    local.manager.close()
    assert local.names() == ["step-3", "step-6"]
    assert {label for label, _ in local.logged} == {"storage"}
    *failed, ended = (text for _, text in local.logged)
    host = f"{local.run} cannot be used on {socket.gethostname()} for "
    assert all(text.startswith(host) and "not mounted" in text for text in failed)
    assert "can be used again" in ended


def test_missing_permission_is_not_waited_for(local, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(state_io, "save_weights", refuse)
    local.save(3)
    with pytest.raises(StorageError, match="Permission denied"):
        local.manager.close()


@pytest.mark.parametrize("polled", [False, True])
def test_last_save_must_succeed(stored, s3, polled, monkeypatch):
    stored.save(3)
    wait_done(stored.manager)
    s3.fail("PUT", "checkpoints/step-6/", 1000, status=400)
    monkeypatch.setattr(outage, "LIMIT_S", 0.0)
    stored.save(6)
    if polled:
        wait_done(stored.manager)
        stored.manager.poll()
    with pytest.raises(StorageError, match=r"step-6: .*rerun the same command"):
        stored.manager.close()
    assert files.step_of(files.latest_valid_checkpoint(stored.run / "checkpoints")) == 3


@pytest.mark.parametrize(("world", "scores"), [(1, {}), (2, {}), (2, {"evaluate/loss": 0.5})])
def test_stalled_storage_skips_a_checkpoint_of_several_ranks(
    tmp_path, monkeypatch, gate, world, scores
):
    """An evaluated step waits as long as the other ranks can, because it may be the best one."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(manager, "MAX_WAIT_S", 0.05)
    checkpoints = Checkpoints(tmp_path / "run", world)
    checkpoints.save(3)
    skipped = world > 1 and not scores  # with one rank no process waits in a collective
    if not skipped:
        threading.Timer(0.3, gate.set).start()
    checkpoints.save(6, metrics=scores)
    assert gate.is_set() != skipped
    gate.set()
    checkpoints.save(9, last=True)
    checkpoints.manager.close()
    checkpoints.lease.release()
    assert checkpoints.names() == (["step-3", "step-9"] if skipped else ["step-6", "step-9"])
    assert ["skipped the checkpoint of step 6" in text for _, text in checkpoints.logged] == [
        True
    ] * skipped


def test_waiting_for_a_save_is_a_state_without_progress(local, gate, tmp_path, monkeypatch):
    """A dead network mount never answers, so hang detection must apply, with the limit of this
    state.
    """
    monkeypatch.setattr("mmray.engine.heartbeat.INTERVAL_S", 0.02)
    waits = []

    def send(heartbeat):
        """Let the storage answer once ten heartbeats in a row have reported the same progress."""
        if heartbeat.get("state") == "saving":
            waits.append(heartbeat["progress"])
        if len(waits) >= 10 and len(set(waits[-10:])) == 1:
            gate.set()

    heartbeat = Heartbeat(send, {"rank": 0, "node": "n", "pid": 1}, tmp_path)
    local.save(3)
    give_up = threading.Timer(30, gate.set)
    give_up.start()
    with heartbeat.running(4), heartbeat.state("saving"):
        local.save(6)
    give_up.cancel()
    local.manager.close()
    assert max(Counter(waits).values()) >= 10


def test_lost_lease_ends_training_at_the_next_poll(local):
    local.lease.claim_next_token()
    local.save(3)
    wait_done(local.manager)
    with pytest.raises(TrainingError, match="taken over"):
        local.manager.poll()
    local.manager.close()
    assert local.names() == []


def test_failed_save_does_not_hide_what_ended_the_run(stored, s3):
    """The retry policy must see the lost worker, not an earlier storage error."""
    s3.fail("PUT", "step-1/", 1000, status=400)
    stored.save(1)
    with (
        pytest.raises(RuntimeError, match="connection closed by peer"),
        _closing(None, stored.manager, HeartbeatState()),
    ):
        raise RuntimeError("connection closed by peer")
    assert not stored.manager.uploader.local_folder.exists()


def test_automatic_schedule_doubles_until_measured_then_follows_the_stall():
    schedule, taken = CheckpointSchedule("auto", first=100), []
    for step in range(101, 400):
        if schedule.is_due(step):
            taken.append(step)
            save_s = None if len(taken) < 3 else 5.0
            schedule.saved(step, steps_between_checkpoints(0.1, 0.2, save_s, step - 100))
    assert taken == [110, 120, 140, 240, 340]


def test_automatic_interval_is_at_least_a_whole_save():
    """A save in the background costs training nothing, but the next one must not wait for it."""
    assert steps_between_checkpoints(0.1, stall_s=0.01, save_duration_s=20.0, steps_taken=50) == 200
    assert steps_between_checkpoints(0.1, stall_s=1.0, save_duration_s=20.0, steps_taken=50) == 500


def test_buffers_are_reused_after_the_write_and_not_before(local, gate, monkeypatch):
    weights, buffers, stage = torch.zeros(8), [], state_io.HostStager.stage

    def stage_and_record(stager, tensors):
        staged = stage(stager, tensors)
        buffers.append({name: tensor.data_ptr() for name, tensor in staged.items()})
        return staged

    monkeypatch.setattr(state_io.HostStager, "stage", stage_and_record)
    threading.Timer(0.3, gate.set).start()
    for step in (3, 6):
        weights.fill_(step)
        local.manager.save(step, step, {"model": {"w": weights}, "progress": {}}, {}, False)
    local.manager.close()
    assert (
        len(buffers) == 2
        and buffers[0] == buffers[1]
        and weights.data_ptr() not in buffers[0].values()
    )
    for step in (3, 6):
        assert (
            state_io.load_weights(local.run / "checkpoints" / f"step-{step}")["w"] == step
        ).all()


def test_fixed_schedule_is_kept_and_zero_means_never():
    assert [step for step in range(1, 10) if CheckpointSchedule(3, 0).is_due(step)] == [3, 6, 9]
    assert not any(CheckpointSchedule(0, 0).is_due(step) for step in range(1, 10))
