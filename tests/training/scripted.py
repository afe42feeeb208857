"""A backend without processes: each attempt of a run ends as a script of the test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ray.exceptions

from mmray.engine.batch import BatchShape
from mmray.engine.worker_context import TRAINING
from mmray.errors import DeviceError, MmrayError, OutOfMemoryError
from mmray.training.monitor import Workers
from mmray.training.resolve import ResolvedRun
from mmray.training.run_dir import RunDir
from mmray.training.supervisor import Supervisor
from mmray.training.workers.backend import WorkerFailed
from tests.training.runs import Silent, config

HEARTBEAT = {
    "node": "node-1",
    "host": "h",
    "pid": 0,
    "started_s": 0.0,
    "step": 1,
    "progress": 1,
    "where": "x",
}
# What an attempt does: returns the outcome of its workers, or raises why they failed.
Act = Callable[["ScriptedWorkers"], dict[str, Any]]


class ScriptedWorkers(Workers):
    """The workers of an attempt, which have started and trained."""

    def __init__(self, attempt: Any = None, act: Act | None = None) -> None:
        self.attempt = attempt
        self.act = act
        self.stop_requested = False
        self.data_state = ""  # of the processes that read and decode
        self.draining: dict[str, float] = {}  # nodes that will be preempted
        self.num_more = 0  # workers that fit in addition
        self.messages: list[dict[str, Any]] = [{"stage": TRAINING}]

    def wait(self, poll: Callable[[], None]) -> dict[str, Any]:
        self.poll = poll
        poll()
        assert self.act is not None
        return self.act(self)

    def drain(self, num_received: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        world = self.attempt.resolved.batch_shape.world_size
        ranks = [
            HEARTBEAT | {"rank": rank, "in_collective": False, "state": "training"}
            for rank in range(world)
        ]
        return self.messages[num_received:], ranks

    def request(self, name: str) -> None:
        self.stop_requested |= name == "stop"

    def kill(self, heartbeats: Any) -> None:
        pass

    def draining_nodes(self) -> dict[str, float]:
        return self.draining

    def num_more_workers(self) -> int:
        return self.num_more

    def describe_data(self) -> str:
        return self.data_state

    def close(self) -> None:
        pass


class ScriptedBackend:
    """Starts scripted workers; `worlds` has the number of workers of each attempt (default 2)."""

    errors = RuntimeError, ray.exceptions.RayError, MmrayError

    def __init__(self, acts: Iterable[Act], worlds: Iterable[int] = ()) -> None:
        self.acts, self.worlds = iter(acts), iter(worlds)
        self.shapes: list[BatchShape] = []  # of the attempts that were started
        self.excludes_nodes, self.excluded = True, list[str]()

    def check(self, config: Any, reporter: Any) -> None:
        pass

    def resolve(self, config: Any) -> Any:
        return config

    def check_inputs(self, resolved: Any) -> None:
        pass

    def num_local(self, device: str) -> int | None:
        return None

    def choose_world_size(self, config: Any) -> int:
        return next(self.worlds, 2)

    def start(self, attempt: Any) -> ScriptedWorkers:
        self.shapes.append(attempt.resolved.batch_shape)
        return ScriptedWorkers(attempt, next(self.acts))

    def exclude_node(self, config: Any, node: str) -> bool:
        self.excluded.append(node)
        return self.excludes_nodes

    def find_cause(self, error: BaseException, monitor: Any) -> WorkerFailed:
        """The cause of a RuntimeError is the error that the worker raised."""
        cause = error.__cause__ or error
        kind = "device" if isinstance(cause, DeviceError) else "lost"
        return WorkerFailed("raised" if isinstance(cause, OutOfMemoryError) else kind, cause)


def supervised(folder: Any, lease: Any, backend: ScriptedBackend, **settings: Any) -> Supervisor:
    """The supervisor of a run of 3 steps of 64 rows; `settings` change its config."""
    made = config("none", folder, "one")
    resolved = ResolvedRun(
        made.model_copy(update=settings), None, None, "", BatchShape(64, 32, 2), 3, {}
    )
    return Supervisor(resolved, RunDir(folder), lease, Silent(), backend)


def finish(workers: ScriptedWorkers) -> dict[str, Any]:
    """All steps are taken."""
    return {"status": "finished", "steps": 3}


def fail(error: Exception) -> Act:
    """The workers end with this error."""

    def act(workers: ScriptedWorkers) -> dict[str, Any]:
        workers.messages.append({"step": 2})
        workers.poll()
        raise error

    return act


def fail_with(cause: Exception) -> Act:
    """Rank 1 raises this error, which ends the group."""
    error = RuntimeError("the worker group failed")
    error.__cause__ = cause
    return fail(error)
