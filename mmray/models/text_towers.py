"""Text encoders: token ids to one feature vector a caption, before the projection into the shared space.

The sample's journey: data/text.py has turned captions into padded ids; the tower here turns them into features
[B, width]. transformers is imported when a tower is built, not with this file: it costs seconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mmray.errors import UsageError

if TYPE_CHECKING:
    from transformers import BertConfig, BertModel

    from mmray.config import TextTower

FEED_FORWARD = 4  # width of the feed-forward layer over the width of a token, as in BERT


def build_text_tower(
    spec: TextTower, vocab_size: int, max_tokens: int, shape: dict[str, Any] | None = None
) -> BertTower:
    """The text tower that `spec` names, with its weights.

    vocab_size: tokens the tokenizer has. shape: a BertConfig as `BertTower.shape()` gave it; the tower is built to it
    without looking for weights, which the caller then loads. Raises UsageError naming the setting.
    """
    from transformers import BertConfig

    if shape is not None:
        bert = _from_config(BertConfig.from_dict(shape))
    elif spec.weights == "none":
        bert = _from_config(_config(spec, vocab_size, max_tokens))
    else:
        bert = _from_pretrained(spec)
    _check_fits(bert.config, vocab_size, max_tokens, spec)
    return BertTower(bert)


class BertTower(nn.Module):
    """transformers' BERT (Devlin et al. 2019) with the mean over a caption's tokens as its features."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert
        self.width: int = bert.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] (1 is a token, right padded) -> features [B, width]; a row without tokens is finite."""
        seen = attention_mask.bool() | (torch.arange(input_ids.shape[1], device=input_ids.device) == 0)
        # A four-dimensional mask is taken as it is; a flat one would be looked at, which makes a GPU wait each step.
        hidden = self.bert(input_ids=input_ids, attention_mask=seen[:, None, None, :]).last_hidden_state
        weight = seen.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)

    def shape(self) -> dict[str, Any]:
        """The BertConfig as plain values, from which `build_text_tower` makes the same tower."""
        values: dict[str, Any] = self.bert.config.to_dict()
        return values


def _config(spec: TextTower, vocab_size: int, max_tokens: int) -> BertConfig:
    from transformers import BertConfig

    if spec.width % spec.heads:
        raise UsageError(
            f"model.text.heads: width {spec.width} cannot be shared out over {spec.heads} heads; "
            f"take a number of heads that divides model.text.width"
        )
    return BertConfig(
        vocab_size=spec.vocab_size or vocab_size,
        hidden_size=spec.width,
        num_hidden_layers=spec.depth,
        num_attention_heads=spec.heads,
        intermediate_size=FEED_FORWARD * spec.width,
        hidden_dropout_prob=spec.dropout,
        attention_probs_dropout_prob=spec.dropout,
        max_position_embeddings=max_tokens,
        type_vocab_size=1,
    )


def _from_config(config: BertConfig) -> BertModel:
    from transformers import BertModel

    config._attn_implementation = "sdpa"
    return BertModel(config, add_pooling_layer=False)


def _from_pretrained(spec: TextTower) -> BertModel:
    """BERT from a directory, the hub's cache or the hub; one that is not whole, or not BERT, is a UsageError."""
    from transformers import BertConfig, BertModel

    found = _fetch(spec.weights, BertConfig.get_config_dict)[0].get("model_type")
    if found != "bert":
        raise UsageError(f"model.text.weights: {spec.weights} holds a model of type {found!r}, not `bert`")
    model, report = _fetch(
        spec.weights,
        BertModel.from_pretrained,
        add_pooling_layer=False,
        attn_implementation="sdpa",
        dtype=torch.float32,
        hidden_dropout_prob=spec.dropout,
        attention_probs_dropout_prob=spec.dropout,
        output_loading_info=True,
    )
    if report["missing_keys"]:
        first = sorted(report["missing_keys"])[0]
        raise UsageError(
            f"model.text.weights: {spec.weights} lacks {len(report['missing_keys'])} weights of its BERT, first {first}"
        )
    return model


def _fetch(name: str, read: Callable[..., Any], **settings: Any) -> Any:
    """What `read` finds under `name` on this machine, else on the hub. Raises UsageError with the next move."""
    place = Path(name).expanduser()
    if place.is_dir():
        name = str(place)
    elif place.is_absolute() or name.startswith((".", "~")):
        raise UsageError(f"model.text.weights: there is no directory {place}; give one saved by save_pretrained")
    try:
        return read(name, local_files_only=True, **settings)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError) as error:
        if place.is_dir():
            detail = str(error).splitlines()[0]
            raise UsageError(f"model.text.weights: {name} cannot be read as a saved BERT: {detail}") from None
    try:
        return read(name, **settings)
    except OSError as error:
        raise UsageError(
            f"model.text.weights: `{name}` is neither a directory nor on this machine, and the hub does not give it "
            f"({str(error).splitlines()[0]}); run `hf download {name} --local-dir DIR` where there is a network and "
            f"set model.text.weights to DIR, or set it to `none`"
        ) from None


def _check_fits(config: BertConfig, vocab_size: int, max_tokens: int, spec: TextTower) -> None:
    """Every id and every position of the data has its row in the embeddings."""
    if config.vocab_size < vocab_size:
        where = "model.text.vocab_size" if spec.weights == "none" else f"model.text.weights: {spec.weights}"
        raise UsageError(
            f"{where}: {config.vocab_size} rows of embedding are too few for a tokenizer of {vocab_size} tokens; "
            f"take the tokenizer of the weights (model.inputs.tokenizer), or a larger vocab_size"
        )
    if config.max_position_embeddings < max_tokens:
        raise UsageError(
            f"model.inputs.max_tokens: {max_tokens} is more than the {config.max_position_embeddings} positions of "
            f"{spec.weights}; take at most that many"
        )
