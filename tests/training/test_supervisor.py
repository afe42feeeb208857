"""The supervisor around its decisions: result, report, retries of the storage and exit code."""

import json
import os
import signal

import pytest
import ray.exceptions
import torch

from mmray.engine.batch import BatchShape
from mmray.engine.checkpoint import files
from mmray.errors import (
    DeviceError,
    OutOfMemoryError,
    ResourceError,
    StorageError,
    TrainingError,
    UsageError,
)
from mmray.storage import outage
from mmray.storage.lease import Lease
from mmray.training import driver, monitor, supervisor
from mmray.training.run_dir import RunDir
from tests.checkpoints import save_checkpoint
from tests.training.runs import Silent, config
from tests.training.scripted import ScriptedBackend, fail, fail_with, finish, supervised

LOST = fail(RuntimeError("a worker died"))
GLOBAL_ROWS = 64


@pytest.fixture
def lease(tmp_path):
    with Lease(tmp_path) as held:
        yield held


@pytest.fixture
def make(tmp_path, lease):
    """make(*acts, worlds=...): the supervisor of a run whose attempts end as these decide."""

    def make_supervisor(*acts, worlds=(), backend=ScriptedBackend, **settings):
        return supervised(tmp_path, lease, backend(acts, worlds), **settings)

    return make_supervisor


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def labeled(made, label):
    return [text for each, text in made.reporter.notes if each == label]


def save(folder, step, metrics=None, rows=None):
    """Save a checkpoint of this step in the folder of a run."""
    meta = {"metrics": metrics or {}, "rows_consumed": rows or GLOBAL_ROWS * step}
    state = {"model": {"weight": torch.zeros(1)}}
    return save_checkpoint(folder / "checkpoints", step, state, meta)


@pytest.mark.parametrize(
    ("excluded", "text"),
    [(True, "the node of the device gets no more"), (False, "retrying on the same")],
)
def test_failed_device_is_logged_with_what_follows(make, excluded, text):
    error = "CUDA error: uncorrectable ECC error (rank 1, GPU 3, node gpu-7 at 10.0.0.3)"
    made = make(fail_with(DeviceError(error, "0123456789")), finish)
    made.backend.excludes_nodes = excluded
    assert made.train()["restarts"] == 1
    (logged,) = labeled(made, "device")
    assert made.backend.excluded == ["0123456789"]
    assert text in logged and "rank 1, GPU 3" in logged


def test_resume_without_a_checkpoint_is_recorded_as_failed(make, tmp_path):
    run = config("none", tmp_path, "one").run.replace(resume="must")
    with pytest.raises(UsageError, match=r"--run\.resume must: no valid checkpoint in"):
        make(run=run).train()
    result = result_of(tmp_path)
    assert result["status"] == "failed" and "no valid checkpoint" in result["error"]


def test_no_restart_after_user_requested_stop(make, tmp_path):
    """A rank hangs, Ctrl-C, and the group is killed before it can agree on the stop."""

    def stop_and_hang(workers):
        os.kill(os.getpid(), signal.SIGINT)
        assert workers.stop_requested
        raise RuntimeError("a rank hangs")

    made = make(LOST, stop_and_hang)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert (result_of(tmp_path)["status"], result_of(tmp_path)["restarts"]) == ("stopped", 1)
    assert made.reporter.notes[-1] == ("stopped", "before the first checkpoint")


