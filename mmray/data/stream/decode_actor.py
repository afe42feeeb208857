"""The actor of the stream. It imports neither torch nor ray.data, which would delay its start."""

from __future__ import annotations

import ray

from mmray.data.stream.decoder import BlockDecoder, Decoded


class DecodeActor:
    """Decodes the blocks that a rank requests.

    Args:
        decoder: Decodes a block by its number.
    """

    def __init__(self, decoder: BlockDecoder) -> None:
        self._decoder = decoder

    def node(self) -> str:
        """Return the hexadecimal ID of this node, once the actor has started."""
        return str(ray.get_runtime_context().get_node_id())

    def decode(self, number: int, careful: bool) -> Decoded:
        """Read and decode a block.

        Args:
            number: Number of the block.
            careful: Decode each image in a child process first, to find one that crashes its
                decoder.
        """
        return self._decoder(number, careful)
