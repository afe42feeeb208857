"""The actor of the stream that reads and decodes; what its process imports, each pays that starts: no ray.train."""

from __future__ import annotations

from typing import Any

import ray

from mmray.data.images.sandbox import SandboxedDecoder
from mmray.data.stream.order import Blocks
from mmray.data.stream.reader import Block, BlockReader, RowReader

SANDBOXED_BLOCKS = 8
WORKER_DIED_MESSAGE = (
    "a data worker died, and has begun again on {node}: what it was reading is read again. Where no image is named as "
    "the cause, its node may have run out of memory: fewer --data.workers, or a smaller --data.block-mb"
)


class DecodeActor(BlockReader):
    """The Ray Data actor. Begun again after its process died, it says so on the board, where there is one, and tries
    each image in a child first: one may have killed it. Ray gives it the same block again, without end, so that the
    image must be told from the rest here."""

    def __init__(self, reader: RowReader, blocks: Blocks, board: Any = None):
        super().__init__(reader, blocks)
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self.sandboxed_blocks_left = SANDBOXED_BLOCKS if again else 0
        reader.sandbox = SandboxedDecoder() if again else None
        if again and board is not None:
            board.push.remote(
                {"note": WORKER_DIED_MESSAGE.format(node=ray.util.get_node_ip_address()), "label": "data"}
            )

    def __call__(self, batch: Block) -> Block:
        block, sandbox = super().__call__(batch), self.reader.sandbox
        if sandbox is not None and not sandbox.deaths:  # its node may have gone instead
            self.sandboxed_blocks_left -= 1
            if not self.sandboxed_blocks_left:
                sandbox.close()
                self.reader.sandbox = None
        return block
