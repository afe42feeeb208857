"""Handling of a failed attempt besides the retry policy: result, report and exit code."""

import json
from types import SimpleNamespace

import pytest
import ray.exceptions
import ray.train
import torch
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from mmray.config import Config
from mmray.engine.batch import BatchShape
from mmray.engine.checkpoint import files, state_io
from mmray.errors import OutOfMemoryError, ResourceError, StorageError, TrainingError
from mmray.storage.lease import Lease
from mmray.train import driver, supervisor
from mmray.train.run_dir import RunDir
from mmray.train.supervisor import Fail, Failure, ReduceMicroBatch, Restart, classify_failure, decide_recovery
from tests.train.runs import Silent, config


@pytest.fixture
def fails(monkeypatch, tmp_path):
    """fails(stop_reason, error): an attempt of two workers ends with the error at step 7."""
    ready = SimpleNamespace(shape="16 rows per step", micro=0)
    lease = Lease(tmp_path)
    lease.acquire()
    monkeypatch.setattr(supervisor, "choose_world_size", lambda *_: (None, 2))

    def after(stop_reason, error, kind="lost", history=None):
        monkeypatch.setattr(supervisor, "classify_failure", lambda *_: Failure(kind, error, 7))
        monitor = SimpleNamespace(stop_reason=stop_reason, world=2, autoscaler=None)
        history = history or supervisor.RunHistory(attempts=1)
        supervisor._handle_failure(error, ready, RunDir(tmp_path), lease, history, monitor, Config(), Silent())
        return history

    yield after
    lease.release()


def test_no_restart_after_user_requested_stop(fails, tmp_path):
    """A rank hangs, Ctrl-C, and the group is killed before it can agree on the stop."""
    assert fails(None, RuntimeError("a node is gone")).failures == 1
    with pytest.raises(KeyboardInterrupt):
        fails("user", RuntimeError("a rank hangs"))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "stopped"


