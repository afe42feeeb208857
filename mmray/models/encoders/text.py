"""Text encoders: token ids to one feature vector a caption, before the projection into the shared space.

The sample's journey: data/text.py has turned captions into padded ids; the tower here turns them into features
[B, width]. transformers is imported when a tower is built, not with this file: it costs seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmray.errors import UsageError
from mmray.models.weights import add_language_rows, load_complete, load_local_or_hub

if TYPE_CHECKING:
    from transformers import BertConfig, PreTrainedConfig, PreTrainedModel

    from mmray.config import TextTower

SETTING = "model.text.weights"
FEED_FORWARD = 4  # width of the feed-forward layer over the width of a token, as in BERT
_BERTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
# Encoders of the same seam (ids and a mask in, features of each token out), by model_type: their names for dropout.
FAMILIES = {
    "bert": _BERTS,
    "roberta": _BERTS,
    "xlm-roberta": _BERTS,
    "camembert": _BERTS,
    "ernie": _BERTS,
    "albert": _BERTS,
    "electra": _BERTS,
    "distilbert": ("dropout", "attention_dropout"),
}
WITHOUT_POOLER = ("electra", "distilbert")  # have no pooling layer to leave out
POSITIONS_AFTER_PAD = ("roberta", "xlm-roberta", "camembert")  # count positions from behind the id of padding


def build_text_tower(
    spec: TextTower, vocab_size: int, max_tokens: int, shape: dict[str, Any] | None = None, language_token: str = ""
) -> HfTextTower:
    """The text tower that `spec` names, with its weights.

    vocab_size: tokens the tokenizer has. shape: a configuration as `HfTextTower.shape()` gave it; the tower is built to
    it without looking for weights, which the caller then loads. language_token: that of the model's inputs; saved
    weights get rows for such tokens. Raises UsageError naming the setting.
    """
    from transformers import AutoConfig

    if shape is not None:
        bert = _from_config(AutoConfig.for_model(**{"model_type": "bert", **shape}))
    elif spec.weights == "none":
        bert = _from_config(_bert_config(spec, vocab_size, max_tokens))
    else:
        bert = add_language_rows(_from_pretrained(spec), vocab_size, language_token)
    _check_compatible(bert.config, vocab_size, max_tokens, spec)
    return HfTextTower(bert)


class HfTextTower(nn.Module):
    """transformers' BERT (Devlin et al. 2019), or its like, with the mean over a caption's tokens as its features."""

    def __init__(self, bert: PreTrainedModel) -> None:
        super().__init__()
        self.bert: Any = bert  # of whatever family: the name is in checkpoints
        self.width: int = self.bert.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] (1 is a token, right padded) -> features [B, width]; a row without tokens is finite."""
        return self.pool(self.words(input_ids, attention_mask), attention_mask)

    def words(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> features of each token [B, T, width]."""
        # A four-dimensional mask is taken as it is; a flat one would be looked at, which makes a GPU wait each step.
        mask = mask_with_first(attention_mask)[:, None, None, :]
        hidden: Tensor = self.bert(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return hidden

    def pool(self, words: Tensor, attention_mask: Tensor) -> Tensor:
        """Features of each token [B, T, width] -> of each caption [B, width]."""
        weight = mask_with_first(attention_mask).unsqueeze(-1).to(words.dtype)
        return (words * weight).sum(1) / weight.sum(1)

    def shape(self) -> dict[str, Any]:
        """The configuration as plain values, from which `build_text_tower` makes the same tower."""
        values: dict[str, Any] = self.bert.config.to_dict()
        return values


def mask_with_first(attention_mask: Tensor) -> Tensor:
    """Tokens that are looked at, bool [B, T]; in a row without any it is the first, so that nothing divides by zero."""
    return attention_mask.bool() | (torch.arange(attention_mask.shape[1], device=attention_mask.device) == 0)


def random_init_config(spec: TextTower, vocab_size: int, max_tokens: int) -> dict[str, Any]:
    """The shape of the tower that the spec describes without regard to its weights."""
    values: dict[str, Any] = _bert_config(spec, vocab_size, max_tokens).to_dict()
    return values


def _bert_config(spec: TextTower, vocab_size: int, max_tokens: int) -> BertConfig:
    from transformers import BertConfig

    if spec.width % spec.heads:
        raise UsageError(
            f"model.text.heads: width {spec.width} cannot be shared out over {spec.heads} heads; "
            f"take a number of heads that divides model.text.width"
        )
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=spec.width,
        num_hidden_layers=spec.depth,
        num_attention_heads=spec.heads,
        intermediate_size=FEED_FORWARD * spec.width,
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
    """An encoder from a directory, the hub's cache or the hub; one not whole, or not like BERT, is a UsageError."""
    from transformers import AutoModel, BertConfig

    found = load_local_or_hub(SETTING, spec.weights, BertConfig.get_config_dict)[0].get("model_type")
    if found not in FAMILIES:
        raise UsageError(
            f"model.text.weights: {spec.weights} holds a model of type {found!r}; a text tower is one of "
            f"{', '.join(FAMILIES)}"
        )
    options = {"attn_implementation": "sdpa", **_pooler_option(found), **dict.fromkeys(FAMILIES[found], spec.dropout)}
    loaded: PreTrainedModel = load_complete(SETTING, spec.weights, AutoModel.from_pretrained, found, **options)
    return loaded


def _check_compatible(config: PreTrainedConfig, vocab_size: int, max_tokens: int, spec: TextTower) -> None:
    """Every id and every position of the data has its row in the embeddings."""
    if config.vocab_size < vocab_size:
        raise UsageError(
            f"model.text.weights: {spec.weights}: {config.vocab_size} rows of embedding are too few for a tokenizer of "
            f"{vocab_size} tokens; take the tokenizer of the weights (model.inputs.tokenizer)"
        )
    positions = config.max_position_embeddings
    if config.model_type in POSITIONS_AFTER_PAD:
        positions -= config.pad_token_id + 1
    if positions < max_tokens:
        raise UsageError(
            f"model.inputs.max_tokens: {max_tokens} is more than the {positions} positions of "
            f"{spec.weights}; take at most that many"
        )
