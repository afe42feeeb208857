"""Text encoders: token ids -> features of each token.

Pretrained ones are built by transformers' AutoModel. One that is trained from random weights needs
only torch, because importing transformers takes a second or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.builtin import HF_TEXT_TYPES, POSITIONS_AFTER_PAD
from mmray.errors import UsageError
from mmray.models.protocol import PRETRAINED, WeightSource
from mmray.models.weights import (
    build_hf_encoder,
    check_vocab_size,
    encoder_config,
    set_dropout,
    transformer_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmray.config import TextTower
    from mmray.config.model_kinds import AudioTower, FrameTransformer

WEIGHTS_SETTING = "model.text.weights"
INIT_STD = 0.02  # as in BERT


def build_text_tower(
    spec: TextTower,
    vocab_size: int,
    max_tokens: int,
    source: WeightSource = PRETRAINED,
) -> HfTextTower | TextTransformer:
    """Build the text tower that `spec` names, with its weights.

    Args:
        spec: The `model.text` section. `weights` are `none`, a folder saved by transformers, or a
            hub name.
        vocab_size: Number of tokens of the tokenizer.
        max_tokens: Maximum number of tokens of a text.
        source: Its part `text` is the transformers config of the tower, if it has one.

    Returns:
        A module from token ids and mask, int64 [B, T], to features of each token [B, T, width] and
        the mask.

    Raises:
        UsageError: The weights cannot be read, do not suit the tokenizer, or have too few
            positions.
    """
    if spec.weights == "none" and "text" not in source.saved:
        return TextTransformer(spec, vocab_size, max_tokens)
    weights = spec.weights if source.pretrained else None
    if source.pretrained or "text" in source.saved:
        config = encoder_config("text", WEIGHTS_SETTING, spec.weights, HF_TEXT_TYPES, source)
    else:
        from transformers import BertConfig

        sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_position_embeddings": max_tokens}
        config = BertConfig(**transformer_config(spec), **sizes, type_vocab_size=1)
    if "text" not in source.saved:
        set_dropout(config, spec.dropout)
    net = build_hf_encoder(WEIGHTS_SETTING, weights, config)
    hf = net.config
    check_vocab_size(WEIGHTS_SETTING, spec.weights, hf.vocab_size, vocab_size)
    positions = hf.max_position_embeddings - (
        hf.pad_token_id + 1 if hf.model_type in POSITIONS_AFTER_PAD else 0
    )
    if positions < max_tokens:
        raise UsageError(
            f"model.inputs.max_tokens: {max_tokens} exceeds the {positions} positions of "
            f"{spec.weights}; reduce it"
        )
    return HfTextTower(net)


class HfTextTower(nn.Module):
    """An encoder of the BERT family (Devlin et al. 2019).

    Forward takes token ids and an attention mask (1 for a token, 0 for padding), both int64 [B, T],
    right-padded, and returns features of each token [B, T, width], not normalized, and the mask.

    Args:
        net: The encoder of transformers, without a pooler: called with `input_ids` and
            `attention_mask`, returns an output with `last_hidden_state` [B, T, width].
    """

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.net = net
        self.width = net.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        # transformers uses a 4-D mask as it is; it would inspect a 2-D one, which synchronizes the
        # GPU every step.
        mask = mask_with_first(attention_mask)[:, None, None, :]
        hidden = self.net(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return hidden, attention_mask


class TextTransformer(nn.Module):
    """BERT's encoder in plain torch, with its initialisation, without token types.

    Forward takes token ids and an attention mask (1 for a token, 0 for padding), both int64 [B, T],
    right-padded, and returns features of each token [B, T, width], not normalized, and the mask.

    Args:
        spec: The `model.text` section: width, depth, heads and dropout.
        vocab_size: Rows of the token embedding.
        max_tokens: Maximum number of tokens of a text.
    """

    def __init__(self, spec: TextTower, vocab_size: int, max_tokens: int) -> None:
        super().__init__()
        self.width = spec.width
        self.tokens = nn.Embedding(vocab_size, spec.width)
        self.positions = nn.Embedding(max_tokens, spec.width)
        self.norm = nn.LayerNorm(spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.layers = TransformerLayers(spec.width, spec)
        init_as_bert(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(
            self.norm(self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]])
        )
        return self.layers(hidden, attention_mask), attention_mask


def init_as_bert(module: nn.Module) -> None:
    """Draw the weights of linear layers and embeddings again, and set biases to zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=INIT_STD)
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)


class TransformerLayers(nn.ModuleList):
    """Layers of self-attention and MLP.

    Forward takes hidden states [B, T, W] and their mask int64 [B, T], 0 for padding, and returns
    hidden states [B, T, W].

    Args:
        width: Size W of the hidden states.
        spec: Section with depth, heads and dropout.
    """

    def __init__(self, width: int, spec: TextTower | AudioTower | FrameTransformer) -> None:
        super().__init__(
            TransformerLayer(width, spec.heads, spec.dropout) for _ in range(spec.depth)
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        attended = mask_with_first(mask)[:, None, None, :]
        for layer in self:
            hidden = layer(hidden, attended)
        return hidden


class TransformerLayer(nn.Module):
    """Self-attention and MLP, each followed by its norm (Vaswani et al. 2017, arXiv:1706.03762).

    Not nn.TransformerEncoderLayer: its fast path rounds differently in evaluation, and ignores
    adapters.

    Forward takes hidden states [B, T, W] and a mask bool [B, 1, 1, T], True for tokens that are
    attended to, and returns hidden states [B, T, W].

    Args:
        width: Size of the hidden states.
        heads: Number of attention heads, which divides the width.
        dropout: Dropout rate of the attention weights, and of the outputs of attention and MLP.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(hidden).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        hidden = self.attention_norm(
            hidden + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        )
        return self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))


def masked_mean(features: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the mean features [B, W] of the tokens of each row, which always include the first
    position, so that a row without tokens is finite.
    """
    weight = mask_with_first(attention_mask).unsqueeze(-1).to(features.dtype)
    return (features * weight).sum(1) / weight.sum(1)


def mask_with_first(attention_mask: Tensor) -> Tensor:
    """Return an attention mask as bool [B, T] in which the first position is always True, so that a
    row without tokens does not divide by zero.
    """
    return attention_mask.bool() | (
        torch.arange(attention_mask.shape[1], device=attention_mask.device) == 0
    )


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """Return a mask int64 [B, size]: 1 for the first positions of each row, 0 for padding."""
    return (torch.arange(size, device=lengths.device) < lengths[:, None]).long()
