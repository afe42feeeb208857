"""Layers of transformers' CLIP and SigLIP with fewer GPU kernels: one matrix product for q, k and
v, and gradients of biases that torch.compile fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# classes of transformers, not imported here
ATTENTION_CLASSES = ("CLIPAttention", "SiglipAttention", "Siglip2Attention")
MLP_CLASSES = ("CLIPMLP", "SiglipMLP", "Siglip2MLP")


def fuse_projections(model: nn.Module) -> None:
    """Compute q, k and v in one product in attention layers of transformers' CLIP and SigLIP, and
    gradients of biases in their image encoders as `row_linear` does, in place.

    The weights stay three parameters, which are concatenated in each forward. Layers with dropout
    or adapters are unchanged; projections that are replaced later are called one by one.
    """
    for layer in model.modules():
        if not type(layer).__module__.startswith("transformers."):
            continue  # a user's class of the same name may compute something else
        name = type(layer).__name__
        if name in ATTENTION_CLASSES and _is_plain(layer):
            layer.__class__ = FusedImageAttention if _encodes_images(layer) else FusedAttention
        elif name in MLP_CLASSES and _encodes_images(layer):
            layer.__class__ = ImageMLP


def _is_plain(attention: nn.Module) -> bool:
    projections = map(attention.get_submodule, ("q_proj", "k_proj", "v_proj"))
    return not attention.dropout and all(type(part) is nn.Linear for part in projections)


def _encodes_images(layer: nn.Module) -> bool:
    return type(layer.config).__name__.endswith("VisionConfig")


class _SumBiasByRow(torch.autograd.Function):
    """Identity on the output [B, T, W] of a linear layer; backward sums the bias gradient."""

    @staticmethod
    def forward(_: object, output: Tensor, bias: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        return gradient, gradient.sum(1, dtype=dtype).sum(0)


def row_linear(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear layer [B, T, W_in] -> [B, T, W_out] whose bias gets its gradient from sums
    over the tokens of each row.

    torch.compile computes these sums in the kernel that computes the gradient of the output, if the
    number of tokens is static, as it is for images. The sum over all tokens of all rows, as of
    F.linear, is a kernel of its own, which reads that gradient again.
    """
    return _SumBiasByRow.apply(F.linear(hidden, weight, bias.detach()), bias)


class ImageMLP(nn.Module):
    """The MLP of an image encoder, whose first layer is a `row_linear`.

    It takes the place of transformers' CLIPMLP or SiglipMLP and has the same weights and settings.

    Forward takes hidden states [B, T, W] and returns hidden states [B, T, W].

    Attributes:
        fc1, activation_fn, fc2: As in the layer that it replaces.
    """

    fc1: nn.Linear
    activation_fn: Callable[[Tensor], Tensor]
    fc2: nn.Linear

    def forward(self, hidden_states: Tensor) -> Tensor:
        if type(self.fc1) is nn.Linear:
            hidden_states = row_linear(hidden_states, self.fc1.weight, self.fc1.bias)
        else:  # with adapters or in float8
            hidden_states = self.fc1(hidden_states)
        return self.fc2(self.activation_fn(hidden_states))


class FusedAttention(nn.Module):
    """Self-attention with one matrix product for q, k and v.

    It takes the place of transformers' CLIPAttention or SiglipAttention and has the same weights
    and settings.

    Attributes:
        num_heads, q_proj, k_proj, v_proj, out_proj: As in the layer that it replaces.
        linear: Computes q, k and v from (hidden states, weight, bias): F.linear.
    """

    num_heads: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    linear: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(F.linear)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Attend to all tokens, to those of a mask, or with `is_causal` to earlier ones.

        Args:
            hidden_states: [B, T, W], where W is the hidden size.
            attention_mask: bool [B, 1, 1, T], True for the tokens that are attended to, of images
                with padding; None for others, and for texts.
            is_causal: Mask later tokens.

        Returns:
            Hidden states [B, T, W], and None in place of the attention weights.
        """
        projections = self.q_proj, self.k_proj, self.v_proj
        projected: Iterable[Tensor]
        if type(self.q_proj) is nn.Linear:
            weight = torch.cat([projection.weight for projection in projections])
            bias = torch.cat([projection.bias for projection in projections])
            # Split first: backward then concatenates gradients [B, T, W], and fuses the sum over T.
            projected = self.linear(hidden_states, weight, bias).chunk(3, dim=2)
        else:  # layers that do not compute the plain product, such as those of `train.float8`
            projected = [projection(hidden_states) for projection in projections]
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in projected
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=is_causal
        )
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


class FusedImageAttention(FusedAttention):
    """FusedAttention of an image encoder, whose number of tokens is fixed."""

    linear = staticmethod(row_linear)
