"""The stream of one rank: its blocks of model inputs, in order, from the processes of a pool.

The rank owns these processes and requests blocks from them directly, so the ranks of a run share no
process. Without Ray: the processes are actors (actors.py) or child processes (local.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmray.data.stream.blocks import Block
from mmray.data.stream.decoder import Decoded
from mmray.data.stream.order import BlockPlan
from mmray.ordered_map import OrderedMap, Pool


class RankBlocks(OrderedMap[int, Any]):
    """Iterates the blocks of a rank in sample order.

    Iterating raises the errors of decoding. `close()` ends the processes.

    Args:
        blocks: Which rows each block of all ranks has.
        pool: Processes that decode a block, given its number. It is closed with the stream.
        late_s: Seconds after which a block is requested from another process too; None: never.
    """

    def __init__(
        self, blocks: BlockPlan, rank: int, pool: Pool[int, Decoded], late_s: float | None
    ) -> None:
        items = range(rank, blocks.count, blocks.plan.world_size)
        super().__init__(pool, items, late_s, first_items=blocks.blocks_per_step)

    @property
    def pixels(self) -> np.ndarray | None:
        """Memory with the pixels of all blocks, if they have fixed places in it."""
        return None

    def __next__(self) -> Block:
        decoded: Decoded = super().__next__()
        # Such an image comes again in the next epoch, or soon in a small set.
        self.careful |= decoded.crashed
        return decoded.block
