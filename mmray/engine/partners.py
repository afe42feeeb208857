"""Partners for rows: what the ranks lend each other so that each row can be given another row's caption.

For step.py, between its two passes, beside gather.py. What travels is token ids and positions; never pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.gather import Gathered
from mmray.engine.prefetch import Share
from mmray.objectives.protocol import Batch, Mining, Outputs


@torch.no_grad()
def with_partners(
    mining: Mining, share: Share, embedded: list[Outputs], gathered: Gathered, lent: Batch
) -> list[Batch]:
    """The share's micro-batches with the columns that `mining` finds for their rows."""
    if gathered.everyone is None:
        known = {name: torch.cat([outputs[name] for outputs in embedded]) for name in mining.looks_at}
        known |= {**lent, "valid": torch.cat([micro["valid"] for micro in share.micros])}
        offset = 0
    else:
        known = {**{name: gathered.everyone[name].detach() for name in mining.looks_at}, **lent}
        known |= {"valid": gathered.everyone["valid"]}
        offset = gathered.everyone["offset"]
    micros = []
    for micro, outputs in zip(share.micros, embedded, strict=True):
        micros.append(micro | mining.mine(outputs, micro, {**known, "offset": offset}))
        offset += len(micro["valid"])
    return micros


def borrowed(group: Group, mining: Mining, share: Share) -> Batch:
    """Columns of the batch that partners lend, of all ranks, each rank's padded to `share.rows`; in one collective.

    They are whole numbers, and go packed side by side, each as wide as the widest of any rank.
    """
    columns = {name: _joined([micro[name] for micro in share.micros]) for name in mining.borrows}
    if group.world == 1:
        return columns
    widest = -group.smallest(-max(column[0].numel() for column in columns.values()))
    filled = [_filled(column, share.rows, widest) for column in columns.values()]
    packed = torch.cat([column.long().reshape(share.rows, -1) for column in filled], dim=1)
    everyone = group.gather(packed).split([column[0].numel() for column in filled], dim=1)
    return {
        name: part.reshape(-1, *column.shape[1:]).to(column.dtype)
        for name, column, part in zip(columns, filled, everyone, strict=True)
    }


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows of all micro-batches, the narrow ones (captions are trimmed) filled up with zeros."""
    widest = max(part[0].numel() for part in parts)
    return torch.cat([_filled(part, len(part), widest) for part in parts])


def _filled(column: Tensor, rows: int, width: int) -> Tensor:
    """[B] or [B, T] -> [rows, ...], zeros where there was nothing."""
    if column.ndim == 1:
        return F.pad(column, (0, rows - len(column)))
    return F.pad(column, (0, width - column.shape[1], 0, rows - len(column)))
