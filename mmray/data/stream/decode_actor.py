"""The actor of the stream. It imports neither torch nor ray.data, which would delay its start."""

from __future__ import annotations

from contextlib import suppress

import ray

from mmray.data.stream.decoder import BlockDecoder, Decoded
from mmray.data.stream.slots import LentSlot


class DecodeActor:
    """A Ray actor that decodes the blocks that a rank requests."""

    def __init__(self, decoder: BlockDecoder) -> None:
        self._decoder = decoder

    def node(self) -> str:
        """Return the hexadecimal ID of this node, once the actor has started."""
        return str(ray.get_runtime_context().get_node_id())

    def decode(self, number: int, careful: bool, slot: LentSlot | None) -> Decoded:
        """Read and decode a block.

        Args:
            slot: Shared memory for the pixels, which the rank lends if it is on this node; None:
                the pixels are returned through Ray's object store.
        """
        pixels = None
        if slot is not None:
            with suppress(OSError):  # /proc may be missing, or closed for this process
                pixels = slot.open()
        return self._decoder(number, careful, pixels)
