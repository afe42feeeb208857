"""The supervisor around its decisions: result, report, retries of the storage and exit code."""

import json
from dataclasses import replace
from types import SimpleNamespace

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
from mmray.storage.lease import Lease
from mmray.training import driver, supervisor
from mmray.training.recovery import Failure, Restart
from mmray.training.resolve import ResolvedRun
from mmray.training.run_dir import RunDir
from mmray.training.supervisor import Supervisor
from tests.checkpoints import save_checkpoint
from tests.training.runs import Silent, config


@pytest.fixture
def supervised(tmp_path):
    """The supervisor of a run that has started its first attempt."""
    shape = BatchShape(64, 32, world_size=2)
    resolved = ResolvedRun(config("none", tmp_path, "one"), None, None, "", shape, 3, {})
    with Lease(tmp_path) as lease:
        errors = RuntimeError, ray.exceptions.RayError, OutOfMemoryError
        backend = SimpleNamespace(
            errors=errors, resolve=lambda config: config, choose_world_size=lambda _: 2
        )
        made = Supervisor(resolved, RunDir(tmp_path), lease, Silent(), backend)
        made.attempts = 1
        yield made


@pytest.fixture
def fails(supervised, monkeypatch):
    """fails(error, kind, stop_reason): an attempt of two workers ends with the error at step 7; the
    next finishes.
    """

    def after(error, kind="lost", stop_reason=None):
        monitor = SimpleNamespace(stop_reason=stop_reason, world=2, start_step=0)
        attempts = iter(
            [lambda: supervised._handle_failure(error, monitor), lambda: {"status": "finished"}]
        )
        monkeypatch.setattr(supervisor, "classify_failure", lambda *_: Failure(kind, error, 7))
        monkeypatch.setattr(supervised, "_run_attempt", lambda: next(attempts)())
        supervised.train()

    return after


@pytest.mark.parametrize(
    ("excluded", "text"), [(True, "node 01234567 gets no more"), (False, "retrying on the same")]
)
def test_failed_device_is_logged_with_what_follows(supervised, fails, excluded, text):
    asked = []
    supervised.backend.exclude_node = lambda config, node: asked.append(node) or excluded
    fails(
        DeviceError(
            "CUDA error: uncorrectable ECC error (rank 1, GPU 3, node 01234567)", "0123456789"
        ),
        "device",
    )
    (logged,) = [note for label, note in supervised.reporter.notes if label == "device"]
    assert asked == ["0123456789"] and text in logged and "rank 1, GPU 3" in logged


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def test_resume_without_a_checkpoint_is_recorded_as_failed(supervised, tmp_path):
    run = supervised.config.run.replace(resume="must")
    supervised.config = supervised.config.replace(run=run)
    with pytest.raises(UsageError, match=r"--run\.resume must: no valid checkpoint in"):
        supervised.train()
    assert (
        result_of(tmp_path)["status"] == "failed"
        and ("no valid checkpoint") in result_of(tmp_path)["error"]
    )


def test_no_restart_after_user_requested_stop(supervised, fails, tmp_path):
    """A rank hangs, Ctrl-C, and the group is killed before it can agree on the stop."""
    fails(RuntimeError("a node is gone"))
    assert supervised.failures == 1
    with pytest.raises(KeyboardInterrupt):
        fails(RuntimeError("a rank hangs"), stop_reason="user")
    assert result_of(tmp_path)["status"] == "stopped"
    assert supervised.reporter.notes[-1] == ("stopped", "before the first checkpoint")


