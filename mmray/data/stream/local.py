"""The stream of one worker without Ray: child processes of this machine decode its blocks, in
sample order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.stream.order import BlockPlan, ResumePoint
from mmray.data.stream.reader import CRASH_NOTE, Block, RowReader
from mmray.errors import ResourceError
from mmray.processes import ProcessMap

# at most: blocks are copied through a pipe, which a larger one would occupy for long
BLOCK_MB = 8.0
MAX_CRASHES = 5


class BlockReader:
    """The work of a data process; after a crash it decodes in another child process first, which
    names the image.
    """

    def __init__(self, reader: RowReader, blocks: BlockPlan) -> None:
        self.reader, self.blocks = reader, blocks

    def __call__(self, number: int, after_crash: bool) -> Block:
        if after_crash and self.reader.subprocess_decoder is None:
            self.reader.subprocess_decoder = SubprocessDecoder()
        return self.reader.read_block(self.blocks.plan, self.blocks.positions(number))


class LocalBlocks:
    """The blocks of the only worker, in order.

    Raises ResourceError if data processes keep dying.
    """

    def __init__(
        self,
        reader: RowReader,
        start: ResumePoint,
        block_mb: float,
        num_processes: int,
        warn: Callable[[str], None],
    ) -> None:
        assert start.plan.world_size == 1, "the ranks of a group need Ray"
        blocks = BlockPlan.sized(start.plan, start.step, reader.row_bytes, min(block_mb, BLOCK_MB))

        def on_crash(crashes: int) -> None:
            if crashes > MAX_CRASHES:
                raise ResourceError(
                    f"data processes died {crashes} times; the machine has probably run out of "
                    "memory"
                )
            warn(CRASH_NOTE.format(process="a data process"))

        self._blocks = ProcessMap(
            BlockReader(reader, blocks),
            range(blocks.count),
            min(num_processes, blocks.count),
            2 * num_processes + 1,
            on_crash,
        )

    def __iter__(self) -> Iterator[Block]:
        return self._blocks

    def interrupt(self) -> None:
        """End the blocks, also for a thread that waits for the next one."""
        self._blocks.interrupt()

    def close(self) -> None:
        """End the data processes; no thread may be iterating."""
        self._blocks.interrupt()
        self._blocks.close()
