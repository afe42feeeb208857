"""The rows of all ranks beside this rank's own: packed, gathered in one collective, unpacked again.

step.py asks here for what an objective whose rows meet must see: the coupled outputs of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.collectives import Group
from mmray.engine.prefetch import Share
from mmray.objectives.protocol import Batch, Outputs


@dataclass(frozen=True)
class Gathered:
    """The coupled outputs of all ranks. Alone, `packed` and `everyone` are None: the rows of the batch are everyone."""

    totals: Tensor  # float64, the sum of what the ranks brought as `local`
    packed: Tensor | None = None  # [world x (1 + rows), columns], a leaf that takes gradients
    everyone: dict[str, Any] | None = None  # as Objective.measure wants it, views of `packed`
    shapes: dict[str, torch.Size] | None = None  # of this rank's coupled outputs, and their order in the columns

    def gradient_or_zeros(self, found: Tensor | None) -> Tensor:
        """The gradient of `packed`, zeros where this rank had no room to find it: its partners wait for some."""
        if self.packed is None:
            return self.totals
        return torch.zeros_like(self.packed) if found is None else found

    def unpacked(self, gradient: Tensor) -> Outputs:
        """This rank's part [1 + rows, columns] as gradients of its coupled outputs; empty when alone."""
        if self.shapes is None:
            return {}
        widths = [prod(shape[1:]) for shape in self.shapes.values()]
        parts = gradient[1:, : sum(widths)].split(widths, dim=1)
        return {
            name: part[: shape[0]].reshape(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def row_values(share: Share) -> Batch:
    """The tensors of a share that hold one value a row, over all its micro-batches."""
    names = [name for name, tensor in share.micros[0].items() if tensor.ndim == 1]
    return {name: torch.cat([micro[name] for micro in share.micros]) for name in names}


def gather_outputs(
    group: Group, embedded: list[Outputs], share: Share, local: Tensor, coupled: tuple[str, ...]
) -> Gathered:
    """The coupled outputs of all ranks, padded to `share.rows` a rank, and the sum of `local`, in one collective.

    They go packed side by side with `valid`, in float32 at least, so that sums over ranks do not round to bfloat16;
    `local` rides along as a first row, for on slow links the number of collectives counts, not their size.
    """
    if group.world == 1:
        return Gathered(local)
    outputs = {name: torch.cat([part[name] for part in embedded]) for name in coupled}
    columns = [output.flatten(1) for output in outputs.values()]
    dtype = torch.promote_types(torch.float32, columns[0].dtype)
    valid = torch.cat([micro["valid"] for micro in share.micros])
    rows = torch.cat([*(column.to(dtype) for column in columns), valid.to(dtype)[:, None]], dim=1)
    rows = F.pad(rows, (0, max(0, len(local) - rows.shape[1])))  # a sum of many objectives brings many counts
    header = F.pad(local.to(dtype), (0, rows.shape[1] - len(local)))[None]
    packed = group.gather(torch.cat([header, F.pad(rows, (0, 0, 0, share.rows - len(rows)))])).requires_grad_()
    by_rank = packed.view(group.world, share.rows + 1, -1)
    totals = by_rank[:, 0, : len(local)].detach().double().sum(0)
    widths = [column.shape[1] for column in columns]
    *parts, flags, _ = by_rank[:, 1:].flatten(0, 1).split([*widths, 1, rows.shape[1] - sum(widths) - 1], dim=1)
    everyone: dict[str, Any] = {
        name: part.reshape(-1, *output.shape[1:]) for (name, output), part in zip(outputs.items(), parts, strict=True)
    }
    everyone |= {"valid": flags[:, 0].detach() > 0, "offset": group.rank * share.rows}
    return Gathered(totals, packed, everyone, {name: output.shape for name, output in outputs.items()})
