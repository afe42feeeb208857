"""Text encoders: token ids -> features of each token, or one vector per caption, through transformers' AutoModel.

transformers is imported when a tower is built, because the import takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.weights import add_language_rows, load_complete, load_local_or_hub, transformer_config

if TYPE_CHECKING:
    from transformers import BertConfig, PreTrainedConfig, PreTrainedModel

    from mmray.config import TextTower

WEIGHTS_SETTING = "model.text.weights"
_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
# Dropout settings of the supported encoders, by model_type.
FAMILIES = {
    "bert": _BERT_DROPOUT,
    "roberta": _BERT_DROPOUT,
    "xlm-roberta": _BERT_DROPOUT,
    "camembert": _BERT_DROPOUT,
    "ernie": _BERT_DROPOUT,
    "albert": _BERT_DROPOUT,
    "electra": _BERT_DROPOUT,
    "distilbert": ("dropout", "attention_dropout"),
}
WITHOUT_POOLER = ("electra", "distilbert")  # have no add_pooling_layer option
POSITIONS_AFTER_PAD = ("roberta", "xlm-roberta", "camembert")  # position ids start at pad_token_id + 1


def build_text_tower(
    spec: TextTower, vocab_size: int, max_tokens: int, config: dict[str, Any] | None = None, language_token: str = ""
) -> HfTextTower:
    """Build the text tower that `spec` names, with its weights.

    vocab_size: tokens of the tokenizer. config: `HfTextTower.config()` of a tower to rebuild without weights.
    language_token: model.inputs.language_token; pretrained weights get embedding rows for such tokens. Raises
    UsageError.
    """
    from transformers import AutoConfig

    if config is not None:
        net = _from_config(AutoConfig.for_model(**{"model_type": "bert", **config}))
    elif spec.weights == "none":
        net = _from_config(_bert_config(spec, vocab_size, max_tokens))
    else:
        net = add_language_rows(_from_pretrained(spec), vocab_size, language_token)
    _check_compatible(net.config, vocab_size, max_tokens, spec)
    return HfTextTower(net)


class HfTextTower(nn.Module):
    """An encoder of the BERT family (Devlin et al. 2019); a caption's features are the mean over its tokens."""

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.net: Any = net
        self.width: int = self.net.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] (1 is a token, right-padded) -> features [B, width]; finite for a row without tokens."""
        return self.pool(self.features(input_ids, attention_mask), attention_mask)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> features of each token [B, T, width]."""
        # transformers uses a 4-D mask as it is; it would inspect a 2-D one, which synchronises the GPU every step.
        mask = mask_with_first(attention_mask)[:, None, None, :]
        hidden: Tensor = self.net(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return hidden

    def pool(self, features: Tensor, attention_mask: Tensor) -> Tensor:
        """Features of each token [B, T, width] -> mean over the tokens [B, width]."""
        weight = mask_with_first(attention_mask).unsqueeze(-1).to(features.dtype)
        return (features * weight).sum(1) / weight.sum(1)

    def config(self) -> dict[str, Any]:
        """The transformers config as JSON values."""
        values: dict[str, Any] = self.net.config.to_dict()
        return values


def mask_with_first(attention_mask: Tensor) -> Tensor:
    """The mask as bool [B, T], with the first token always set, so a row without tokens does not divide by zero."""
    return attention_mask.bool() | (torch.arange(attention_mask.shape[1], device=attention_mask.device) == 0)


def random_init_config(spec: TextTower, vocab_size: int, max_tokens: int) -> dict[str, Any]:
    """Config of a tower with random weights in the shape of the settings."""
    values: dict[str, Any] = _bert_config(spec, vocab_size, max_tokens).to_dict()
    return values


def _bert_config(spec: TextTower, vocab_size: int, max_tokens: int) -> BertConfig:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=vocab_size,
        **transformer_config(spec),
        hidden_dropout_prob=spec.dropout,
        attention_probs_dropout_prob=spec.dropout,
        max_position_embeddings=max_tokens,
        type_vocab_size=1,
    )


def _from_config(config: Any) -> PreTrainedModel:
    from transformers import MODEL_MAPPING

    config._attn_implementation = "sdpa"
    classes: Any = MODEL_MAPPING
    model: PreTrainedModel = classes[type(config)](config, **_pooler_option(config.model_type))
    return model


def _pooler_option(family: str) -> dict[str, bool]:
    return {} if family in WITHOUT_POOLER else {"add_pooling_layer": False}


def _from_pretrained(spec: TextTower) -> PreTrainedModel:
    """Load an encoder from a directory, the hub cache or the hub. Raises UsageError."""
    from transformers import AutoModel, BertConfig

    model_type = load_local_or_hub(WEIGHTS_SETTING, spec.weights, BertConfig.get_config_dict)[0].get("model_type")
    if model_type not in FAMILIES:
        raise UsageError(
            f"{WEIGHTS_SETTING}: {spec.weights} holds a model of type {model_type!r}; supported are "
            f"{', '.join(FAMILIES)}"
        )
    options = {
        "attn_implementation": "sdpa",
        **_pooler_option(model_type),
        **dict.fromkeys(FAMILIES[model_type], spec.dropout),
    }
    loaded: PreTrainedModel = load_complete(
        WEIGHTS_SETTING, spec.weights, AutoModel.from_pretrained, model_type, **options
    )
    return loaded


def _check_compatible(config: PreTrainedConfig, vocab_size: int, max_tokens: int, spec: TextTower) -> None:
    """Raise UsageError if the embeddings have too few rows for the vocabulary or the positions."""
    if config.vocab_size < vocab_size:
        raise UsageError(
            f"{WEIGHTS_SETTING}: {spec.weights} has {config.vocab_size} embedding rows, too few for a tokenizer of "
            f"{vocab_size} tokens; use the tokenizer of the weights (model.inputs.tokenizer)"
        )
    positions = config.max_position_embeddings
    if config.model_type in POSITIONS_AFTER_PAD:
        positions -= config.pad_token_id + 1
    if positions < max_tokens:
        raise UsageError(
            f"model.inputs.max_tokens: {max_tokens} exceeds the {positions} positions of {spec.weights}; set it to at "
            f"most {positions}"
        )
