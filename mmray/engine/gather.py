"""Columns of the rows of all ranks, gathered in one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.prefetch import LocalBatch
from mmray.objectives.protocol import Batch, HardNegativeMining, Outputs


@dataclass(frozen=True)
class GatheredOutputs:
    """Outputs of all ranks.

    Attributes:
        counts: Counts of the global and of the local loss and the stop requests, summed over ranks,
            float64 vectors.
        packed: [world_size x (1 + rows), width], for each rank a row with the counts and its rows,
            in which the outputs and `valid` follow one another; a leaf that requires gradients;
            None with a single rank, whose batch has all rows.
        columns: Views of `packed` by name: the argument `gathered` of an objective's
            `compute_loss`; None with a single rank.
        shapes: Shapes of this rank's outputs by name, in the order of `packed`.
    """

    counts: Sequence[Tensor]
    packed: Tensor | None = None
    columns: dict[str, Any] | None = None
    shapes: dict[str, torch.Size] = field(default_factory=dict)


def gather_outputs(
    group: Group,
    embeddings: Outputs,
    names: tuple[str, ...],
    batch: LocalBatch,
    counts: list[Tensor],
) -> GatheredOutputs:
    """Gather outputs of all ranks, padded to `batch.rows` a rank, and sum the counts, in one
    collective.

    Outputs and `valid` become the columns of one matrix, in float32 at least, so that sums over
    ranks do not round to bfloat16. The counts are its first row, because on slow links the number
    of collectives matters more than their size.

    Args:
        embeddings: Outputs of this rank's rows by name, [rows, ...].
        names: Names of those to gather.
        batch: This rank's micro-batches, for `valid` and the padded number of rows.
        counts: Three float64 vectors of this rank: the count (divisor) of the global loss (over
            rows of all ranks), that of the local loss (a sum over rows), and its stop request, [1].

    Returns:
        A GatheredOutputs: `counts` (summed over ranks), and `columns`: the outputs of all ranks by
        name, [G, ...] with G = world_size x `batch.rows` in rank order, `valid` bool [G] (False for
        padding), and `offset` (int), the index of this rank's first row. With a single rank
        `columns` is None.
    """
    if group.world_size == 1:
        return GatheredOutputs(counts)
    outputs = {name: embeddings[name] for name in names}
    dtype = torch.promote_types(torch.float32, outputs[names[0]].dtype)
    valid = concatenate(batch.micro_batches, "valid")
    rows = pack({"valid": valid[:, None], **outputs}, dtype)
    header = torch.cat(counts).to(dtype)
    # A sum of many objectives has more counts than a row has columns.
    rows = F.pad(rows, (0, max(0, len(header) - rows.shape[1])))
    local = torch.cat(
        [
            F.pad(header, (0, rows.shape[1] - len(header)))[None],
            F.pad(rows, (0, 0, 0, batch.rows - len(rows))),
        ]
    )
    packed = group.all_gather(local).requires_grad_()
    by_rank = packed.view(group.world_size, batch.rows + 1, -1)
    summed = by_rank[:, 0, : len(header)].detach().double().sum(0)
    packed_rows = by_rank[:, 1:].flatten(0, 1)
    shapes = shapes_of(outputs)
    columns: dict[str, Any] = dict(unpack(packed_rows[:, 1:], shapes))
    columns |= {"valid": packed_rows[:, 0].detach() > 0, "offset": group.rank * batch.rows}
    return GatheredOutputs(summed.split([len(each) for each in counts]), packed, columns, shapes)


def gather_negative_inputs(group: Group, mining: HardNegativeMining, batch: LocalBatch) -> Batch:
    """Gather the input columns of all ranks from which hard negatives are copied, in one
    collective.

    They are integers, packed next to each other, each as wide as the widest of any rank. Captions
    are trimmed by micro-batch, so those of a rank are padded to its widest first.

    Args:
        mining: Names the columns in `gathered_inputs`, such as `input_ids` [B, T] and `pos` [B].

    Returns:
        Columns by name [world_size x batch.rows, ...], padded with zeros; with a single rank those
        of its rows, without padding of rows.
    """
    columns = {}
    for name in mining.gathered_inputs:
        parts = [micro_batch[name] for micro_batch in batch.micro_batches]
        width = max(part[0].numel() for part in parts)
        columns[name] = torch.cat([_pad(part, len(part), width) for part in parts])
    if group.world_size == 1:
        return columns
    widest = -group.all_reduce_min(-max(column[0].numel() for column in columns.values()))
    columns = {name: _pad(column, batch.rows, widest) for name, column in columns.items()}
    matrices = {name: column.reshape(batch.rows, -1) for name, column in columns.items()}
    gathered = unpack(group.all_gather(pack(matrices, torch.int64)), shapes_of(columns))
    return {name: gathered[name].to(column.dtype) for name, column in columns.items()}


def pack(columns: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate columns [B, ...] of rows to one matrix [B, width], in the order of the dict."""
    return torch.cat([column.flatten(1).to(dtype) for column in columns.values()], dim=1)


def unpack(packed: Tensor, shapes: Mapping[str, torch.Size]) -> Outputs:
    """Return views [R, ...] by name of a packed matrix [R, width], the reverse of `pack`.

    R may differ from the rows that were packed. Further elements of a row are ignored.
    """
    columns = {}
    first = 0
    for name, shape in shapes.items():
        width = shape[1:].numel()
        columns[name] = packed[:, first : first + width].view(-1, *shape[1:])
        first += width
    return columns


def shapes_of(columns: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: column.shape for name, column in columns.items()}


def concatenate(micro_batches: list[Batch], name: str) -> Tensor:
    return torch.cat([micro_batch[name] for micro_batch in micro_batches])


def _pad(column: Tensor, rows: int, width: int) -> Tensor:
    """[B] or [B, T] -> [rows, ...], padded with zeros."""
    if column.ndim == 1:
        return F.pad(column, (0, rows - len(column)))
    return F.pad(column, (0, width - column.shape[1], 0, rows - len(column)))
