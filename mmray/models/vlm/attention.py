"""Causal attention within each row of a packed sequence, registered with transformers.

transformers detects packed rows from positions only if there is neither a mask nor a cache;
otherwise rows attend to each other without a warning. So row boundaries are passed explicitly. It
adds no mask for an attention function that it does not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

PACKED_ATTENTION = "mmray_packed"  # value of `_attn_implementation`
HALF = (torch.float16, torch.bfloat16)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed sequence.

    transformers calls it for each attention layer of the language model if `_attn_implementation`
    is PACKED_ATTENTION.

    Args:
        module: The attention layer; not used.
        query: [1, heads, T, D], where T is the number of tokens of all rows together.
        key: [1, key heads, T, D]; there may be fewer key heads than heads.
        value: [1, key heads, T, D].
        cu_seq_lens_q: int32 [R + 1], the index of the first token of each of R rows, and then T.
        max_length_q: At least the number of tokens of the longest row.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        dropout: Probability to drop an attention weight.

    Returns:
        [1, T, heads, D], and None in place of the attention weights.
    """
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        if query.dtype in HALF and not dropout:
            return (
                _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, grouped),
                None,
            )
    sizes = cu_seq_lens_q.diff().tolist()
    outputs = [
        F.scaled_dot_product_attention(
            rows[0],
            rows[1],
            rows[2],
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        for rows in zip(
            query.split(sizes, dim=2),
            key.split(sizes, dim=2),
            value.split(sizes, dim=2),
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scaling: float | None,
    grouped: bool,
) -> Tensor:
    """One kernel for all rows; does not wait for the device."""
    from torch.nn.attention.varlen import varlen_attn

    output: Any = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    return output[None]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
