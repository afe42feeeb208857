"""The Ray Data actor that reads and decodes.

It does not import ray.train, because imports delay each actor.
"""

from __future__ import annotations

from typing import Any

import ray

from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.stream.order import BlockPlan
from mmray.data.stream.reader import CRASH_NOTE, Block, RowReader

CHECKED_BLOCKS = 8


class DecodeActor:
    """Reads and decodes blocks. After a restart it decodes in a child process first.

    Ray gives the same block to a restarted actor again, forever, so the image that crashed it must
    be identified here. A restart pushes a note for the driver's log, headed `label`, to the actor
    `coordinator` (training/coordinator.py).
    """

    def __init__(self, reader: RowReader, block_plan: BlockPlan, coordinator: Any = None):
        self.reader, self.block_plan = reader, block_plan
        was_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self.checked_blocks_left = CHECKED_BLOCKS if was_restarted else 0
        reader.subprocess_decoder = SubprocessDecoder() if was_restarted else None
        if was_restarted and coordinator is not None:
            process = f"a decode actor on {ray.util.get_node_ip_address()}"
            coordinator.push.remote({"note": CRASH_NOTE.format(process=process), "label": "data"})

    def __call__(self, batch: Block) -> Block:
        """Return the block with the number `batch["id"]`."""
        block = self.reader.read_block(
            self.block_plan.plan, self.block_plan.positions(int(batch["id"][0]))
        )
        decoder = self.reader.subprocess_decoder
        # no image crashed; the node may have been lost
        if decoder is not None and not decoder.num_crashes:
            self.checked_blocks_left -= 1
            if not self.checked_blocks_left:
                decoder.close()
                self.reader.subprocess_decoder = None
        return block
