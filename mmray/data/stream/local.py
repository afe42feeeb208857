"""The stream of a worker without Ray: child processes of this machine decode its blocks, in
sample order.

They write pixels into memory that they share with the training process, at the place of the row in
its step. The training process receives only the small columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mmray.data.stream.blocks import join_blocks
from mmray.data.stream.decoder import BlockDecoder
from mmray.data.stream.order import BlockPlan, ResumePoint
from mmray.data.stream.reader import CRASH_NOTE, Block, RowReader
from mmray.data.stream.slots import PixelSlots
from mmray.data.stream.stream import RankBlocks
from mmray.errors import ResourceError
from mmray.processes import ChildPool

if TYPE_CHECKING:
    from mmray.data.vlm.reader import ConversationReader

# Limit of the shared memory, unless two slots need more. To keep it, fewer blocks are read ahead.
MAX_SLOTS_MB = 2000.0
MAX_CRASHES = 5


class LocalBlocks(RankBlocks):
    """The blocks of a worker without Ray, decoded by child processes.

    A block has all rows of one or more steps. Its pixels are valid until the next one is requested:
    then a data process may overwrite them. The processes start at once. Iterating raises
    ResourceError if they keep dying.

    Args:
        start: The sample order, and the first step that the workers take.
        block_mb: About how many MB one process decodes at a time. This may be a part of the rows of
            a step.
        warn: Called with one line of text for the log if a process died.
    """

    def __init__(
        self,
        reader: RowReader | ConversationReader,
        start: ResumePoint,
        block_mb: float,
        num_processes: int,
        warn: Callable[[str], None],
        rank: int = 0,
    ) -> None:
        blocks = BlockPlan.sized(start.plan, start.step, reader.row_bytes, block_mb)
        self._blocks_per_step = blocks.blocks_per_step
        self._num_blocks = 0  # blocks that were returned
        rows = start.plan.rank_rows * blocks.steps_per_block
        # One block that is awaited, and two of each process: one in work, one that follows.
        in_flight = 2 * num_processes + 1
        num_slots = 1 + -(-2 * num_processes // self._blocks_per_step)
        slot_mb = rows * reader.row_bytes / 1e6
        num_slots = max(2, min(num_slots, int(MAX_SLOTS_MB / slot_mb)))
        # The slot of a block that is awaited must not be given to a later block.
        in_flight = min(in_flight, (num_slots - 1) * self._blocks_per_step + 1)
        self._slots = None
        if reader.pixel_shape is not None:
            self._slots = PixelSlots(num_slots, rows, reader.pixel_shape)

        def on_crash(crashes: int) -> None:
            if crashes > MAX_CRASHES:
                raise ResourceError(
                    f"data processes died {crashes} times; the machine has probably run out of "
                    "memory"
                )
            warn(CRASH_NOTE.format(process="a data process"))

        decoder = BlockDecoder(reader, blocks, self._slots)
        pool = ChildPool(decoder, min(num_processes, blocks.count), in_flight, on_crash)
        # Never late: a process that is replaced could still write to a slot that is used again.
        super().__init__(blocks, rank, pool, late_s=None)

    @property
    def pixels(self) -> np.ndarray | None:
        """The shared memory with the pixels of all decoded rows, uint8 [slots, rows, 3, S, S]; None
        if rows have pixels of different shapes.
        """
        return None if self._slots is None else self._slots.pixels

    def __next__(self) -> Block:
        next_part = super().__next__
        block = join_blocks([next_part() for _ in range(self._blocks_per_step)])
        if self._slots is not None:
            slot = self._slots.pixels[self._num_blocks % len(self._slots.pixels)]
            block["image"] = slot[: len(block["pos"])]
        self._num_blocks += 1
        return block

    def close(self) -> None:
        self.interrupt()
        super().close()
