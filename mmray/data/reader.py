"""From row ids to the arrays of a block: read, decode, resize, choose a caption, tokenise.

The sample's journey: the order named a row, this file turns it into pixels and tokens, inside a Ray Data actor (or in
any process: it knows nothing of Ray). A row that cannot be read keeps its place with valid=False, so that a step
always has the rows that the order gave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmray.data import image as images
from mmray.data.order import PADDING, Blocks, Plan, draw
from mmray.data.store import PreparedSet, Row, key_id
from mmray.data.text import TextEncoder

if TYPE_CHECKING:
    from mmray.config import Inputs

Block = dict[str, np.ndarray]


class RowReader:
    """Reads rows of a prepared set as model inputs; cheap to pickle, opens the set on first use."""

    def __init__(self, prepared: PreparedSet, inputs: Inputs, tokenizer_json: str, max_pixels: int):
        self.prepared, self.inputs, self.max_pixels = prepared, inputs, max_pixels
        self.encoder = TextEncoder(tokenizer_json, inputs.max_tokens)

    def block(self, plan: Plan, positions: np.ndarray) -> Block:
        """Arrays of the rows at `positions` [R] of the run's order.

        image uint8 [R, 3, S, S]; input_ids int32 [R, T]; num_tokens int32 [R] (1 for an invalid row); key int64 [R];
        valid bool [R]; pos int64 [R]. Padding and unreadable rows are zeros with valid=False.
        """
        rows = self._rows(plan.rows_at(positions))
        pixels = np.zeros((len(rows), 3, self.inputs.image_side, self.inputs.image_side), np.uint8)
        valid = np.array(
            [row is not None and self._draw_pixels(row, out) for row, out in zip(rows, pixels, strict=True)]
        )
        key = np.array([key_id(row.key) if row else 0 for row in rows], np.int64)
        input_ids, num_tokens = self._tokens(plan, positions, rows, key)
        return {
            "image": pixels,
            "input_ids": input_ids,
            "num_tokens": np.where(valid, num_tokens, 1).astype(np.int32),
            "key": np.where(valid, key, 0),
            "valid": valid,
            "pos": positions,
        }

    def fault(self, row: int) -> tuple[Row | None, str]:
        """Why a row cannot be read, and the row itself where at least its record can (for the quarantine)."""
        try:
            record = self.prepared.read(np.array([row]))[0]
        except (OSError, ValueError) as error:
            return None, f"store: {error}"
        try:
            if not record.is_intact:
                return record, "checksum: the bytes are not those that were checked when the set was prepared"
            images.decode(record.images[0], self.max_pixels)
        except images.BadImage as error:
            return record, str(error)
        return record, "read well the second time"

    def _rows(self, row_ids: np.ndarray) -> list[Row | None]:
        """Rows in order; None for padding and for a row whose record is damaged."""
        real = np.flatnonzero(row_ids != PADDING)
        out: list[Row | None] = [None] * len(row_ids)
        for place, row in zip(real, self._read(row_ids[real]), strict=True):
            out[place] = row
        return out

    def _read(self, row_ids: np.ndarray) -> list[Row | None]:
        try:
            return list(self.prepared.read(row_ids))
        except (OSError, ValueError):
            if len(row_ids) <= 1:
                return [None] * len(row_ids)
            middle = len(row_ids) // 2  # one damaged record must not cost its neighbours
            return self._read(row_ids[:middle]) + self._read(row_ids[middle:])

    def _draw_pixels(self, row: Row, out: np.ndarray) -> bool:
        if not row.is_intact:
            return False
        try:
            picture = images.decode(row.images[0], self.max_pixels)
        except images.BadImage:
            return False
        out[:] = images.to_pixels(picture, self.inputs.image_side, self.inputs.fit, self.inputs.interpolation)
        return True

    def _tokens(
        self, plan: Plan, positions: np.ndarray, rows: list[Row | None], key: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        choices = np.array([len(row.texts) if row else 1 for row in rows], np.int64)
        epoch = np.where(positions >= 0, positions, 0) // plan.num_rows
        chosen = draw(plan.seed, epoch, key, choices)
        return self.encoder.encode([row.texts[c] if row else "" for row, c in zip(rows, chosen, strict=True)])


class BlockReader:
    """The Ray Data actor: block numbers in, blocks of model inputs out."""

    def __init__(self, reader: RowReader, blocks: Blocks):
        self.reader, self.blocks = reader, blocks

    def __call__(self, batch: Block) -> Block:
        return self.reader.block(self.blocks.plan, self.blocks.positions(int(batch["id"][0])))
