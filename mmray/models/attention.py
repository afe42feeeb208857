"""Self-attention of transformers' CLIP and SigLIP with one matrix product for q, k and v."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = ("CLIPAttention", "SiglipAttention")  # classes of transformers, not imported here


def fuse_projections(model: nn.Module) -> None:
    """Compute q, k and v in one matrix product in each attention layer of transformers' CLIP and
    SigLIP.

    The weights stay three parameters, which are concatenated in each forward; under autocast they
    would be copied anyway. Layers with dropout, or with adapters on a projection, are unchanged.
    Projections that are replaced later, as `train.float8` does, are called one by one.

    Args:
        model: The model; the classes of its layers are replaced in place.
    """
    for layer in model.modules():
        if type(layer).__name__ in CLASSES and _is_plain(layer):
            layer.__class__ = FusedAttention


def _is_plain(attention: Any) -> bool:
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return not attention.dropout and all(type(part) is nn.Linear for part in projections)


class FusedAttention(nn.Module):
    """Self-attention with one matrix product for q, k and v.

    It takes the place of transformers' CLIPAttention or SiglipAttention and has the same weights
    and settings.

    Forward takes hidden states [B, T, W] and returns hidden states [B, T, W] and None.

    Attributes:
        num_heads, q_proj, k_proj, v_proj, out_proj: As in the layer that it replaces.
    """

    num_heads: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, is_causal: bool = False, **_: Any
    ) -> tuple[Tensor, None]:
        """Attend to all tokens, or with `is_causal` to earlier ones.

        Args:
            hidden_states: [B, T, W], where W is the hidden size.
            attention_mask: Must be None, because neither the image nor the text encoder has a
                padding mask.
            is_causal: Mask later tokens.

        Returns:
            Hidden states [B, T, W], and None in place of the attention weights.
        """
        assert attention_mask is None
        projections = self.q_proj, self.k_proj, self.v_proj
        projected: Iterable[Tensor]
        if type(self.q_proj) is nn.Linear:
            weight = torch.cat([projection.weight for projection in projections])
            bias = torch.cat([projection.bias for projection in projections])
            projected = F.linear(hidden_states, weight, bias).chunk(3, dim=2)
        else:  # layers that do not compute the plain product, such as those of `train.float8`
            projected = [projection(hidden_states) for projection in projections]
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in projected
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None
