"""The work of a process of the stream: read and decode the blocks that are requested.

Without Ray and torch: it runs in child processes and in actors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmray.data.images.decode import keep_image_memory
from mmray.data.images.subprocess_decoder import SubprocessDecoder
from mmray.data.stream.blocks import Block
from mmray.data.stream.order import BlockPlan
from mmray.data.stream.reader import RowReader
from mmray.data.stream.slots import PixelSlots

if TYPE_CHECKING:
    from mmray.data.vlm.reader import ConversationReader


class Decoded(NamedTuple):
    """A decoded block.

    Args:
        block: The columns of the reader's `read_block`.
        crashed: Whether an image ended the child process that decoded it.
    """

    block: Block
    crashed: bool


class BlockDecoder:
    """Function object that decodes blocks by number, in a data process.

    Args:
        slots: Memory for the pixels of all blocks, shared with the training process; blocks then
            have no column `image`. None: `pixels` of the call, or new memory for each block.
    """

    def __init__(
        self,
        reader: RowReader | ConversationReader,
        blocks: BlockPlan,
        slots: PixelSlots | None = None,
    ) -> None:
        self.reader = reader
        self.blocks = blocks
        self.slots = slots
        self._subprocess_decoder: SubprocessDecoder | None = None

    def __call__(self, number: int, careful: bool, pixels: np.ndarray | None = None) -> Decoded:
        """Read and decode a block.

        Args:
            careful: Decode each image in a child process first, to find one that crashes its
                decoder.
            pixels: Memory for the pixels of at least its rows; the block then has no column
                `image`. None: new memory, or that of `slots`.
        """
        keep_image_memory()
        if careful and self._subprocess_decoder is None:
            self._subprocess_decoder = SubprocessDecoder()
        decoder = self._subprocess_decoder if careful else None
        self.reader.subprocess_decoder = decoder
        crashes = 0 if decoder is None else decoder.num_crashes
        positions = self.blocks.positions(number)
        if self.slots is not None:
            pixels = self._slot_of(number, len(positions))
        if pixels is None:
            block = self.reader.read_block(self.blocks.plan, positions)
        else:
            block = self.reader.read_block(self.blocks.plan, positions, pixels[: len(positions)])
            del block["image"]
        return Decoded(block, decoder is not None and decoder.num_crashes > crashes)

    def _slot_of(self, number: int, num_rows: int) -> np.ndarray:
        """Return the memory of a block's pixels: its part of the slot of its step."""
        assert self.slots is not None
        own_number = number // self.blocks.plan.world_size  # among the blocks of its rank
        group, part = divmod(own_number, self.blocks.blocks_per_step)
        slot = self.slots.pixels[group % len(self.slots.pixels)]
        return slot[part * num_rows : (part + 1) * num_rows]
