"""The Ray Data stream: a prepared set as blocks of model inputs, in sample order, split between the training workers.

Data actors on CPU nodes read and decode (reader.py) the rows that order.py selects. A block has the rows of one rank
for several consecutive steps, or a part of its rows for one step, so its size is about the same for each batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ray
import ray.data
import ray.train

from mmray.data.stream.decode_actor import DecodeActor
from mmray.data.stream.order import Blocks, ResumePoint, SamplePlan
from mmray.data.stream.reader import Block, RowReader

BLOCKS_PER_TASK = 1000
MAX_INLINE_BLOCKS = 1000  # listing takes 0.5 s of the driver; a task needs a process that imports Ray Data
TOKEN_BYTES = 4
# Tasks queued at an actor. With Ray's default of two, actors were idle for 8 % of the time on busy cores. A queued task
# is only a block number, so it needs no memory.
IN_FLIGHT = 4
OBJECT_STORE_FRACTION = 0.3  # Ray Data fills half of an object store with blocks, and beyond 80 % Ray spills


def block_shape(plan: SamplePlan, row_bytes: int, block_mb: float) -> tuple[int, int]:
    """Return (steps per block, blocks per step of one rank); one of the two is 1.

    A block has about `block_mb`, or down to a quarter of it if the rows of a step are not divisible. It is larger if
    there is no divisor (a prime number of rows).
    """
    fitting = max(1, int(block_mb * 1e6 / row_bytes))  # rows
    if fitting >= plan.rank_rows:
        return max(1, min(fitting // plan.rank_rows, plan.steps)), 1
    fewest = -(-plan.rank_rows // fitting)
    return 1, next((parts for parts in range(fewest, 4 * fewest) if plan.rank_rows % parts == 0), 1)


def max_block_mb(store_bytes: float, world: int) -> float:
    """Return the largest block size for which two blocks per rank fit in `store_bytes` without spilling."""
    return OBJECT_STORE_FRACTION * store_bytes / 1e6 / (2 * world)


def block_ids_dataset(count: int) -> ray.data.Dataset:
    """Return block numbers 0..count-1, one in each block; datasets derived from it keep the order.

    A short list is inlined, so that no task has to start before the first block. A long one comes from coarse tasks.
    """
    numbers: ray.data.Dataset
    if is_short := count <= MAX_INLINE_BLOCKS:
        numbers = ray.data.from_items([{"id": number} for number in range(count)], override_num_blocks=count)
    else:
        numbers = ray.data.range(count, override_num_blocks=-(-count // BLOCKS_PER_TASK))
    numbers.context.execution_options.preserve_order = True
    return numbers if is_short else numbers.repartition(target_num_rows_per_block=1, strict=True)


def stream_dataset(
    actor: type, arguments: tuple[Any, ...], count: int, workers: int, labels: dict[str, str] | None = None
) -> ray.data.Dataset:
    """Return `count` blocks in order, from `workers` actors of one CPU each, on nodes with these labels."""
    dataset = block_ids_dataset(count).map_batches(
        actor,
        fn_constructor_args=arguments,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, count), max_tasks_in_flight_per_actor=IN_FLIGHT),
        num_cpus=1,
    )
    dataset.context.execution_options.label_selector = labels
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    return dataset


class StreamDataConfig(ray.train.DataConfig):
    """Builds the stream of one worker group from its start; Ray Train calls `configure`.

    Data actors import only what it pickles, which excludes torch. `board` is the coordinator actor that receives
    messages for the user.
    """

    def __init__(
        self,
        start: ResumePoint,
        reader: RowReader,
        workers: int,
        block_mb: float,
        labels: dict[str, str] | None = None,
        board: Any = None,
    ):
        super().__init__()
        self.start, self.reader, self.workers, self.block_mb = start, reader, workers, block_mb
        self.labels, self.board = labels, board

    def configure(self, datasets: dict[str, Any], world_size: int, *_: Any, **__: Any) -> list[dict[str, Any]]:
        (name,) = datasets
        assert world_size == self.start.plan.world, "the worker group must have the size of its plan"
        row_bytes = 3 * self.reader.inputs.image_side**2 + TOKEN_BYTES * self.reader.inputs.max_tokens
        most_mb = max_block_mb(ray.cluster_resources()["object_store_memory"], world_size)
        shape = block_shape(self.start.plan, row_bytes, min(self.block_mb, most_mb))
        blocks = Blocks(self.start.plan, self.start.step, *shape)
        splits = self.dataset(blocks).streaming_split(world_size, equal=True)
        return [{name: split} for split in splits]

    def dataset(self, blocks: Blocks) -> ray.data.Dataset:
        """Return the dataset of decoded blocks, in order."""
        return stream_dataset(DecodeActor, (self.reader, blocks, self.board), blocks.count, self.workers, self.labels)

    def datasets(self) -> dict[str, Callable[[], Any]]:
        """Return the `datasets` of a TorchTrainer: a name only, because `configure` builds the dataset."""
        return {"train": lambda: None}


def iter_blocks(split: Any) -> Iterable[Block]:
    """Yield the blocks of one rank in order; a thread of Ray fetches the next one.

    Only one block is prefetched, because Ray would not return the first before all prefetched blocks are ready.
    """
    blocks: Iterable[Block] = split.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)
    return blocks
