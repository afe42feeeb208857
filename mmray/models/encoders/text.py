"""Text encoders: token ids -> features of each token, or one vector per caption, through transformers' AutoModel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.protocol import Architecture
from mmray.models.weights import add_language_rows, build_hf_encoder, check_vocab_size, load_config, transformer_config

if TYPE_CHECKING:
    from mmray.config import TextTower

WEIGHTS_SETTING = "model.text.weights"
FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "ernie", "albert", "electra", "distilbert")
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
POSITIONS_AFTER_PAD = ("roberta", "xlm-roberta", "camembert")  # position ids start at pad_token_id + 1


def build_text_tower(
    spec: TextTower, vocab_size: int, max_tokens: int, architecture: Architecture = None, language_token: str = ""
) -> HfTextTower:
    """Build the text tower that `spec` names, with its weights.

    vocab_size: tokens of the tokenizer. architecture: see `Architecture`. language_token: model.inputs.language_token;
    pretrained weights get embedding rows for such tokens. Raises UsageError.
    """
    from transformers import AutoConfig, BertConfig

    weights = None
    if architecture:
        config = AutoConfig.for_model(**architecture["text"])
    elif spec.weights == "none" or architecture is not None:
        values = transformer_config(spec) | {"vocab_size": vocab_size, "max_position_embeddings": max_tokens}
        dropouts = {"hidden_dropout_prob": spec.dropout, "attention_probs_dropout_prob": spec.dropout}
        config = BertConfig(**values | dropouts, type_vocab_size=1)
    else:
        weights, config = spec.weights, load_config(WEIGHTS_SETTING, spec.weights, FAMILIES)
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, spec.dropout)
    net = build_hf_encoder(WEIGHTS_SETTING, weights, config)
    if weights is not None:
        add_language_rows(net, vocab_size, language_token)
    hf = net.config
    check_vocab_size(WEIGHTS_SETTING, spec.weights, hf.vocab_size, vocab_size)
    positions = hf.max_position_embeddings - (hf.pad_token_id + 1 if hf.model_type in POSITIONS_AFTER_PAD else 0)
    if positions < max_tokens:
        raise UsageError(
            f"model.inputs.max_tokens: {max_tokens} exceeds the {positions} positions of {spec.weights}; reduce it"
        )
    return HfTextTower(net)


class HfTextTower(nn.Module):
    """An encoder of the BERT family (Devlin et al. 2019); a caption's features are the mean over its tokens."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.width: int = net.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] (1 is a token, right-padded) -> features [B, width]; finite for a row without tokens."""
        return masked_mean(self.features(input_ids, attention_mask), attention_mask)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> features of each token [B, T, width]."""
        # transformers uses a 4-D mask as it is; it would inspect a 2-D one, which synchronises the GPU every step.
        mask = mask_with_first(attention_mask)[:, None, None, :]
        return self.net(input_ids=input_ids, attention_mask=mask).last_hidden_state


def masked_mean(features: Tensor, attention_mask: Tensor) -> Tensor:
    """Features of each token [B, T, W] and mask [B, T] -> mean over the tokens [B, W]."""
    weight = mask_with_first(attention_mask).unsqueeze(-1).to(features.dtype)
    return (features * weight).sum(1) / weight.sum(1)


def mask_with_first(attention_mask: Tensor) -> Tensor:
    """The mask as bool [B, T], with the first token always set, so a row without tokens does not divide by zero."""
    return attention_mask.bool() | (torch.arange(attention_mask.shape[1], device=attention_mask.device) == 0)