def test_result_contains_no_secrets_of_environment(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    with pytest.raises(TrainingError):
        fails(None, TrainingError("no answer from https://me:pass@host/?key=hush-hush"), kind="raised")
    kept = (tmp_path / "result.json").read_text()
    assert "no answer" in kept and "hush" not in kept and "pass" not in kept


def test_failing_storage_does_not_hide_the_error(fails, monkeypatch):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(RunDir, "write_json", refuse)
    with pytest.raises(TrainingError, match="what happened"):
        fails(None, TrainingError("what happened"), kind="raised")


def overtake(run):
    """Another process takes over the run and finishes it."""
    newest = max(int(file.name) for file in (run / "lease").iterdir() if file.name.isdecimal())
    (run / "lease" / str(newest)).unlink()
    (run / "lease" / str(newest + 1)).write_text("{}")
    (run / "result.json").write_text('{"status": "finished"}')


def test_lost_lease_leaves_result_and_report_of_new_owner(fails, tmp_path, monkeypatch):
    overtake(tmp_path)
    with pytest.raises(TrainingError, match="what happened"):
        fails(None, TrainingError("what happened"), kind="raised")
    assert json.loads((tmp_path / "result.json").read_text()) == {"status": "finished"}
    monkeypatch.setattr(driver, "write_report_safely", lambda *_: pytest.fail("it drew the report"))
    asleep = Lease(tmp_path)
    asleep.fence = 1
    driver._finalize_run_dir(RunDir(tmp_path), asleep, Silent())


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_full_disk_at_the_end_reports_how_to_resume(tmp_path, monkeypatch):
    lease, run = Lease(tmp_path), RunDir(tmp_path)
    lease.acquire()
    ready = SimpleNamespace(shape="16 rows per step", config=config("none", tmp_path, "one"))
    outcome = {"status": "finished", "steps": 12}
    with monkeypatch.context() as full:
        full.setattr(RunDir, "write_json", full_disk)
        with pytest.raises(ResourceError, match=r"step 12 are in .*checkpoints.*No space left.*rerun the same command"):
            supervisor._write_result(run, lease, ready, outcome, supervisor.RunHistory(attempts=1))
    assert (
        supervisor._write_result(run, lease, ready, outcome, supervisor.RunHistory(attempts=1))["batch"]
        == "16 rows per step"
    )
    overtake(tmp_path)
    with pytest.raises(TrainingError, match="taken over"):
        supervisor._write_result(run, lease, ready, outcome, supervisor.RunHistory(attempts=1))
    assert json.loads((tmp_path / "result.json").read_text()) == {"status": "finished"}
    lease.release()


def test_result_names_best_checkpoint(tmp_path):
    lease, run = Lease(tmp_path), RunDir(tmp_path)
    lease.acquire()
    ready = SimpleNamespace(shape="16 rows per step", config=config("none", tmp_path, "one"))
    outcome = {"status": "finished", "steps": 9}
    assert supervisor._write_result(run, lease, ready, outcome, supervisor.RunHistory(attempts=1))["best"] is None
    for step, metrics in ((3, {"evaluate/recall_at_1/mean": 0.5}), (6, {"evaluate/recall_at_1/mean": 0.25}), (9, {})):
        state_io.save(run.checkpoints, step, {"model": {"weight": torch.zeros(1)}}, {"metrics": metrics})
    supervisor._write_result(run, lease, ready, outcome, supervisor.RunHistory(attempts=1))
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["best"] == {"step": 3, "metric": "recall_at_1/mean", "score": 0.5}
    lease.release()


@pytest.mark.parametrize(
    ("place", "name"), [(files, "latest_valid"), (Lease, "advance"), (supervisor, "load_bad_rows")]
)
def test_storage_failure_between_attempts_is_retried(tmp_path, monkeypatch, place, name):
    sound, left = getattr(place, name), [2]

    def flaky(*given, **named):
        left[0] -= 1
        if left[0] >= 0:
            raise StorageError("it does not answer") if name != "load_bad_rows" else OSError(5, "Input/output error")
        return sound(*given, **named)

    monkeypatch.setattr(place, name, flaky)
    monkeypatch.setattr(supervisor, "STORAGE_RETRIES_S", (0.0, 0.0))
    lease, reporter = Lease(tmp_path), Silent()
    lease.acquire()
    assert supervisor._prepare_attempt(RunDir(tmp_path), lease, supervisor.RunHistory(attempts=1), reporter) == (
        None,
        set(),
    )
    assert [label for label, _ in reporter.notes] == ["storage", "storage"] and lease.fence >= 2
    left[0] = 10**6
    with pytest.raises(StorageError, match="rerun the same command to resume"):
        supervisor._prepare_attempt(RunDir(tmp_path), lease, supervisor.RunHistory(attempts=1), reporter)
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"
    lease.release()


def failure_from(error, micro=0, logged=0, least=2):
    """Classify an error of Ray Train in a run of 16 rows per step, micro-batches of 4, two workers."""
    progress = SimpleNamespace(last_step=0, logged=False, micro=logged)
    ready = SimpleNamespace(micro=micro, shape=BatchShape(16, 4, 2, 2))
    config = SimpleNamespace(cluster=SimpleNamespace(min_workers=least))
    monitor = SimpleNamespace(hang=None, preempted=False, stop_reason=None, progress=progress, world=2, config=config)
    return classify_failure(error, monitor, ready)


def failed(*errors, **given):
    """Classify these errors of the workers."""
    return failure_from(ray.train.WorkerGroupError("told", dict(enumerate(errors))), **given)


def test_start_timeout_of_elastic_group_restarts_with_fewer_workers(monkeypatch):
    """Another run took the resources after they were counted."""
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
    late = ray.train.ControllerError(WorkerGroupStartupTimeoutError(2))
    assert isinstance(decide_recovery(failure_from(late, least=1), None, 1, 3), Restart)
    verdict = decide_recovery(failure_from(late, least=2), None, 1, 3)
    assert isinstance(verdict, Fail) and "start_timeout_s" in str(verdict.error)


def test_repeated_start_timeout_has_resource_exit_code():
    verdict = decide_recovery(Failure("lost", ResourceError("the training workers did not start"), 0), None, 4, 3)
    assert isinstance(verdict, Fail) and verdict.error.exit_code == 4


def test_lost_cluster_error_includes_first_failure(fails, tmp_path, monkeypatch):
    def gone(*_):
        raise ray.exceptions.RaySystemError("the head does not answer")

    monkeypatch.setattr(supervisor, "choose_world_size", gone)
    with pytest.raises(TrainingError, match=r"a worker died; then Ray did not respond: .*the head"):
        fails(None, RuntimeError("a worker died"))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


def test_fatal_error_requests_no_nodes(fails, monkeypatch):
    monkeypatch.setattr(supervisor, "choose_world_size", lambda *_: pytest.fail("it asked for nodes"))
    with pytest.raises(TrainingError, match="a mistake"):
        fails(None, TrainingError("a mistake"), kind="raised")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO} recv operation to complete"),
        RuntimeError(f"{GLOO} send operation to complete"),
        RuntimeError("wait timeout after 1000ms, keys: /0//1//cpu//0/1"),
        RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
        WorkerHealthCheckFailedError("A worker health check failed.", ray.exceptions.ActorDiedError()),
        WorkerHealthCheckTimeoutError("A worker health check timed out."),
    ],
)
def test_broken_collective_is_retried_even_before_first_step(error):
    """Loading a model may take longer than a collective waits; a worker may die meanwhile."""
    failure = failed(error)
    assert failure.kind == "lost"
    assert isinstance(decide_recovery(failure, None, 1, 3), Restart)
    assert failed(ValueError("a bug"), error).kind == "raised"


