"""One Ray Data job of many small tasks, each an item that is JSON; what prepare.py starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
import ray.data

MAX_BLOCKS = 2000  # a Ray task each; of more items, several go to a task

Answer = dict[str, Any]


def run_tasks(work: Callable[..., dict[str, np.ndarray]], items: Sequence[Any], retries: int) -> Iterator[Answer]:
    """Answers of `work` (a batch of one item as JSON in, columns of one row out) as they come, in no order.

    Raises RayError once a task has killed its worker `retries` times more.
    """
    if not items:
        return
    rows = [{"item": orjson.dumps(item).decode()} for item in items]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), MAX_BLOCKS))
    with warnings.catch_warnings():  # Ray 2.60 has no other way to say max_retries, and means to drop this one
        warnings.simplefilter("ignore")
        results = dataset.map_batches(work, batch_size=1, batch_format="numpy", max_retries=retries)
    yield from results.iter_rows()


def item_of(batch: dict[str, np.ndarray]) -> Any:
    """The item of a task."""
    return orjson.loads(str(batch["item"][0]))


def answer_of(values: Answer) -> dict[str, np.ndarray]:
    """The columns that a task gives back."""
    return {name: np.array([value]) for name, value in values.items()}
