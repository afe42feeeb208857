"""Faults injected by user callbacks."""

import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from mmray.engine.batch import BatchShape
from mmray.errors import OutOfMemoryError
from tests.polling import wait_until


def _first_time(name, step, at, rank=1):
    """Whether this rank should fail now: once per folder named in MMRAY_TEST_FAULTS."""
    mark = Path(os.environ["MMRAY_TEST_FAULTS"]) / name
    # a process without a group is the only worker
    if step != at or (dist.is_initialized() and dist.get_rank() != rank) or mark.exists():
        return False
    mark.touch()
    return True


def _once(name, at, act):
    """A callback that acts on rank 1 after step `at`."""

    def on_step(self, step, metrics):
        if _first_time(name, step, at):
            act()

    return type(name, (), {"on_step": on_step})


def _out_of_memory():
    shape = BatchShape(16, 2, world_size=2)
    raise OutOfMemoryError("out of memory in the optimizer at step 6", shape)


KillRankOneOnce = _once("killed", 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
HangOnce = _once("hung", 5, lambda: time.sleep(1e6))
AwaitKillOnce = _once("awaited-kill", 7, lambda: time.sleep(1e6))
StopOnce = _once("stopped", 8, lambda: os.kill(os.getpid(), signal.SIGSTOP))
OomOnRankOneOnce = _once("oom", 5, _out_of_memory)  # outside the recoverable part of a step


ECC_ERROR = """CUDA error: uncorrectable ECC error encountered
Search for `cudaErrorECCUncorrectable' in \
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
CUDA kernel errors might be asynchronously reported at some other API call, \
so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def _fail_device():
    raise RuntimeError(ECC_ERROR)


FailDeviceOnce = _once("device", 8, _fail_device)


class BadNode:
    """The node that first runs step 5 has a bad device: this step always fails there."""

    def on_step(self, step, metrics):
        import ray

        if step == 5:
            mark, node = (
                Path(os.environ["MMRAY_TEST_FAULTS"]) / "bad-node",
                ray.get_runtime_context().get_node_id(),
            )
            if not mark.exists():
                mark.write_text(node)
            if mark.read_text() == node:
                _fail_device()


class RaiseAtStepThree:
    """A bug in a user's callback."""

    def on_step(self, step, metrics):
        if step == 3:
            raise KeyError("label")


class Raise:
    """A bug in a user's callback, in each attempt."""

    def on_step(self, step, metrics):
        raise RuntimeError("raised by the test")


class Print:
    """A user's callback that prints on each rank."""

    def on_step(self, step, metrics):
        print(f"printed at step {step}")


def _sleeping(name, seconds):
    """A callback that makes each step this much slower."""
    return type(name, (), {"on_step": lambda self, step, metrics: time.sleep(seconds)})


Slowly = _sleeping("Slowly", 0.4)  # a stop request arrives between steps
Slower = _sleeping("Slower", 1.0)  # a command can start before the last step


class AwaitDriver:
    """Wait after step 2 until the driver has written the file `acted`."""

    def on_step(self, step, metrics):
        if step == 2:
            wait_until((Path(os.environ["MMRAY_TEST_FAULTS"]) / "acted").exists, 600)


class AwaitStop:
    """Wait after step 7 until the driver's request to stop has reached this process: the run stops
    after step 8.
    """

    steps = (7,)
    limit_s = 60

    def on_step(self, step, metrics):
        if step in self.steps:
            frame = sys._getframe()
            while not isinstance(frame.f_locals.get("stop"), threading.Event):
                frame = frame.f_back
            assert frame.f_locals["stop"].wait(self.limit_s)


class AwaitStops(AwaitStop):
    """As AwaitStop after the second step of each attempt: the run stops after steps 3, 6 and 9.

    Before it waits it creates the file `awaits-stop-N`.
    """

    steps = (2, 5, 8)
    limit_s = 300

    def on_step(self, step, metrics):
        if step in self.steps:
            (Path(os.environ["MMRAY_TEST_FAULTS"]) / f"awaits-stop-{step}").touch()
        super().on_step(step, metrics)


class StorageAway:
    """An empty folder replaces the storage of runs, as by an unmount, from step 4 to step 8 and
    from step 10 on.
    """

    def __init__(self):
        # In this process of the worker. Between its check of the folder and its first write,
        # TensorBoard would create a folder that vanishes.
        mock.patch("torch.utils.tensorboard.SummaryWriter").start()
        mock.patch("mmray.storage.outage.RETRY_EVERY_S", 0.1).start()
        # No access may succeed between the two outages, which then are one with a line a minute.
        mock.patch("mmray.storage.outage.LOG_EVERY_S", 0.1).start()

    def on_step(self, step, metrics):
        if step in (4, 10):
            move_storage(away=True)
            (Path(os.environ["MMRAY_TEST_FAULTS"]) / f"away-at-{step}").touch()
        elif step == 8:
            move_storage(away=False)


def move_storage(away):
    """Move the folder `runs` next to MMRAY_TEST_FAULTS away, or back."""
    storage = Path(os.environ["MMRAY_TEST_FAULTS"]).parent / "runs"
    elsewhere = storage.with_name("away")
    if away:
        storage.rename(elsewhere)
        storage.mkdir()
    else:
        assert not list(storage.iterdir())
        storage.rmdir()
        elsewhere.rename(storage)


class FullDiskAtStepSix:
    """Limit files of rank 0, its log included, to 2 KiB while the checkpoint of step 6 is
    written.
    """

    def on_step(self, step, metrics):
        if step in (5, 8) and not (dist.is_initialized() and dist.get_rank()):
            time.sleep(3.0 * (step == 8))  # until the write in the background has failed
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048 if step == 5 else hard, hard))


class KillAtRandom:
    """Send SIGKILL to a random rank at a random moment, once per folder in MMRAY_TEST_FAULTS."""

    def __init__(self):
        mark = Path(os.environ["MMRAY_TEST_FAULTS"]) / "killed-at-random"
        chosen = random.Random(f"{mark.parent}{len(list(mark.parent.iterdir()))}")
        if dist.get_rank() == chosen.randrange(dist.get_world_size()) and not mark.exists():
            timer = threading.Timer(chosen.uniform(0.0, 5.0), self._kill, (mark,))
            timer.daemon = True
            timer.start()

    def _kill(self, mark):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def on_step(self, step, metrics):
        time.sleep(0.4)
