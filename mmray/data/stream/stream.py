"""The stream of one rank: its blocks of model inputs, in order, from the processes of a pool.

The rank owns these processes and requests blocks from them directly, so the ranks of a run share no
process. Without Ray: the processes are actors (actors.py) or child processes (local.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from mmray.data.stream.blocks import Block
from mmray.data.stream.decoder import Decoded
from mmray.data.stream.order import BlockPlan
from mmray.ordered_map import OrderedMap, Pool


class RankBlocks:
    """Iterates the rows of a rank in sample order, some (a block) at a time.

    A block is a dict of arrays of R rows by column, such as `image` uint8 [R, 3, S, S], `input_ids`
    int32 [R, T] and `pos` int64 [R]. Iterating raises the errors of decoding.

    Args:
        blocks: Which rows each block of all ranks has.
        rank: The rank whose blocks are iterated.
        pool: Processes that read and decode a block, given its number. It is closed with the
            stream.
        late_s: Seconds after which a block is requested from another process too; None: never.
    """

    def __init__(
        self, blocks: BlockPlan, rank: int, pool: Pool[int, Decoded], late_s: float | None
    ) -> None:
        numbers = range(rank, blocks.count, blocks.plan.world_size)
        self._map = OrderedMap(pool, numbers, late_s)

    @property
    def waited_s(self) -> float:
        """Seconds that the caller has waited for rows so far."""
        return self._map.waited_s

    def __iter__(self) -> Iterator[Block]:
        for decoded in self._map:
            # Such an image comes again in the next epoch, or soon in a small set.
            self._map.careful |= decoded.crashed
            yield decoded.block

    def update_pool(self) -> None:
        """Start or end data processes while the rank requests no blocks; may be called from another
        thread.
        """
        self._map.update_pool()

    def interrupt(self) -> None:
        """Kill the processes that decode rows, and end the iteration; may be called from another
        thread.

        A thread that waits for the next rows gets StopIteration, so its loop ends.
        """
        self._map.interrupt()

    def close(self) -> None:
        """End the processes that read and decode rows; no thread may be iterating."""
        self._map.close()
