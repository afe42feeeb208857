"""The stream's actor with nothing to do: its blocks are as large as real ones, so that all they cost is Ray's own.

What this file imports, each such actor pays that starts: no reader, no decoder.
"""

from __future__ import annotations

import numpy as np

from mmray.data.stream.order import Blocks


class Blank:
    """The Ray Data actor: block numbers in; blocks of the shape that `RowReader.block` gives out, of zeros."""

    def __init__(self, image_side: int, num_tokens: int, blocks: Blocks) -> None:
        self.image_side, self.num_tokens, self.blocks = image_side, num_tokens, blocks

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        positions = self.blocks.positions(int(batch["id"][0]))
        rows, side = len(positions), self.image_side
        return {
            "image": np.zeros((rows, 3, side, side), np.uint8),
            "input_ids": np.zeros((rows, self.num_tokens), np.int32),
            "num_tokens": np.full(rows, self.num_tokens, np.int32),
            "key": np.zeros(rows, np.int64),
            "label": np.zeros(rows, np.int64),
            "valid": positions >= 0,
            "pos": positions,
        }