def test_result_contains_no_secrets_of_environment(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    with pytest.raises(TrainingError):
        fails(TrainingError("no answer from https://me:pass@host/?key=hush-hush"), "raised")
    text = (tmp_path / "result.json").read_text()
    assert "no answer" in text and "hush" not in text and "pass" not in text


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_failing_storage_does_not_hide_the_error(fails, monkeypatch):
    monkeypatch.setattr(RunDir, "write_json", full_disk)
    with pytest.raises(TrainingError, match="what happened"):
        fails(TrainingError("what happened"), "raised")


def take_over(run):
    """Another process takes over the run and finishes it."""
    newest = max(int(file.name) for file in (run / "lease").iterdir() if file.name.isdecimal())
    (run / "lease" / str(newest)).unlink()
    (run / "lease" / str(newest + 1)).write_text("{}")
    (run / "result.json").write_text('{"status": "finished"}')


def test_lost_lease_leaves_result_and_report_of_new_owner(supervised, fails, tmp_path, monkeypatch):
    take_over(tmp_path)
    with pytest.raises(TrainingError, match="what happened"):
        fails(TrainingError("what happened"), "raised")
    with pytest.raises(TrainingError, match="taken over"):
        supervised._write_result({"status": "finished", "steps": 12})
    assert result_of(tmp_path) == {"status": "finished"}
    monkeypatch.setattr(driver, "write_report_safely", lambda *_: pytest.fail("wrote the report"))
    driver._finalize_run_dir(supervised.run, supervised.lease, Silent())


def test_full_disk_at_the_end_reports_how_to_resume(supervised, monkeypatch):
    outcome, supervised.earlier = (
        {"status": "finished", "steps": 12},
        {"restarts": 2, "elapsed_s": 1000.0},
    )
    with monkeypatch.context() as full:
        full.setattr(RunDir, "write_json", full_disk)
        with pytest.raises(
            ResourceError,
            match=r"step 12 are saved in .*checkpoints.*No space left.*rerun the same command",
        ):
            supervised._write_result(outcome)
    result = supervised._write_result(outcome)
    assert (
        result["batch"].endswith("= 64 rows per step")
        and result["restarts"] == 2
        and result["elapsed_s"] > 1000
    )


def test_result_names_best_checkpoint(supervised, tmp_path):
    outcome = {"status": "finished", "steps": 9}
    assert supervised._write_result(outcome)["best"] is None
    for step, metrics in (
        (3, {"evaluate/recall_at_1/mean": 0.5}),
        (6, {"evaluate/recall_at_1/mean": 0.25}),
        (9, {}),
    ):
        save_checkpoint(
            supervised.run.checkpoints,
            step,
            {"model": {"weight": torch.zeros(1)}},
            {"metrics": metrics},
        )
    supervised._write_result(outcome)
    assert result_of(tmp_path)["best"] == {"step": 3, "metric": "recall_at_1/mean", "score": 0.5}


def test_checkpoint_with_other_rows_than_its_steps_is_refused(supervised):
    supervised.resolved = replace(supervised.resolved, batch_shape=BatchShape(16, 4, 2))
    # 16, and the last 4 of an epoch
    save_checkpoint(supervised.run.checkpoints, 2, {}, {"rows_consumed": 20})
    with pytest.raises(
        UsageError, match=r"step-2: its 2 steps took 20 rows, but 2 steps of 16 rows take 32"
    ):
        supervised.train()


@pytest.mark.parametrize("step", [3, 5])
def test_run_with_all_steps_in_its_checkpoint_finishes_without_workers(supervised, tmp_path, step):
    """The driver was killed before it wrote result.json, or `train.steps` (3) was lowered."""
    supervised.backend.start = lambda _: pytest.fail("started workers")
    metrics = {
        "step": step,
        "train/loss": 1.5,
        "train/skipped_steps": 1,
        "evaluate/recall_at_1/mean": 0.5,
    }
    meta = {"metrics": metrics, "rows_consumed": 16 * step}
    save_checkpoint(supervised.run.checkpoints, step, {"model": {"weight": torch.zeros(1)}}, meta)
    supervised.train()
    result = result_of(tmp_path)
    assert (result["status"], result["steps"], result["rows_consumed"]) == (
        "finished",
        step,
        16 * step,
    )
    assert result["metrics"]["train/loss"] == 1.5 and result["skipped_steps"] == 1
    assert result["scores"] == {"recall_at_1/mean": 0.5} and result["best"]["step"] == step


@pytest.mark.parametrize(
    ("unit", "name"),
    [
        (files, "latest_valid_checkpoint"),
        (files, "load_meta"),
        (Lease, "claim_next_token"),
        (supervisor, "load_bad_rows"),
    ],
)
def test_storage_failure_between_attempts_is_retried(supervised, tmp_path, monkeypatch, unit, name):
    sound, left = getattr(unit, name), [2]

    def flaky(*args, **kwargs):
        left[0] -= 1
        if left[0] >= 0:
            raise (
                StorageError("no answer")
                if name != "load_bad_rows"
                else OSError(5, "Input/output error")
            )
        return sound(*args, **kwargs)

    checkpoint = save_checkpoint(supervised.run.checkpoints, 2, {}, {"rows_consumed": 32})
    monkeypatch.setattr(unit, name, flaky)
    monkeypatch.setattr(supervisor, "STORAGE_RETRIES_S", (0.0, 0.0))
    path, meta, bad_rows = supervised._prepare_attempt()
    assert (path, meta["rows_consumed"], bad_rows) == (checkpoint, 32, set())
    assert [label for label, _ in supervised.reporter.notes if label != "status"] == [
        "storage",
        "storage",
    ]
    assert supervised.lease.fencing_token >= 2
    left[0] = 10**6
    with pytest.raises(StorageError, match="rerun the same command to resume"):
        supervised.train()
    assert result_of(tmp_path)["status"] == "failed"


def test_only_the_first_attempt_of_a_command_verifies_checksums(supervised, monkeypatch):
    """Its workers write all later ones."""
    verified, supervised.attempts = [], 0
    monkeypatch.setattr(
        files, "verify", lambda path, checksums: verified.append((path.name, checksums))
    )
    for step in (2, 5):
        newest = save_checkpoint(supervised.run.checkpoints, step, {}, {"rows_consumed": 16 * step})
        assert supervised._prepare_attempt()[0] == newest
    assert verified == [("step-2", True), ("step-5", False)]
    assert [text for label, text in supervised.reporter.notes if label == "status"] == [
        "verifying the checkpoint"
    ]


def test_only_failed_resizes_delay_the_next_one(supervised, monkeypatch):
    worlds, stop_reasons, counts = (
        iter([2, 3, 2, 2]),
        iter(["resize", "preempted", "resize", "user"]),
        [],
    )

    def monitor(failed_resizes, **_):
        counts.append(failed_resizes)
        return SimpleNamespace(
            started=True, stop_reason=next(stop_reasons), poll=None, on_signal=print, start_step=0
        )

    monkeypatch.setattr(supervisor, "AttemptMonitor", monitor)
    workers = SimpleNamespace(wait=lambda _: {"status": "stopped", "steps": 0}, close=lambda: None)
    supervised.backend.start = lambda _: workers
    supervised.backend.choose_world_size = lambda _: next(worlds)
    assert supervised.train()["resizes"] == 2 and counts == [0, 0, 0, 1]


def test_reduced_micro_batch_is_kept_for_its_number_of_workers(supervised, monkeypatch):
    worlds, attempts = iter([4, 4, 3, 4]), []
    outcomes = iter(
        [
            OutOfMemoryError("in the optimizer", BatchShape(64, 8, 4)),
            *[RuntimeError("a node is gone")] * 2,
            None,
        ]
    )

    def start(attempt):
        attempts.append(attempt.batch_shape)
        return SimpleNamespace(wait=wait, close=lambda: None)

    def wait(_):
        if error := next(outcomes):
            raise error
        return {"status": "finished", "steps": 3}

    def monitor(**fields):
        world = fields["batch_shape"].world_size
        return SimpleNamespace(
            world=world, started=True, stop_reason=None, poll=None, on_signal=print, **fields
        )

    monkeypatch.setattr(supervisor, "AttemptMonitor", monitor)

    def failure_of(error, *_):
        return Failure("raised" if isinstance(error, OutOfMemoryError) else "lost", error, 0)

    monkeypatch.setattr(supervisor, "classify_failure", failure_of)
    supervised.backend.start, supervised.backend.choose_world_size = start, lambda _: next(worlds)
    assert supervised.train()["status"] == "finished"
    sizes = [(shape.world_size, shape.micro_batch_size) for shape in attempts]
    assert sizes == [(4, 16), (4, 8), (3, 22), (4, 8)]


@pytest.mark.parametrize("lost_in", ["choose_world_size", "start"])
def test_error_of_the_cluster_between_attempts_names_the_first_failure(
    supervised, tmp_path, lost_in
):
    def gone(*_):
        raise ray.exceptions.RaySystemError("the head does not answer")

    setattr(supervised.backend, lost_in, gone)
    supervised.restart = Restart("worker lost after step 7: a worker died")
    with pytest.raises(
        TrainingError, match=r"a worker died; then workers could not start: .*the head"
    ):
        supervised.train()
    assert result_of(tmp_path)["status"] == "failed"
