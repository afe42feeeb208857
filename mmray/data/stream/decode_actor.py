"""The Ray Data actor that reads and decodes. It does not import ray.train, because imports delay each data worker."""

from __future__ import annotations

from typing import Any

import ray

from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.stream.order import Blocks
from mmray.data.stream.reader import Block, RowReader

SANDBOXED_BLOCKS = 8
WORKER_DIED_MESSAGE = (
    "a data worker on {node} died and was restarted; its block is read again. If no image is named as the cause, the "
    "node may have run out of memory: lower --data.workers or --data.block-mb"
)


class DecodeActor:
    """Reads and decodes blocks. After a restart it reports to the coordinator `board` and decodes in a child process.

    Ray gives the same block to a restarted actor again, forever, so the image that crashed it must be identified here.
    """

    def __init__(self, reader: RowReader, blocks: Blocks, board: Any = None):
        self.reader, self.blocks = reader, blocks
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self.sandboxed_blocks_left = SANDBOXED_BLOCKS if again else 0
        reader.sandbox = SandboxedDecoder() if again else None
        if again and board is not None:
            board.push.remote(
                {"note": WORKER_DIED_MESSAGE.format(node=ray.util.get_node_ip_address()), "label": "data"}
            )

    def __call__(self, batch: Block) -> Block:
        """Return the block with the number `batch["id"]`."""
        block = self.reader.block(self.blocks.plan, self.blocks.positions(int(batch["id"][0])))
        sandbox = self.reader.sandbox
        if sandbox is not None and not sandbox.deaths:  # no image crashed; the node may have been lost
            self.sandboxed_blocks_left -= 1
            if not self.sandboxed_blocks_left:
                sandbox.close()
                self.reader.sandbox = None
        return block
