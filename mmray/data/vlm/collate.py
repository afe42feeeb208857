"""Encoded rows as the tensors of a micro-batch: rows end to end in one sequence, or right-padded.

Both keep rows apart without a mask: in a packed sequence by `cu_seqlens` (models/vlm/attention.py),
in a padded one because attention is causal and the padding comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmray.data.stream.blocks import Block
from mmray.data.stream.collate import Batch, iter_step_rows
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.token_batches import TokenPlan
from mmray.data.vlm.encoder import EncodedRow
from mmray.data.vlm.families import GENERAL, Family
from mmray.data.vlm.reader import unpack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Columns of a batch that describe its rows; the others are inputs of the model.
ROW_COLUMNS = ("key", "label", "valid", "pos", "num_tokens")

# Positions of a row [3, T] from its ids and its inputs of the encoders of media.
RopeFn = Callable[[Tensor, dict[str, Tensor]], Tensor]


class RowCollator:
    """Function object that builds the inputs of a vision-language model for the encoded rows of a
    micro-batch.

    Args:
        family: Names and layouts of the model's inputs.
        config: transformers' config of the model, which has the ids of the tokens whose embeddings
            are replaced by features of images and videos.
        dummy: Encoded row with a medium of each kind and without targets, appended to a micro-batch
            that lacks a kind. So the vision encoder runs equally often in each micro-batch and no
            rank waits for another. Its gradient is zero.
        packed: Whether rows are concatenated to one sequence; otherwise they are padded on the
            right.
        rope_index: Computes the positions int64 [3, T] (time, height, width) of a row. None:
            positions are 0, 1, 2, ...
        pairs: Whether rows are chosen and rejected answers, of which each is a conversation in B:
            those with the chosen answers first.
    """

    def __init__(
        self,
        family: Family,
        config: PreTrainedConfig,
        dummy: EncodedRow,
        packed: bool,
        rope_index: RopeFn | None = None,
        pairs: bool = False,
    ) -> None:
        self.family = family
        self.config = config
        self.dummy = dummy
        self.packed = packed
        self.rope_index = rope_index
        self.pairs = pairs

    def __call__(self, rows: Sequence[EncodedRow]) -> Batch:
        """Return the model's inputs for some rows; without rows, those of the dummy row.

        Args:
            rows: Encoded rows. The dummy row is added if they lack a kind of media, and then counts
                in B.

        Returns:
            - `input_ids` int64 [1, T] if packed, otherwise [B, T] padded on the right.
            - `targets` int64 [N]: the tokens to predict.
            - `target_index` int64 [N]: the index in the flattened `input_ids` that predicts each
              target.
            - `target_weights` float32 [N]: the factor of the loss of each target.
            - `cu_seqlens` int32 [B + 1], only if packed: the index of the first token of each row,
              then T.
            - `position_ids`, if packed or with `rope_index`: int64 [1, T], counted from 0 in each
              row. With `rope_index` [4, 1, T] if packed, otherwise [4, B, T]: the planes text,
              time, height, width, float32 if transformers' positions are.
            - The input that `family.token_types` names, if any: int64 like `input_ids`, 1 at image
              tokens and 2 at video tokens.
            - `attention_mask` and token types of a model without a descriptor, int64 [B, T].
            - The inputs of the vision encoder for all rows together, such as `pixel_values` uint8;
              with `pairs` only those of the chosen answers if `family.shares_media`.
            - `reference` float64 [R, 2], with `pairs`: log-probabilities of the chosen and the
              rejected answer of each of R rows by the reference model.
        """
        padded = with_all_media(rows, self.dummy)
        if not self.pairs:
            return self._collate(padded) | join_media(padded)
        unknown = np.full(2, np.nan)
        references = [unknown if row.reference is None else row.reference for row in rows]
        reference = torch.from_numpy(np.array(references, np.float64).reshape(-1, 2))
        both = [*padded, *(row.conversations[-1] for row in padded)]
        media = join_media(padded if self.family.shares_media else both)
        return self._collate(both) | media | {"reference": reference}

    def _collate(self, rows: Sequence[EncodedRow]) -> Batch:
        """Return the inputs of the model for conversations, but those of media."""
        lengths = [len(row.input_ids) for row in rows]
        ids = [torch.from_numpy(row.input_ids.astype(np.int64)) for row in rows]
        batch: Batch = {}
        if self.packed:
            starts = np.concatenate([[0], np.cumsum(lengths)])
            batch["input_ids"] = torch.cat(ids)[None]
            batch["cu_seqlens"] = torch.from_numpy(starts.astype(np.int32))
            positions = torch.cat([self._positions(row) for row in rows], dim=1)
            batch["position_ids"] = positions[:, None] if len(positions) > 1 else positions
        else:
            width = max(lengths)
            starts = np.arange(len(rows)) * width
            batch["input_ids"] = torch.stack([_pad(row, width) for row in ids])
            if self.family.mrope:
                planes = [self._positions(row, width) for row in rows]
                batch["position_ids"] = torch.stack(planes, dim=1)
        # The token at a position is predicted at the one before; the first of a row at none.
        predicted = [np.flatnonzero(row.loss_weights[1:]) for row in rows]
        batch["targets"] = torch.cat(
            [row[1:][torch.from_numpy(at)] for row, at in zip(ids, predicted, strict=True)]
        )
        batch["target_index"] = torch.from_numpy(
            np.concatenate([at + start for at, start in zip(predicted, starts, strict=False)])
        )
        weights = [row.loss_weights[1:][at] for row, at in zip(rows, predicted, strict=True)]
        batch["target_weights"] = torch.from_numpy(np.concatenate(weights))
        if self.family.token_types:
            batch[self.family.token_types] = token_types(batch["input_ids"], self.config)
        if self.family == GENERAL:
            batch |= padded_columns(rows, width)
        return batch

    def _positions(self, row: EncodedRow, width: int | None = None) -> Tensor:
        """Positions of a row [1, T], or [4, T] with the planes text, time, height, width.

        width: Pad them to this length.
        """
        length = len(row.input_ids)
        text = torch.arange(width or length)[None]
        if self.rope_index is None:
            return text
        ids = torch.from_numpy(row.input_ids.astype(np.int64))
        columns = {name: torch.from_numpy(value) for name, value in row.images.items()}
        planes = self.rope_index(ids, columns)
        padded = planes.new_zeros(3, text.shape[1])
        padded[:, :length] = planes
        return torch.cat([text, padded])


def padded_columns(rows: Sequence[EncodedRow], width: int, on_left: bool = False) -> Batch:
    """Return `attention_mask` and the token types of rows of a model without a descriptor, int64
    [B, width]; a row without a type is text.
    """
    columns: Batch = {}
    for name in ("attention_mask", *{name: 0 for row in rows for name in row.token_types}):
        column = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            length = len(row.input_ids)
            values = 1 if name == "attention_mask" else row.token_types.get(name)
            if values is not None:
                first = width - length if on_left else 0
                column[index, first : first + length] = torch.as_tensor(values)
        columns[name] = column
    return columns


def _pad(row: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, width - len(row)))


def with_all_media(rows: Sequence[EncodedRow], dummy: EncodedRow) -> list[EncodedRow]:
    """Return the rows, and the dummy row if they lack a kind of media."""
    kinds = {name for row in rows for name in row.images}
    return [*rows] if dummy.images.keys() <= kinds else [*rows, dummy]


def join_media(rows: Sequence[EncodedRow]) -> Batch:
    """Concatenate the inputs of the encoders of media of several rows, along the first dimension;
    other dimensions are padded with zeros to the largest size.
    """
    names = dict.fromkeys(name for row in rows for name in row.images)
    return {
        name: torch.from_numpy(
            _concatenate([row.images[name] for row in rows if name in row.images])
        )
        for name in names
    }


def token_types(ids: Tensor, config: PreTrainedConfig) -> Tensor:
    """Return the kind of each token: int64 like the ids, 1 for images and 2 for videos."""
    types = torch.zeros_like(ids)
    for number, name in enumerate(("image_token_id", "video_token_id"), 1):
        token_id = getattr(config, name, None)
        if token_id is not None:
            types[ids == token_id] = number
    return types


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    shape = np.max([array.shape[1:] for array in arrays], axis=0)
    padded = []
    for array in arrays:
        widths = [(0, 0)] + [
            (0, int(size) - own) for size, own in zip(shape, array.shape[1:], strict=True)
        ]
        padded.append(np.pad(array, widths) if any(after for _, after in widths) else array)
    return np.concatenate(padded)


def iter_row_batches(
    blocks: Iterable[Block],
    plan: SamplePlan,
    first_step: int,
    rank: int,
    micro_batch_size: int,
    collate: RowCollator,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of a rank for each step.

    Args:
        blocks: This rank's rows in sample order, as `ConversationReader.read_block` returns them.
        first_step: The step of the first block.
        micro_batch_size: Rows of a micro-batch. Not used with a TokenPlan, which has its own sizes.

    Yields:
        The micro-batches of one step: ROW_COLUMNS of its R rows, and what `collate` returns for the
        valid rows only. The iteration ends early if there are no more blocks.
    """
    steps = range(first_step, plan.steps)
    step_rows = (len(plan.positions(step, rank)) for step in steps)
    for step, block in zip(steps, iter_step_rows(blocks, step_rows), strict=False):
        rows = unpack_rows(block)
        stops = [*range(micro_batch_size, len(rows), micro_batch_size), len(rows)]
        if isinstance(plan, TokenPlan):
            stops = np.cumsum(plan.micro_batch_sizes(step, rank)).tolist()
        micro_batches = []
        for first, stop in pairwise([0, *stops]):
            columns = {name: torch.from_numpy(block[name][first:stop]) for name in ROW_COLUMNS}
            valid = [row for row in rows[first:stop] if row is not None]
            micro_batches.append(columns | collate(valid))
        yield micro_batches


def rope_index_of(config: PreTrainedConfig) -> RopeFn:
    """Return the function that computes the positions of a row as transformers' model does.

    It runs on the CPU, because it reads the sizes of images.

    Args:
        config: transformers' config of a model that has `get_rope_index`.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model_class: Any = MODEL_MAPPING[type(config)]
    # The method reads only the config; a model would have to be built.
    model = model_class.__new__(model_class)
    model.__dict__ |= {
        "config": config,
        "spatial_merge_size": config.vision_config.spatial_merge_size,
    }
    parameters = signature(model_class.get_rope_index).parameters

    def rope_index(ids: Tensor, images: dict[str, Tensor]) -> Tensor:
        inputs = images | {
            "mm_token_type_ids": token_types(ids, config)[None],
            "attention_mask": torch.ones_like(ids)[None],
        }
        # Omni's names.
        if "video_second_per_grid" in images:
            inputs["second_per_grids"] = images["video_second_per_grid"]
        if "feature_attention_mask" in images:
            inputs["audio_seqlens"] = images["feature_attention_mask"].sum(dim=1)
        planes, _ = model_class.get_rope_index(
            model,
            ids[None],
            **{name: value for name, value in inputs.items() if name in parameters},
        )
        return planes[:, 0]

    return rope_index
