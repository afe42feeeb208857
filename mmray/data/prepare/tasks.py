"""Many small tasks of prepare, on Ray or in processes of this machine: pack a chunk, hash a shard.

Plain tasks cost the driver 2 ms of CPU each, those of Ray Data 26 ms.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from mmray.cluster import connect
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.errors import MmrayError, ResourceError
from mmray.machine import cores
from mmray.ordered_map import OrderedMap
from mmray.processes import ChildPool
from mmray.storage.paths import AnyPath, file_size, write_atomic

if TYPE_CHECKING:
    from mmray.cluster.capacity import LabelSelector

TASKS_PER_NEW_CORE = 4  # for which nodes are requested, as many as the cluster can add
CHECK_S = 5.0  # interval of counting the CPUs of the cluster
CANCEL_S = 10.0  # longest wait for tasks that were cancelled
# per item whose worker dies; from the second on, images are decoded in a child process first
MAX_ATTEMPTS = 3
# Ray retries a task forever if its worker dies. This bounds tasks that die before they start an
# item, and must allow the attempts of several items in one task.
MAX_RETRIES = 50
ATTEMPT_SUFFIX = ".attempt"
RESUME_HINT = "Fix it and rerun the same command to resume; finished shards are kept."

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")


def map_tasks(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    runs_model: bool = False,
    hint: str = RESUME_HINT,
) -> Generator[Result, None, None]:
    """Run a function on many items in parallel, on Ray if it is initialized, otherwise in child
    processes.

    Args:
        work: Picklable function, called with one item in a task.

    Yields:
        What `work` returned for each item; on Ray in any order.

    Raises:
        MmrayError: A call failed, or workers died too often.
    """
    if not items:
        return
    run = _map_on_ray if connect.is_connected() else _map_in_processes
    with closing(run(partial(_run_item, work, hint), items, runs_model, hint)) as results:
        for result in results:
            if isinstance(result, MmrayError):
                raise result
            yield result


def _map_in_processes(
    run_item: Callable[..., Any], items: Sequence[Any], runs_model: bool, hint: str
) -> Generator[Any, None, None]:
    def on_crash(crashes: int) -> None:
        if crashes > MAX_RETRIES:
            raise ResourceError(
                f"prepare processes died {MAX_RETRIES} times; check the memory. {hint}"
            )

    processes = 1 if runs_model else min(len(items), cores())
    pool: ChildPool[Any, Any] = ChildPool(run_item, processes, 2 * processes, on_crash)
    with closing(OrderedMap(pool, items)) as results:
        yield from results


def _map_on_ray(
    run_item: partial[Any], items: Sequence[Any], runs_model: bool, hint: str
) -> Generator[Any, None, None]:
    import ray
    import ray.exceptions

    from mmray.cluster import placement
    from mmray.cluster.waiting import wait_for_data_cpu

    selector = wait_for_data_cpu().label_selector
    num_gpus = int(ray.cluster_resources().get("GPU", 0)) if runs_model else 0
    num_cores = -(-len(items) // TASKS_PER_NEW_CORE) if placement.autoscaling_pools() else 0
    autoscaler = placement.AutoscalerRequest(f"mmray-{os.urandom(4).hex()}")
    calls = _RayCalls(run_item, items)
    last_check_s = float("-inf")
    try:
        if num_gpus:
            calls.add_actors(min(num_gpus, len(items)))
        for _ in items:
            result = None
            while result is None:
                # Nodes that join get tasks, too.
                if not num_gpus and time.monotonic() - last_check_s > CHECK_S:
                    autoscaler.request({"CPU": 1.0}, selector, num_cores)
                    calls.add_tasks(placement.num_cpus(selector), selector)
                    last_check_s = time.monotonic()
                result = calls.take_result(CHECK_S)
            yield pickle.loads(result)
    except ray.exceptions.RayTaskError:  # also a RayError; the task could not be started
        raise
    except ray.exceptions.RayError as error:
        raise ResourceError(f"prepare workers died: {error}\n{hint}") from error
    finally:
        calls.cancel()
        autoscaler.cancel()


class _RayCalls:
    """Calls of a function with each item, in Ray tasks or in actors.

    There are at most as many at once as `add_tasks` and `add_actors` have added.

    Args:
        run_item: Called with an item.
    """

    def __init__(self, run_item: partial[Any], items: Sequence[Any]) -> None:
        import ray

        work = run_item.args[0]
        function = work.func if isinstance(work, partial) else work
        self._name = f"prepare {function.__name__}"  # for Ray's dashboard
        self._run_item = ray.put(run_item)
        self._unsent = iter(items)
        self._running: dict[Future[bytes | None], Any] = {}
        self._done = SimpleQueue[tuple[Any, Future[bytes | None]]]()
        self._num_tasks = 0
        self._actors: list[Any] = []

    def add_tasks(self, count: int, selector: LabelSelector) -> None:
        """Run `count` tasks at once, on the nodes of a label selector."""
        import ray

        task = ray.remote(_run).options(
            name=self._name,
            num_cpus=1,
            max_retries=MAX_RETRIES,
            label_selector=selector or None,
        )
        for _ in range(self._num_tasks, count):
            self._start(task)
        self._num_tasks = max(self._num_tasks, count)

    def add_actors(self, count: int) -> None:
        """Run items in actors with a GPU each, because a task would load the model again."""
        import ray

        resources = {"num_gpus": 1, "num_cpus": 0}
        retries = {"max_restarts": MAX_RETRIES, "max_task_retries": MAX_RETRIES}
        for _ in range(count):
            actor: Any = ray.remote(_Actor).options(**resources, **retries).remote()
            self._actors.append(actor)
            # Those that wait for a GPU get no items.
            self._call(actor.run, actor.load.remote())

    def _start(self, remote: Any) -> None:
        for item in islice(self._unsent, 1):
            self._call(remote, remote.remote(self._run_item, item))

    def _call(self, remote: Any, reference: Any) -> None:
        future = reference.future()
        self._running[future] = reference
        future.add_done_callback(lambda _: self._done.put((remote, future)))

    def take_result(self, timeout_s: float) -> bytes | None:
        """Return a pickled result, and start the next call; None if there is no result yet."""
        try:
            remote, future = self._done.get(timeout=timeout_s)
        except Empty:
            return None
        del self._running[future]
        result = future.result()
        self._start(remote)
        return result

    def cancel(self) -> None:
        """Interrupt the calls that run, and end the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        references = list(self._running.values())
        if references and not self._actors:
            for reference in references:
                ray.cancel(reference)
            ray.wait(references, num_returns=len(references), timeout=CANCEL_S)


