"""The stream: a prepared set as blocks of model inputs, in the run's order, dealt to the training workers.

The sample's journey: Ray Data actors on CPU nodes read and decode (data/reader.py) what the order names (data/order.py)
and Ray deals the blocks to the ranks in turn. This file is the room's composer: the only one that touches Ray.

A block is one rank's rows of several consecutive steps, or a part of those of one, so that it is some 24 MB whatever
the batch: one of 19 MB costs 28 ms of processors beside its rows' own (`mmray bench loader`), much of it however small
it is, and object stores hold few large ones. Of the coordinator's part, half is the account of resources that it draws
up anew at each dispatch, and that keeps blocks from being spilled.
One execution spans all remaining epochs: no stall at an epoch's end. The plan is a list of block numbers, of many a
`ray.data.range` in coarse tasks, flat in time and memory up to millions of blocks.
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
MAX_INLINE_BLOCKS = 1000  # half a second of the driver, where a task is a process that imports Ray Data
TOKEN_BYTES = 4
# Blocks that an actor has or waits with. With two, Ray's default, it stood idle for 8 % of the time: on busy cores the
# coordinator does not get round to it within a block. What waits is a number: nothing is made the earlier.
IN_FLIGHT = 4
OBJECT_STORE_FRACTION = (
    0.3  # of an object store: Ray Data fills half of it with blocks made ahead, and beyond 80 % Ray spills
)


def block_shape(plan: SamplePlan, row_bytes: int, block_mb: float) -> tuple[int, int]:
    """(steps in a block, blocks that a step of one rank is cut into); one of the two is 1.

    A block is of about `block_mb`, or down to a quarter of it where the rows of a step divide no better; it is larger
    where they do not divide (a prime number of them).
    """
    fitting = max(1, int(block_mb * 1e6 / row_bytes))  # rows
    if fitting >= plan.rank_rows:
        return max(1, min(fitting // plan.rank_rows, plan.steps)), 1
    fewest = -(-plan.rank_rows // fitting)
    return 1, next((parts for parts in range(fewest, 4 * fewest) if plan.rank_rows % parts == 0), 1)


def max_block_mb(store_bytes: float, world: int) -> float:
    """The largest block of which each rank can hold two, in object stores of so many bytes, without any spilled."""
    return OBJECT_STORE_FRACTION * store_bytes / 1e6 / (2 * world)


def block_ids_dataset(count: int) -> ray.data.Dataset:
    """Block numbers 0..count-1 in order, one a block; what is built upon it keeps the order.

    Few are listed: no task has to start for them, and the first block comes the sooner. Many come from coarse tasks.
    """
    if count <= MAX_INLINE_BLOCKS:
        listed = ray.data.from_items([{"id": number} for number in range(count)], override_num_blocks=count)
        listed.context.execution_options.preserve_order = True
        return listed
    numbers = ray.data.range(count, override_num_blocks=-(-count // BLOCKS_PER_TASK))
    numbers.context.execution_options.preserve_order = True
    return numbers.repartition(target_num_rows_per_block=1, strict=True)


def stream_dataset(
    actor: type, arguments: tuple[Any, ...], count: int, workers: int, labels: dict[str, str] | None = None
) -> ray.data.Dataset:
    """`count` blocks in order, made by `workers` actors of one CPU each, on nodes of these labels."""
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
    """Builds the stream of one group of training workers, from where it starts; Ray Train calls `configure` for it.

    What travels with it is all that Ray's data actors have to import: no torch. `board` is the actor that is told what
    the user should know (train/board.py).
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
        assert world_size == self.start.plan.world, "a group has the size that its plan was made for"
        row_bytes = 3 * self.reader.inputs.image_side**2 + TOKEN_BYTES * self.reader.inputs.max_tokens
        most_mb = max_block_mb(ray.cluster_resources()["object_store_memory"], world_size)
        shape = block_shape(self.start.plan, row_bytes, min(self.block_mb, most_mb))
        blocks = Blocks(self.start.plan, self.start.step, *shape)
        splits = self.dataset(blocks).streaming_split(world_size, equal=True)
        return [{name: split} for split in splits]

    def dataset(self, blocks: Blocks) -> ray.data.Dataset:
        """The blocks in order, read and decoded."""
        return stream_dataset(DecodeActor, (self.reader, blocks, self.board), blocks.count, self.workers, self.labels)

    def datasets(self) -> dict[str, Callable[[], Any]]:
        """What a TorchTrainer gets as `datasets`: a name only, for `configure` makes it."""
        return {"train": _placeholder}


def iter_blocks(split: Any) -> Iterable[Block]:
    """One consumer's blocks in order. A thread of Ray's has the next one ready.

    No more are asked for ahead: Ray would not hand out the first before the second is made.
    """
    blocks: Iterable[Block] = split.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)
    return blocks


def _placeholder() -> None:
    """Ray Train asks for a dataset; `Stream.configure` ignores it."""
