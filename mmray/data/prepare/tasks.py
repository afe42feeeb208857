"""Many small tasks of prepare, on Ray Data or in processes of this machine: pack a chunk, hash a
shard.
"""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mmray.cluster import connect
from mmray.data.images.decode import keep_image_memory
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.errors import MmrayError, ResourceError, only_errors
from mmray.machine import cores
from mmray.ordered_map import OrderedMap
from mmray.processes import ChildPool
from mmray.storage.paths import AnyPath, file_size, write_atomic

# Most tasks, of which each takes 11 ms and 4 KB of the driver: with more items, several share one.
MAX_TASKS = 1_000
MAX_TASKS_PER_CPU = 4  # of a larger cluster; with 8, 1,000 CPUs would wait for the driver
MAX_TASKS_IF_GROWING = 50_000  # of a cluster to which nodes can be added
TASKS_PER_NEW_CORE = 4  # for which nodes are requested, as many as the cluster can add
TASKS_PER_CORE = 10
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
    """Yield what a picklable function returns for each item, in tasks of Ray Data (in any order)
    if Ray is initialized, otherwise in child processes.

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
    """Items and results are pickled."""
    import ray.data
    import ray.exceptions

    from mmray.cluster import placement
    from mmray.cluster.waiting import wait_for_data_cpu

    selector = wait_for_data_cpu().label_selector
    context = ray.data.DataContext.get_current().copy()  # the user may run Ray Data, too
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.label_selector = selector or None
    rows = [{"item": pickle.dumps(item)} for item in items]
    num_cpus = int(ray.cluster_resources().get("CPU", 0))
    can_grow = bool(placement.autoscaling_pools())
    most = max(MAX_TASKS, MAX_TASKS_PER_CPU * num_cpus)
    tasks = min(len(rows), MAX_TASKS_IF_GROWING if can_grow else most)
    local_cores = placement.available_cores_if_local()
    # A worker process costs two core-seconds to start, so there are no more of them than cores.
    # With many tasks there is one more, because each worker waits 0.2 s for its next task. None:
    # one for each CPU of the cluster.
    concurrency = (
        min(tasks, local_cores + (tasks >= TASKS_PER_CORE * local_cores)) if local_cores else None
    )
    num_gpus = int(ray.cluster_resources().get("GPU", 0)) if runs_model else 0
    call: Callable[..., Any] = partial(_run_batch, run_item=run_item)
    # GPU actors, because a task would load the model again.
    options: dict[str, Any] = {"max_retries": MAX_RETRIES, "concurrency": concurrency}
    if num_gpus:
        call = _BatchActor
        options = {
            "fn_constructor_args": (run_item,),
            "num_gpus": 1,
            "concurrency": (1, min(tasks, num_gpus)),
        }
    # map_batches deprecates max_retries but has no other way to set it
    with ray.data.DataContext.current(context), warnings.catch_warnings(), only_errors("ray.data"):
        warnings.simplefilter("ignore")
        dataset = ray.data.from_items(rows, override_num_blocks=tasks)
        results = dataset.map_batches(call, batch_size=1, batch_format="numpy", **options)
    work = run_item.args[0]
    function = work.func if isinstance(work, partial) else work
    results.set_name(f"prepare {function.__name__}")  # for Ray's dashboard
    # Ray Data would add a node at a time, because its tasks have no output until they end.
    autoscaler = placement.AutoscalerRequest(f"mmray-{os.urandom(4).hex()}")
    num_cores = -(-tasks // TASKS_PER_NEW_CORE) if can_grow else 0
    try:
        autoscaler.request({"CPU": 1.0}, selector, num_cores)
        with only_errors("ray.data"):
            for row in results.iter_rows():
                autoscaler.request({"CPU": 1.0}, selector, num_cores)
                yield pickle.loads(row["result"])
    except ray.exceptions.RayTaskError:  # also a RayError; the task could not be started
        raise
    except ray.exceptions.RayError as error:
        raise ResourceError(f"prepare workers died: {error}\n{hint}") from error
    finally:
        autoscaler.cancel()


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
            "child process, so the node probably ran out of memory: lower "
            f"prepare.rows_per_shard. {RESUME_HINT}"
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


def _run_batch(batch: dict[str, np.ndarray], run_item: Callable[..., Any]) -> dict[str, np.ndarray]:
    """Ray task."""
    return {"result": np.array([pickle.dumps(run_item(pickle.loads(batch["item"][0])))], object)}


class _BatchActor:
    """Ray actor."""

    def __init__(self, run_item: Callable[..., Any]) -> None:
        self._run_item = run_item

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return _run_batch(batch, self._run_item)


def _run_item(
    work: Callable[[Item], Result], hint: str, item: Item, *_: object
) -> Result | MmrayError:
    """Return the result or the error of `work(item)`: Ray would retry a task that raises."""
    keep_image_memory()
    try:
        return work(item)
    except MmrayError as error:
        return type(error)(str(error))  # without its causes, which may not be picklable
    except Exception as error:  # noqa: BLE001 - the driver raises it
        cause = traceback.format_exception_only(error)[-1].strip()
        message = f"prepare failed: {cause}. {hint}\n{traceback.format_exc().rstrip()}"
        return MmrayError(message)
