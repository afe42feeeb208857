"""Classification of a failed attempt and the decision that follows, as pure functions."""

import pickle
import threading
from dataclasses import replace

import pytest
import ray.exceptions
import ray.train
from ray.train.v2._internal.exceptions import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from mmray.config import Cluster, Config
from mmray.engine.batch import BatchShape
from mmray.errors import (
    DataError,
    DeviceError,
    OutOfMemoryError,
    ResourceError,
    StorageError,
    TrainingError,
    is_device_error,
)
from mmray.storage.requests import TransientStorageError
from mmray.training.monitor import AttemptMonitor, HeartbeatRecord, RunProgress
from mmray.training.supervisor import (
    EVENTS,
    Failure,
    classify_failure,
    count_failures,
    decide_recovery,
    retry_shape,
)
from mmray.training.workers.backend import WorkerFailed
from mmray.training.workers.ray_backend import RayBackend
from tests.training.runs import Silent
from tests.training.scripted import ScriptedWorkers

ECC_ERROR = """CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call, \
so the stacktrace below might be incorrect.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
SHAPE = BatchShape(16, 4, world_size=2)
LOST = Failure("lost", RuntimeError("worker died"), step=7)


def raised(error, step=7, logged=True):
    return Failure("raised", error, step, logged)


def test_lost_worker_is_retried_up_to_max_failures():
    assert isinstance(decide_recovery(LOST, None, 1, 2), str)
    assert isinstance(decide_recovery(LOST, LOST, 2, 2), str)
    error = decide_recovery(LOST, LOST, 3, 2)
    assert isinstance(error, TrainingError) and "cluster.max_failures 2" in str(error)
    late = Failure("lost", ResourceError("the training workers did not start"), 0)
    assert decide_recovery(late, None, 4, 3).exit_code == 4


@pytest.mark.parametrize("kind", ["lost", "hung", "preempted"])
def test_lost_hung_and_preempted_restart(kind):
    decision = decide_recovery(Failure(kind, TrainingError("a node went."), 7), None, 1, 3)
    assert decision == f"{EVENTS[kind]} after step 7: a node went"


def test_repeated_user_error_is_raised_with_its_traceback():
    first = raised(KeyError("label"))
    assert isinstance(decide_recovery(first, None, 1, 3), str)
    error = KeyError("label")
    error.add_note('Traceback (most recent call last):\n  File "mine.py", line 3, in on_step\n')
    again = decide_recovery(raised(error), first, 2, 3)
    assert isinstance(again, TrainingError) and "KeyError: 'label'" in str(again)
    assert str(again).startswith("Traceback") and 'File "mine.py", line 3' in str(again)
    assert isinstance(decide_recovery(raised(KeyError("label"), 9), first, 2, 3), str)


def test_error_before_first_step_is_raised():
    error = decide_recovery(raised(ValueError("shape"), step=0, logged=False), None, 1, 3)
    assert isinstance(error, TrainingError) and "before the first logged step" in str(error)
    assert isinstance(decide_recovery(raised(ValueError("shape"), step=0), None, 1, 3), str)


@pytest.mark.parametrize("error", [DataError("17 bad rows"), TrainingError("NaN")])
def test_mmray_errors_are_final(error):
    assert decide_recovery(raised(error), None, 1, 3) is error


@pytest.mark.parametrize(
    ("trained", "stop_reason"), [(False, None), (True, "resize"), (True, "preempted")]
)
def test_storage_errors_are_retried_up_to_max_failures(trained, stop_reason):
    error = pickle.loads(pickle.dumps(StorageError("cannot read step-6: Input/output error")))
    errors, state = (
        (error, RuntimeError("Connection closed by peer")),
        {"trained": trained, "stop_reason": stop_reason},
    )
    # raised without Ray, and with it
    for failure in (failure_from(error, **state), failure_of(*errors, **state)):
        assert decide_recovery(failure, None, 1, 3) == f"storage failed after step 0: {error}"
        assert decide_recovery(failure, failure, 3, 3) == f"storage failed after step 0: {error}"
        assert decide_recovery(failure, failure, 4, 3) is error and error.exit_code == 3


@pytest.mark.parametrize("stop_reason", [None, "user"])
def test_failed_last_save_is_final(stop_reason):
    """A restart would repeat the steps that no checkpoint has, on the same storage."""
    error = StorageError("cannot write step-12: No space left on device")
    assert (
        decide_recovery(failure_of(error, trained=True, stop_reason=stop_reason), None, 1, 3)
        is error
    )


def test_oom_restarts_with_smaller_micro_batches():
    error = OutOfMemoryError("out of memory", SHAPE)
    assert decide_recovery(raised(error, step=0), None, 9, 0) == "out of memory"
    assert retry_shape(error) == SHAPE
    assert (
        decide_recovery(raised(OutOfMemoryError("a single row is too many")), None, 1, 3).exit_code
        == 3
    )
    again = pickle.loads(pickle.dumps(error))  # as it comes from a worker
    assert (str(again), again.retry_shape) == ("out of memory", SHAPE)


def test_failures_are_counted_since_last_checkpoint():
    failures, attempts = 0, 0
    while isinstance(decide_recovery(LOST, LOST, failures, 3), str):
        failures, attempts = count_failures(failures, LOST, progressed=False), attempts + 1
    assert attempts == 4
    assert count_failures(3, LOST, progressed=True) == 1
    assert count_failures(3, replace(LOST, kind="hung"), progressed=False) == 4


@pytest.mark.parametrize(
    "free", [replace(LOST, kind="preempted"), raised(OutOfMemoryError("out of memory", SHAPE))]
)
def test_preemptions_and_smaller_micro_batches_are_no_failures(free):
    assert count_failures(2, free, progressed=False) == 2
    assert (
        count_failures(2, raised(OutOfMemoryError("a single row is too many")), progressed=False)
        == 3
    )


@pytest.mark.parametrize(
    ("is_device", "message"),
    [
        (True, ECC_ERROR),
        # quoted by an error of mmray
        (True, f"one synthetic micro-batch did not pass the model: {ECC_ERROR}"),
        (True, "CUDA error: unspecified launch failure"),
        (True, "CUDA error: all CUDA-capable devices are busy or unavailable"),
        (True, "CUDA driver error: hardware stack error"),
        (True, "CUDA error: uncorrectable NVLink error detected during the execution"),
        (True, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
        (
            True,
            "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error (run with "
            "NCCL_DEBUG=INFO for details)",
        ),
        (
            True,
            "ncclUnhandledCudaError: Call to CUDA failed.\nLast error:\nCuda failure 214 "
            "'uncorrectable ECC error'",
        ),
        (True, "No CUDA GPUs are available"),
        (False, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (False, "CUDA error: out of memory"),
        (
            False,
            "ncclUnhandledCudaError: Call to CUDA failed.\nLast error:\nCuda failure 2 'out of "
            "memory'",
        ),
        (False, "CUDA error: device-side assert triggered"),
        (False, "CUDA error: an illegal memory access was encountered"),
        (
            False,
            "NCCL error: unhandled cuda error\nLast error:\nCuda failure 'an illegal memory access "
            "was encountered'",
        ),
        (False, "CUDA error: invalid device ordinal"),
        (False, "CUDA error: no kernel image is available for execution on the device"),
        (False, "NCCL communicator was aborted"),
        (False, "expected scalar type Half"),
    ],
)
def test_device_errors_differ_from_bugs_and_lack_of_memory(is_device, message):
    assert is_device_error(RuntimeError(message)) == is_device


def test_failed_device_restarts_even_before_first_step_and_twice():
    """The error of the bad device outweighs those of other ranks, which lost their peer."""
    bad = pickle.loads(
        pickle.dumps(
            DeviceError("CUDA error: uncorrectable ECC error (rank 1, GPU 3)", "0123456789")
        )
    )
    assert (bad.node, str(bad)) == (
        "0123456789",
        "CUDA error: uncorrectable ECC error (rank 1, GPU 3)",
    )
    failure = failure_of(
        RuntimeError("Connection closed by peer"), TrainingError("a collective failed"), bad
    )
    assert (failure.kind, failure.error) == ("device", bad)
    decision = decide_recovery(failure, failure, 1, 3)
    assert isinstance(decision, str) and decision.startswith("device failed after step 0: CUDA")
    assert count_failures(1, failure, progressed=False) == 2
    assert isinstance(decide_recovery(failure, failure, 4, 3), TrainingError)


def failure_from(error, shape=SHAPE, least=2, trained=False, stop_reason=None, heartbeats=()):
    """Classify an error of Ray Train in a run of 16 rows per step, micro-batches of 4, two
    workers.
    """
    config = Config(cluster=Cluster(workers=f"{least}-2" if least < 2 else 2))
    monitor = AttemptMonitor(config, shape, ScriptedWorkers(), Silent(), 12, 0, RunProgress())
    monitor.trained = trained
    monitor.stop_reason = stop_reason
    monitor.heartbeats = list(heartbeats)
    return classify_failure(error, monitor, RayBackend())


def failure_of(*errors, **settings):
    """Classify these errors of the workers."""
    return failure_from(ray.train.WorkerGroupError("failed", dict(enumerate(errors))), **settings)


def test_start_timeout_of_elastic_group_restarts_with_fewer_workers():
    """Another run took the resources after they were counted."""
    late = WorkerFailed("lost", ResourceError("2 training workers: not free within 600 s"))
    restart = decide_recovery(failure_from(late, least=1), None, 1, 3)
    assert restart == f"worker lost after step 0: {late}"


def test_failed_start_of_the_group_names_its_cause():
    """Only the first line of an error is logged, and that of Ray Train's names none."""
    failure = failure_from(
        ray.train.ControllerError(RuntimeError("the store of the group does not answer"))
    )
    cause = "Ray Train failed: the store of the group does not answer"
    assert decide_recovery(failure, None, 1, 3) == f"worker lost after step 0: {cause}"


GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "1000ms for"
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO} recv operation to complete"),
        RuntimeError(f"{GLOO} send operation to complete"),
        RuntimeError("wait timeout after 1000ms, keys: /0//1//cpu//0/1"),
        RuntimeError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
            "OpType=ALLREDUCE)"
        ),
        WorkerHealthCheckFailedError(
            "A worker health check failed.", ray.exceptions.ActorDiedError()
        ),
        WorkerHealthCheckTimeoutError("A worker health check timed out."),
    ],
)
def test_broken_collective_is_retried_even_before_first_step(error):
    """Loading a model may take longer than a collective waits; a worker may die meanwhile."""
    failure = failure_of(error)
    assert failure.kind == "lost"
    assert isinstance(decide_recovery(failure, None, 1, 3), str)
    assert failure_of(ValueError("a bug"), error).kind == "raised"


def test_lost_worker_is_named_with_its_host():
    """And not the rank that lost the connection to it."""
    heartbeats = [
        HeartbeatRecord(
            rank=rank,
            node="0123456789",
            host=f"gpu-{rank} at 10.0.0.{rank}",
            pid=4711 + rank,
            started_s=0.0,
            step=7,
            progress=7,
            where="step.py:12 in step",
            in_collective=True,
        )
        for rank in range(2)
    ]
    died = ray.exceptions.ActorDiedError()
    gone = WorkerHealthCheckFailedError("A worker health check failed.", died)
    failure = failure_of(RuntimeError("Connection closed by peer"), gone, heartbeats=heartbeats)
    restart = decide_recovery(failure, None, 1, 3)
    assert restart == (
        "worker lost after step 0: rank 1 (process 4712, node gpu-1 at 10.0.0.1): The actor died "
        "unexpectedly before finishing this task"
    )


