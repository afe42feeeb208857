"""One Ray Data job of many small tasks, each an item that is JSON; what prepare.py starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import orjson
import ray.data

from mmray.cluster.placement import physical_cores_if_local

MAX_TASKS = 2000  # a Ray task each; of more items, several go to a task
TASKS_PER_CORE = 10
# Left alone, Ray starts a task again for ever whose worker dies. Of a death it cannot say the cause: an image gets two
# tries in the worker and one in a child of it; after that it is named, and only a lost node is left as a cause.
MAX_RETRIES, MAX_RETRIES_SANDBOXED = 1, 3

Result = dict[str, Any]
Work = Callable[..., dict[str, np.ndarray]]


def map_tasks(work: Work, items: Sequence[Any], retries: int) -> Generator[Result, None, None]:
    """Answers of `work` (a batch of one item as JSON in, columns of one row out) as they come, in no order.

    Raises RayError once a task has killed its worker `retries` times more.
    """
    if not items:
        return
    rows = [{"item": orjson.dumps(item).decode()} for item in items]
    tasks = min(len(rows), MAX_TASKS)
    dataset = ray.data.from_items(rows, override_num_blocks=tasks)
    with warnings.catch_warnings():  # Ray 2.60 has no other way to say max_retries, and means to drop this one
        warnings.simplefilter("ignore")
        results = dataset.map_batches(
            work, batch_size=1, batch_format="numpy", max_retries=retries, concurrency=_max_concurrency(tasks)
        )
    yield from results.iter_rows()


def _max_concurrency(count: int) -> int | None:
    """How many of so many tasks run side by side; None: as many as Ray has CPUs for.

    A process costs two seconds of a core before it does anything, so that more of them than there are cores only take
    time; but for one where the tasks are many: it works while another waits, a fifth of a second, for its next.
    """
    cores = physical_cores_if_local()
    if cores is None:
        return None
    return min(count, cores if count < TASKS_PER_CORE * cores else cores + 1)


def decode_item(batch: dict[str, np.ndarray]) -> Any:
    """The item of a task."""
    return orjson.loads(str(batch["item"][0]))


def encode_result(values: Result) -> dict[str, np.ndarray]:
    """The columns that a task gives back."""
    return {name: np.array([value]) for name, value in values.items()}
