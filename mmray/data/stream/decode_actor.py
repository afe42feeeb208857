"""The actor of the stream. It imports neither torch nor ray.data, which would delay its start."""

from __future__ import annotations

from contextlib import suppress

import ray

from mmray.data.stream.decoder import BlockDecoder, Decoded
from mmray.data.stream.slots import LentSlot


class DecodeActor:
    """A Ray actor that reads and decodes the rows that a rank requests.

    `decode(number, careful, slot)` returns a Decoded: `block`, arrays of R rows by column as the
    reader's `read_block` returns them, and `crashed`, whether an image crashed its decoder. With
    `careful` each image is decoded in a child process first; `slot` is a part of shared memory
    for the pixels, or None.

    Args:
        decoder: Decodes a block (some rows of the rank) by its number.
    """

    def __init__(self, decoder: BlockDecoder) -> None:
        self._decoder = decoder

    def node(self) -> str:
        """Return the hexadecimal ID of this node, once the actor has started."""
        return str(ray.get_runtime_context().get_node_id())

    def decode(self, number: int, careful: bool, slot: LentSlot | None) -> Decoded:
        """Read and decode a block: the rows that this actor decodes at a time.

        Args:
            slot: Part of shared memory for the pixels, which the rank lends if it is on this node;
                None: the pixels are returned through Ray's object store.
        """
        pixels = None
        if slot is not None:
            with suppress(OSError):  # /proc may be missing, or closed for this process
                pixels = slot.open()
        return self._decoder(number, careful, pixels)
