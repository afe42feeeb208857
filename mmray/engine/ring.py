"""The loss of all pairs, with the texts of the other ranks coming by one rank at a time instead of all at once.

For step.py, in place of the gather, where an objective is a sum over pairs (sigmoid). Embeddings travel around the ring
of ranks with their gradients and are home again after as many hops as there are ranks. Memory on a rank: its own rows,
one visiting rank's, and `chunk` columns of scores, whatever the number of ranks.
Source: Zhai et al. 2023 (SigLIP, arXiv:2303.15343), section 3.3, with the gradients sent along.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mmray.engine.oom import MemoryVote
from mmray.objectives.protocol import Outputs, Pairwise


def around(
    objective: Pairwise, leaves: Outputs, valid: Tensor, rows: int, factor: Tensor, vote: MemoryVote
) -> tuple[Tensor, dict[str, Tensor], Outputs]:
    """This rank's loss sum, its parts, and the gradient of (all ranks' losses x factor) at its own outputs.

    leaves: outputs of this rank's rows that require gradients. rows: the same on every rank, at least this rank's.
    factor: what the loss is multiplied by before the backward, the loss scale among it. A rank that finds no room hands
    the visitors on as they are, and what it returns is of no use: the others wait for them, until all ranks vote.
    """
    home = {name: leaf for name, leaf in leaves.items() if name not in objective.visiting}
    gradients = {name: torch.zeros_like(leaf) for name, leaf in home.items()}
    sums = {"loss": factor.new_zeros(())}
    visitors = _packed({name: leaves[name].detach() for name in objective.visiting}, valid, rows)

    def receive(visitors: Tensor, own: bool) -> None:
        for first in range(0, rows, objective.chunk):
            chunk = slice(first, min(first + objective.chunk, rows))
            outputs, flags = _unpacked(visitors[chunk], leaves, objective.visiting)
            found, further = objective.pairs(home, valid, outputs, flags, first if own else None)
            asked = {**home, **outputs}
            flat = torch.autograd.grad(found * factor.to(found.dtype), list(asked.values()))
            theirs = _gradients_of(visitors[chunk], leaves, objective.visiting)
            for name, gradient in zip(asked, flat, strict=True):
                (gradients if name in home else theirs)[name].add_(gradient)
            for name, value in {"loss": found.detach(), **further}.items():
                sums[name] = sums[name] + value if name in sums else value

    for hop in range(vote.group.world):
        vote.run(partial(receive, visitors, own=hop == 0))
        visitors = vote.group.shift(visitors)
    returned = _gradients_of(visitors, leaves, objective.visiting)
    loss = sums.pop("loss")
    return loss, sums, gradients | {name: returned[name][: len(valid)] for name in objective.visiting}


def _packed(outputs: Outputs, valid: Tensor, rows: int) -> Tensor:
    """Visiting rows side by side with their gradients so far, and `valid`: [rows, 2 x width + 1], one message a hop."""
    values = torch.cat([output.flatten(1) for output in outputs.values()], dim=1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    packed = torch.cat([values, torch.zeros_like(values), valid.to(values.dtype)[:, None]], dim=1)
    return F.pad(packed, (0, 0, 0, rows - len(packed)))


def _unpacked(visitors: Tensor, like: Outputs, names: tuple[str, ...]) -> tuple[Outputs, Tensor]:
    """The visiting outputs, as leaves of a graph of their own, and their `valid`."""
    width = (visitors.shape[1] - 1) // 2
    outputs = _split(visitors[:, :width], like, names)
    return {name: output.clone().requires_grad_() for name, output in outputs.items()}, visitors[:, -1] > 0


def _gradients_of(visitors: Tensor, like: Outputs, names: tuple[str, ...]) -> Outputs:
    """Views of the gradients that travel with the rows."""
    width = (visitors.shape[1] - 1) // 2
    return _split(visitors[:, width : 2 * width], like, names)


def _split(columns: Tensor, like: Outputs, names: tuple[str, ...]) -> Outputs:
    parts = columns.split([like[name][0].numel() for name in names], dim=1)
    return {name: part.view(-1, *like[name].shape[1:]) for name, part in zip(names, parts, strict=True)}