def _run(run_item: Callable[..., Any], item: Any) -> bytes:
    """Ray task; pickles the result, because Ray would return read-only arrays."""
    return pickle.dumps(run_item(item))


class _Actor:
    """Ray actor."""

    def load(self) -> None:
        """Return when the actor has started."""

    def run(self, run_item: Callable[..., Any], item: Any) -> bytes:
        return _run(run_item, item)


def run_with_crash_limit(
    work: Callable[[SubprocessDecoder | None], T], out: AnyPath, name: str, item_name: str
) -> T:
    """Run a task that may kill its process, at most MAX_ATTEMPTS (3) times over all processes.

    The file `name`.attempt counts the attempts.

    Args:
        work: Called with None at the first attempt. If this item has killed a process before, or
            that call raises MemoryError, called with a SubprocessDecoder instead. It must then
            call the decoder's `check(data, max_pixels)` for each image, and `check_media(data,
            kind, max_pixels)` for each audio or video, before it decodes the data itself. These
            decode in a child process, and raise BadImage for bad data and if the data crash it.
        name: Path of the attempt file in it, without the suffix; it identifies the item.
        item_name: What is processed, for the message.

    Returns:
        The result of `work`.

    Raises:
        ResourceError: The item has killed its process MAX_ATTEMPTS (3) times.
        MemoryError: `work` raised it although it had a decoder; other errors of `work` are raised
            as they are.
    """
    file = out / f"{name}{ATTEMPT_SUFFIX}"
    attempts = int(file.read_bytes()) if file_size(file) else 0
    if attempts == MAX_ATTEMPTS:
        file.unlink()
        raise ResourceError(
            f"a prepare worker died {attempts} times at {item_name}. Images were decoded in a "
            "child process, so the node probably ran out of memory: lower prepare.rows_per_shard, "
            f"or split large tars. {RESUME_HINT}"
        )
    write_atomic(file, str(attempts + 1))
    # its child process starts with the first image
    with closing(SubprocessDecoder()) as subprocess_decoder:
        try:
            return work(subprocess_decoder if attempts else None)
        except MemoryError:
            if attempts:
                raise
            return work(subprocess_decoder)
        finally:
            file.unlink()


def _run_item(
    work: Callable[[Item], Result], hint: str, item: Item, *_: object
) -> Result | MmrayError:
    """Return the result or the error of `work(item)`: Ray would retry a task that raises."""
    try:
        return work(item)
    except MmrayError as error:
        return type(error)(str(error))  # without its causes, which may not be picklable
    except Exception as error:  # noqa: BLE001 - the driver raises it
        cause = traceback.format_exception_only(error)[-1].strip()
        message = f"prepare failed: {cause}. {hint}\n{traceback.format_exc().rstrip()}"
        return MmrayError(message)
