"""The ranks of `mmray bench loader --consumers N`, and what their decode actors run.

Without torch, because a process for each rank imports it.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import numpy as np

from mmray.data.stream.actors import rank_blocks
from mmray.data.stream.blocks import Block
from mmray.data.stream.order import ResumePoint, SamplePlan
from mmray.data.stream.pool_size import DecoderLimits

BLOCK_ROWS, SIDE = 128, 32


class SleepingReader:
    """A reader of rows that decodes nothing, to measure the stream alone.

    It has the method of RowReader that decode actors (processes that read and decode rows) call.

    Args:
        decode_s: Seconds that it takes for a block.
    """

    row_bytes = 3 * SIDE**2
    subprocess_decoder = None

    def __init__(self, decode_s: float) -> None:
        self._decode_s = decode_s

    def read_block(self, plan: SamplePlan, positions: np.ndarray) -> Block:
        """Sleep for `decode_s` in place of decoding, and return undefined pixels.

        Args:
            plan: Unused.
            positions: Positions of the rows in the sample order, int64 [B].

        Returns:
            `image` uint8 [B, 3, 32, 32] and `pos`, the positions.
        """
        time.sleep(self._decode_s)
        return {"image": np.empty((len(positions), 3, SIDE, SIDE), np.uint8), "pos": positions}


class RankGroup:
    """A process with several ranks, one in each thread, which receive rows until `stop`.

    Args:
        plan: Order and number of the rows.
        ranks: The ranks of this process.
        decode_s: Seconds that a block takes.
    """

    def __init__(self, plan: SamplePlan, ranks: range, decode_s: float) -> None:
        self._plan = plan
        self._decode_s = decode_s
        self._blocks = [0] * len(ranks)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._consume, args=(index, rank), daemon=True)
            for index, rank in enumerate(ranks)
        ]
        for thread in self._threads:
            thread.start()

    def _consume(self, index: int, rank: int) -> None:
        reader: Any = SleepingReader(self._decode_s)
        start = ResumePoint(self._plan, 0)
        limits = DecoderLimits(1, 1, 1)
        world = self._plan.world_size
        block_mb = BLOCK_ROWS * reader.row_bytes / 1e6
        with closing(rank_blocks(reader, start, rank, world, block_mb, limits, print)) as blocks:
            for step, block in enumerate(blocks):
                if not np.array_equal(block["pos"], self._plan.positions(step, rank)):
                    raise RuntimeError(f"rank {rank} received other rows than those of step {step}")
                self._blocks[index] += 1
                if self._stop.is_set():
                    return

    def counts(self) -> list[int]:
        """Return how many blocks (rows that are read together) each rank of this process has
        received.
        """
        return list(self._blocks)

    def stop(self) -> None:
        """Stop the ranks after their next block, and wait for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
