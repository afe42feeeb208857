"""Attention within each row of a packed sequence, registered with transformers.

transformers detects packed rows from positions only if there is neither a mask nor a cache;
otherwise rows attend to each other without a warning. So row boundaries are passed explicitly. It
adds no mask for an attention function that it does not know.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

# Values of `_attn_implementation`. The vision encoders of Qwen pass the boundaries of all images at
# once only to a function with `flash` in its name; they call others for each image.
PACKED_ATTENTION = "mmray_packed"
PACKED_VISION_ATTENTION = "mmray_flash"
HALF = (torch.float16, torch.bfloat16)
# Before, varlen_attn takes as many key heads as heads.
VARLEN_GROUPS_HEADS = torch.__version__ >= "2.12"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = True,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention within each row of a packed sequence; causal unless `is_causal` is False.

    transformers calls it for each attention layer of the language model if `_attn_implementation`
    is `mmray_packed`, and for each of the vision encoders of Qwen (`mmray_flash`), whose rows are
    images.

    Args:
        module: The attention layer; not used.
        query: [1, heads, T, D], where T is the number of tokens of all rows together.
        key: [1, key heads, T, D]; there may be fewer key heads than heads.
        value: [1, key heads, T, D].
        attention_mask: Not used: transformers makes none for this function.
        cu_seq_lens_q: int32 [R + 1], the index of the first token of each of R rows, and then T.
        max_length_q: At least the number of tokens of the longest row.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        dropout: Probability to drop an attention weight.
        is_causal: Whether a token attends only to itself and to tokens before it.

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
        # The kernel needs Ampere or newer.
        is_supported = torch.cuda.get_device_properties(query.device).major >= 8
        if is_supported and query.dtype in HALF and not dropout:
            from torch.nn.attention.varlen import varlen_attn

            options: dict[str, Any] = {"enable_gqa": grouped} if VARLEN_GROUPS_HEADS else {}
            if grouped and not options:
                size = query.shape[1] // key.shape[1]
                key = key.repeat_interleave(size, dim=1)
                value = value.repeat_interleave(size, dim=1)
            # One kernel for all rows, which does not wait for the device.
            output: Any = varlen_attn(
                query[0].transpose(0, 1),
                key[0].transpose(0, 1),
                value[0].transpose(0, 1),
                cu_seq_lens_q,
                cu_seq_lens_q,
                max_length_q,
                max_length_q,
                scale=scaling,
                window_size=(-1, 0 if is_causal else -1),
                **options,
            )
            return output[None], None
    attend = partial(
        F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    if torch.compiler.is_compiling():
        # A graph cannot be split by the values of a tensor; one for each number of rows takes
        # minutes to compile.
        mask = _mask_of_rows(cu_seq_lens_q, query.shape[2], is_causal)
        return attend(query, key, value, attn_mask=mask).transpose(1, 2), None
    sizes = cu_seq_lens_q.diff().tolist()
    rows = zip(
        query.split(sizes, dim=2), key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True
    )
    outputs = [attend(*row, is_causal=is_causal) for row in rows]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _mask_of_rows(cu_seqlens: Tensor, num_tokens: int, is_causal: bool) -> Tensor:
    """Return bool [T, T]: whether a token attends to another one."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens, tokens, right=True)
    mask = row[:, None] == row
    return mask & (tokens[:, None] >= tokens) if is_causal else mask


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(PACKED_VISION_ATTENTION, packed_attention)