def test_host_oom_restarts_with_smaller_micro_batches():
    killed = WorkerHealthCheckFailedError("A check failed.", ray.exceptions.OutOfMemoryError("1 worker(s) killed\n..."))
    peer = RuntimeError("Connection closed by peer")
    verdict = decide_recovery(failed(killed, peer), None, 1, 3)
    assert isinstance(verdict, ReduceMicroBatch) and verdict.micro == 2
    assert "a node ran out of memory with micro-batches of 4 rows (1 worker(s) killed)" in verdict.reason
    assert decide_recovery(failed(killed, peer, logged=2), None, 1, 3).micro == 1
    alone = failed(killed, peer, micro=1)
    assert isinstance(alone.error, OutOfMemoryError) and isinstance(decide_recovery(alone, None, 1, 3), Restart)


def test_oom_of_one_rank_outweighs_lost_connections():
    lost = RuntimeError("NCCL communicator was aborted")
    mine = OutOfMemoryError("NCCL error in: ncclUnhandledCudaError: out of memory", 2)
    assert decide_recovery(failed(lost, mine), None, 1, 3) == ReduceMicroBatch(2, str(mine))


def test_bug_in_driver_is_not_retried(tmp_path, monkeypatch):
    def mistaken(*_):
        raise AttributeError("'NoneType' object has no attribute 'foo'")

    monkeypatch.setattr(supervisor, "build_trainer", mistaken)
    monkeypatch.setattr(supervisor, "choose_world_size", lambda *_: (None, 2))
    monkeypatch.setattr(supervisor, "resource_demand", lambda _: SimpleNamespace(per_worker={}))
    monkeypatch.setattr(supervisor, "request_nodes", lambda *_: None)
    monkeypatch.setattr(supervisor, "start_coordinator", lambda _: None)
    monkeypatch.setattr(supervisor.ray, "kill", lambda _: None)
    monkeypatch.setattr(supervisor, "AutoscalerRequest", lambda _: SimpleNamespace(cancel=lambda: None))
    lease, reporter = Lease(tmp_path), Silent()
    lease.acquire()
    ready = SimpleNamespace(config=Config(), steps=3, shape="16 rows per step")
    with pytest.raises(AttributeError, match="foo"):
        supervisor.run_attempts(ready, RunDir(tmp_path), lease, reporter)
    assert "failure" not in [label for label, _ in reporter.notes]
    assert "foo" in json.loads((tmp_path / "result.json").read_text())["error"]
    lease.release()


def test_oom_of_one_rank_outweighs_errors_of_others():
    """In a memory probe with `fsdp`, the other rank's error is wrapped."""
    lost = TrainingError("one synthetic micro-batch did not pass the model: what?")
    verdict = decide_recovery(failed(lost, OutOfMemoryError("no room", 2)), None, 1, 3)
    assert isinstance(verdict, ReduceMicroBatch) and verdict.micro == 2
