"""The Ray Data stream: a prepared set as blocks of model inputs, in sample order, split between the
training workers.

Decode actors on CPU nodes read and decode (reader.py) the rows that order.py selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ray
import ray.data
import ray.train

from mmray.data.stream.decode_actor import DecodeActor
from mmray.data.stream.order import BlockPlan, ResumePoint
from mmray.data.stream.reader import Block, RowReader
from mmray.data.vlm.reader import ConversationReader

BLOCK_IDS_PER_TASK = 1000
# listing takes 0.5 s of the driver; a task needs a process that imports Ray Data
MAX_INLINE_BLOCKS = 1000
# Tasks queued at an actor. With Ray's default of two, actors were idle for 8 % of the time on busy
# cores. A queued task is only a block number, so it needs no memory.
MAX_TASKS_IN_FLIGHT = 4
# Ray Data fills half of an object store with blocks, and beyond 80 % Ray spills
OBJECT_STORE_FRACTION = 0.3


def block_ids_dataset(count: int) -> ray.data.Dataset:
    """Return block numbers 0..count-1, one in each block; datasets derived from it keep the
    order.
    """
    numbers: ray.data.Dataset
    if is_short := count <= MAX_INLINE_BLOCKS:
        numbers = ray.data.from_items(
            [{"id": number} for number in range(count)], override_num_blocks=count
        )
    else:
        numbers = ray.data.range(count, override_num_blocks=-(-count // BLOCK_IDS_PER_TASK))
    numbers.context.execution_options.preserve_order = True
    return numbers if is_short else numbers.repartition(target_num_rows_per_block=1, strict=True)


class StreamDataConfig(ray.train.DataConfig):
    """Builds the stream of one worker group; the reader is pickled to the decode actors, which need
    no torch.
    """

    def __init__(
        self,
        resume_point: ResumePoint,
        reader: RowReader | ConversationReader,
        num_actors: int,
        block_mb: float,
        label_selector: dict[str, str] | None = None,
        coordinator: Any = None,
    ):
        super().__init__()
        self.resume_point, self.reader, self.num_actors, self.block_mb = (
            resume_point,
            reader,
            num_actors,
            block_mb,
        )
        self.label_selector, self.coordinator = label_selector, coordinator

    def configure(
        self, datasets: dict[str, Any], world_size: int, *_: Any, **__: Any
    ) -> list[dict[str, Any]]:
        (name,) = datasets
        assert world_size == self.resume_point.plan.world_size, (
            "the worker group must have the size of its plan"
        )
        store_mb = OBJECT_STORE_FRACTION * ray.cluster_resources()["object_store_memory"] / 1e6
        max_mb = store_mb / (2 * world_size)  # two blocks per rank fit without spilling
        start = self.resume_point
        block_plan = BlockPlan.sized(
            start.plan, start.step, self.reader.row_bytes, min(self.block_mb, max_mb)
        )
        return [
            {name: split}
            for split in self.dataset(block_plan).streaming_split(world_size, equal=True)
        ]

    def dataset(self, block_plan: BlockPlan) -> ray.data.Dataset:
        """Return the dataset of decoded blocks, in order, from actors of one CPU each."""
        dataset = block_ids_dataset(block_plan.count).map_batches(
            DecodeActor,
            fn_constructor_args=(self.reader, block_plan, self.coordinator),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(
                size=min(self.num_actors, block_plan.count),
                max_tasks_in_flight_per_actor=MAX_TASKS_IN_FLIGHT,
            ),
            num_cpus=1,
        )
        # Otherwise Ray cuts blocks of 1.5 x 128 MiB or more, and the splitter gives the pieces to
        # different ranks.
        dataset.context.target_max_block_size = None
        dataset.context.execution_options.label_selector = self.label_selector
        # the driver restarts or fails depending on its type
        dataset.context.raise_original_map_exception = True
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        return dataset

    def datasets(self) -> dict[str, Callable[[], Any]]:
        """Return the `datasets` of a TorchTrainer: a name only, because `configure` builds the
        dataset.
        """
        return {"train": lambda: None}


def iter_blocks(split: Any) -> Iterable[Block]:
    """Yield the blocks of one rank in order; a thread of Ray fetches the next one even with
    prefetch_batches=0.
    """
    # With more, Ray would not return the first block before all prefetched ones are ready.
    return split.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)