def task_error(cause, traceback="ray::MapWorker()"):
    """What `ray.get` raises if a task raised this."""
    return ray.exceptions.RayTaskError("work", traceback, cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (ValueError("a bug"), "raised"),
        (DataError("17 bad rows"), "raised"),
        (NotImplementedError(threading.Lock()), "raised"),  # cannot be pickled
        (RuntimeError("Connection closed by peer"), "lost"),
        (ray.exceptions.ActorDiedError(), "lost"),
        (ray.exceptions.ObjectLostError("01", "", ""), "lost"),
        (TransientStorageError(5, "Input/output error"), "storage"),
    ],
)
def test_error_of_a_task_is_classified_by_its_cause(cause, kind):
    """RayTaskError is a RayError, whatever the task raised; a task may wait for another."""
    for error in (
        task_error(cause),
        task_error(task_error(cause), "ray::Coordinator()\nray::MapWorker()"),
    ):
        failure = failure_of(error)
        assert failure.kind == kind and not isinstance(failure.error, ray.exceptions.RayTaskError)
        assert failure.error.__notes__[-1].endswith("ray::MapWorker()")
        if kind == "raised" and isinstance(cause, ValueError):
            assert "ray::MapWorker()\nfailed before" in str(decide_recovery(failure, None, 1, 3))
        if isinstance(cause, DataError):
            assert decide_recovery(failure, None, 1, 3).exit_code == 5


def test_host_oom_restarts_with_smaller_micro_batches():
    killed = WorkerHealthCheckFailedError(
        "A check failed.", ray.exceptions.OutOfMemoryError("1 worker(s) killed\n...")
    )
    peer = RuntimeError("Connection closed by peer")
    failure = failure_of(killed, peer)
    assert retry_shape(failure.error) == BatchShape(16, 2, 2)
    assert decide_recovery(failure, None, 1, 3) == (
        "a node ran out of memory with micro-batches of 4 rows (1 worker(s) killed); "
        "continuing with 2 at a time"
    )
    alone = failure_of(killed, peer, shape=BatchShape(16, 1, 2))
    assert isinstance(alone.error, OutOfMemoryError) and retry_shape(alone.error) is None
    assert isinstance(decide_recovery(alone, None, 1, 3), str)  # as after any lost worker


@pytest.mark.parametrize(
    "other",
    [
        RuntimeError("NCCL communicator was aborted"),
        # in a memory probe with `fsdp`
        TrainingError("one synthetic micro-batch did not pass the model: what?"),
    ],
)
def test_oom_of_one_rank_outweighs_errors_of_others(other):
    oom = OutOfMemoryError("NCCL error in: ncclUnhandledCudaError: out of memory", SHAPE)
    failure = failure_of(other, oom)
    assert failure.error is oom and decide_recovery(failure, None, 1, 3) == str(oom)
