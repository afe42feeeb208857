"""Cross-entropy over the positions with a target, in chunks, so that the logits of all of them are
never in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 << 20  # size of the float32 logits of a chunk


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    target_weights: Tensor,
    losses: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses of N targets, and how many have the largest logit.

    Logits are computed in chunks. Gradients are computed in the forward, because the backward
    would need the logits again.

    Args:
        hidden: Last hidden states [N, H]; N may be 0.
        weight: Weight of the output layer [V, H].
        targets: Token ids, int64 [N].
        target_weights: Factors of the losses, float32 [N].
        losses: Float32 [N], which gets the weighted losses; None: not needed.
    """
    dtype = _matrix_dtype(hidden, weight)
    chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    needs_grad = torch.is_grad_enabled()
    loss, correct = _ChunkedCrossEntropy.apply(
        hidden, weight, targets, target_weights, losses, chunk, dtype, needs_grad
    )
    return loss, correct


def chunked_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities [N] of the targets, at least float32.

    The logits of a chunk are computed again in the backward, so all of them are never in memory.
    Arguments are those of `chunked_cross_entropy`.
    """
    dtype = _matrix_dtype(hidden, weight)
    chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    # A chunk of no targets keeps the graph of the model.
    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat(
        [checkpoint(_log_probs, states, weight, ids, dtype, **options) for states, ids in parts]
    )


def _log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    precise = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = (hidden.to(dtype) @ weight.to(dtype).T).to(precise)
        return -F.cross_entropy(logits, targets, reduction="none")


def _matrix_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return weight.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        target_weights: Tensor,
        losses: Tensor | None,
        chunk: int,
        dtype: torch.dtype,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        matrix = weight.to(dtype)
        loss = hidden.new_zeros((), dtype=precise)
        correct = torch.zeros((), dtype=torch.long, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if needs_grad and ctx.needs_input_grad[0] else None
        grad_weight = None
        if needs_grad and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, precise))
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(targets), chunk):
                rows = slice(first, first + chunk)
                states = hidden[rows].to(dtype)
                logits = (states @ matrix.T).to(precise)
                factors = target_weights[rows].to(precise)
                weighted = factors * F.cross_entropy(logits, targets[rows], reduction="none")
                loss += weighted.sum()
                if losses is not None:
                    losses[rows] = weighted.detach()
                correct += (logits.argmax(dim=1) == targets[rows]).sum()
                if grad_hidden is None and grad_weight is None:
                    continue
                grad = torch.softmax(logits, dim=1)
                grad.scatter_add_(
                    1, targets[rows, None], grad.new_full((1, 1), -1.0).expand(len(grad), 1)
                )
                grad = grad.mul_(factors[:, None]).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad @ matrix).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += (grad.T @ states).to(grad_weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None