def test_result_contains_no_secrets_of_environment(make, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    with pytest.raises(TrainingError):
        make(fail(TrainingError("no answer from https://me:pass@host/?key=hush-hush"))).train()
    text = (tmp_path / "result.json").read_text()
    assert "no answer" in text and "hush" not in text and "pass" not in text


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_failing_storage_does_not_hide_the_error(make, monkeypatch):
    monkeypatch.setattr(RunDir, "write_json", full_disk)
    with pytest.raises(TrainingError, match="what happened"):
        make(fail(TrainingError("what happened"))).train()


def take_over(run):
    """Another process takes over the run and finishes it."""
    newest = max(int(file.name) for file in (run / "lease").iterdir() if file.name.isdecimal())
    (run / "lease" / str(newest)).unlink()
    (run / "lease" / str(newest + 1)).write_text("{}")
    (run / "result.json").write_text('{"status": "finished"}')


@pytest.mark.parametrize("error", ["what happened", "taken over"])
def test_lost_lease_leaves_result_and_report_of_new_owner(
    make, lease, tmp_path, monkeypatch, error
):
    """Whether the attempt fails meanwhile or finishes."""

    def act(workers):
        take_over(tmp_path)
        return fail(TrainingError(error))(workers) if error == "what happened" else finish(workers)

    made = make(act)
    with pytest.raises(TrainingError, match=error):
        made.train()
    assert result_of(tmp_path) == {"status": "finished"}
    monkeypatch.setattr(driver, "write_report_safely", lambda *_: pytest.fail("wrote the report"))
    driver._finalize_run_dir(made.run, lease, Silent())


def test_full_disk_at_the_end_reports_how_to_resume(make, tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text('{"restarts": 2, "elapsed_s": 1000.0}')
    message = r"step 3 are saved in .*checkpoints.*No space left.*rerun the same command"
    monkeypatch.setattr(outage, "LIMIT_S", 0.0)
    with monkeypatch.context() as full:
        full.setattr(RunDir, "write_json", full_disk)
        with pytest.raises(ResourceError, match=message):
            make(finish).train()
    result = make(finish).train()
    assert result["batch"].endswith("= 64 rows per step")
    assert result["restarts"] == 2 and result["elapsed_s"] > 1000


def test_result_names_best_checkpoint(make, tmp_path):
    def save_three(workers):
        for step, metrics in (
            (1, {"evaluate/recall_at_1/mean": 0.5}),
            (2, {"evaluate/recall_at_1/mean": 0.25}),
            (3, {}),
        ):
            save(tmp_path, step, metrics)
        return finish(workers)

    assert make(finish).train()["best"] is None
    make(save_three).train()
    assert result_of(tmp_path)["best"] == {"step": 1, "metric": "recall_at_1/mean", "score": 0.5}


@pytest.mark.parametrize("step", [3, 5])
def test_run_with_all_steps_in_its_checkpoint_finishes_without_workers(make, tmp_path, step):
    """The driver was killed before it wrote result.json, or `train.steps` (3) was lowered."""
    metrics = {
        "step": step,
        "train/loss": 1.5,
        "train/skipped_steps": 1,
        "evaluate/recall_at_1/mean": 0.5,
    }
    save(tmp_path, step, metrics)
    made = make()
    made.train()
    result = result_of(tmp_path)
    assert (result["status"], result["steps"]) == ("finished", step)
    assert result["rows_consumed"] == GLOBAL_ROWS * step and made.backend.shapes == []
    assert result["metrics"]["train/loss"] == 1.5 and result["skipped_steps"] == 1
    assert result["scores"] == {"recall_at_1/mean": 0.5} and result["best"]["step"] == step


@pytest.mark.parametrize(
    ("unit", "name", "error"),
    [
        (files, "latest_valid_checkpoint", StorageError("no answer")),
        (files, "load_meta", StorageError("no answer")),
        (Lease, "claim_next_token", StorageError("no answer")),
        (supervisor, "load_bad_rows", OSError(5, "Input/output error")),
    ],
)
def test_storage_failure_between_attempts_is_retried(
    make, tmp_path, monkeypatch, unit, name, error
):
    sound, left = getattr(unit, name), [0]

    def flaky(*args, **kwargs):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return sound(*args, **kwargs)

    def lose(failures):
        def act(workers):
            left[0] = failures
            return LOST(workers)

        return act

    save(tmp_path, 2)
    monkeypatch.setattr(unit, name, flaky)
    monkeypatch.setattr(outage, "RETRY_EVERY_S", 0.01)
    monkeypatch.setattr(outage, "LIMIT_S", 0.05)
    made = make(lose(2), finish)
    assert made.train()["restarts"] == 1
    assert len(labeled(made, "storage")) == 2 and len(labeled(made, "resume")) == 2
    with pytest.raises(StorageError, match="rerun the same command to resume"):
        make(lose(10**6)).train()
    assert result_of(tmp_path)["status"] == "failed"


def test_only_the_first_attempt_of_a_command_verifies_checksums(make, tmp_path, monkeypatch):
    """Its workers write all later ones."""
    verified = []
    monkeypatch.setattr(
        files, "verify", lambda path, checksums: verified.append((path.name, checksums))
    )

    def save_and_fail(workers):
        save(tmp_path, 2)
        return LOST(workers)

    save(tmp_path, 1)
    made = make(save_and_fail, finish)
    made.train()
    assert verified == [("step-1", True), ("step-2", False)]
    assert labeled(made, "status").count("verifying the checkpoint") == 1


def test_only_failed_resizes_delay_the_next_one(make, tmp_path, monkeypatch):
    """Workers that fit are waited for at two polls in a row; after a resize that started no larger
    group, at four times as many.
    """
    monkeypatch.setattr(monitor, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(monitor, "CAPACITY_INTERVAL_S", 0.0)
    polls = []

    def stopped(workers):
        count = 0
        while not workers.stop_requested:
            workers.poll()
            count += 1
        polls.append(count)
        return {"status": "stopped", "steps": 0}

    def grow(workers):
        workers.num_more = 1
        return stopped(workers)

    def preempt(workers):
        workers.draining = {"node-1": 0.0}
        return stopped(workers)

    cluster = config("none", tmp_path, "one").cluster.replace(workers="2-3")
    made = make(grow, preempt, grow, grow, finish, worlds=[2, 3, 2, 2, 3], cluster=cluster)
    result = made.train()
    assert (result["resizes"], result["preemptions"], polls) == (3, 1, [2, 1, 2, 8])


def test_reduced_micro_batch_is_kept_for_its_number_of_workers(make):
    out_of_memory = fail(OutOfMemoryError("in the optimizer", BatchShape(64, 8, 4)))
    made = make(out_of_memory, LOST, LOST, finish, worlds=[4, 4, 3, 4])
    assert made.train()["status"] == "finished"
    sizes = [(shape.world_size, shape.micro_batch_size) for shape in made.backend.shapes]
    assert sizes == [(4, 16), (4, 8), (3, 22), (4, 8)]


@pytest.mark.parametrize("lost_in", ["choose_world_size", "start"])
def test_error_of_the_cluster_between_attempts_names_the_first_failure(make, tmp_path, lost_in):
    def gone(*_):
        raise ray.exceptions.RaySystemError("the head does not answer")

    def lose_the_head(workers):
        setattr(made.backend, lost_in, gone)
        return LOST(workers)

    made = make(lose_the_head)
    with pytest.raises(
        TrainingError, match=r"a worker died; then workers could not start: .*the head"
    ):
        made.train()
    assert result_of(tmp_path)["status"] == "failed"
