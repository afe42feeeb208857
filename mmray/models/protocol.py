"""Interface of models: batch -> named outputs. Read this to write your own model.

A model is an nn.Module named `package.module:Class` in `model.kind`. It is called with the `model` section (free values
are in its `settings`) and the vocabulary size of the tokenizer. Only `forward` is required; retrieval evaluation needs
the methods of `EmbeddingModel`, and training calls those of `TrainingHooks` if the model has them.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.errors import UsageError


class Model(Protocol):
    """Required of every model."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs that the objective reads: one row per sample [B, ...], or a scalar of the step.

        batch: `image` uint8 [B, 3, S, S] (raw pixels: normalise them in the model), `input_ids` and `attention_mask`
        int64 [B, T], right-padded, `label`, `key` and `pos` int64 [B], `valid` bool [B]; columns of boxes, hard
        negatives and conversations if they are configured. `contrastive` and `sigmoid` read `image_embed` and
        `text_embed` [B, D], L2-normalised, and `logit_scale`, `sigmoid` also `logit_bias`; `classification` reads
        `class_logits` [B, C]. An output row must depend on its own sample only, and not on padding.
        """


class EmbeddingModel(Protocol):
    """Embeds images and texts in one space: required for retrieval evaluation and for `mmray.load`.

    `forward` must return `image_embed`.
    """

    def embed_image(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> L2-normalised embeddings [B, D]."""

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask int64 [B, T] (1 is a token) -> L2-normalised embeddings [B, D]."""


class TrainingHooks(Protocol):
    """Optional methods that training calls."""

    def branches(self) -> dict[str, nn.Module]:
        """Parts by name: the units of per-branch clipping, activation checkpointing, FSDP and `branches`."""

    def constrain(self) -> None:
        """Clamp weights after each optimizer step; decorate it with torch.no_grad."""

    def architecture(self) -> dict[str, Any]:
        """Return what rebuilds the model in addition to the section, as JSON values; saved in checkpoints and exports.

        Built-in models only: a user's class is rebuilt from the section alone.
        """


EMBEDDING_METHODS = ("embed_image", "embed_text")
OPTIONAL_METHODS = (
    *EMBEDDING_METHODS,
    *("branches", "constrain", "architecture"),
    *("embed_pair", "embed_regions", "classify_regions", "scalar_outputs"),
    *("hf_config", "hf_processor"),
)


def validate_model(model: nn.Module, kind: str) -> None:
    """Raise UsageError if the model has no forward, or has an attribute in place of an optional method."""
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise UsageError(f"model.kind: `{kind}` has no forward(batch); see mmray/models/protocol.py")
    wrong = [name for name in OPTIONAL_METHODS if not callable(getattr(model, name, len))]
    if wrong:
        raise UsageError(
            f"model.kind: {', '.join(wrong)} of `{kind}` is not a method. Make it one or rename it; see "
            "mmray/models/protocol.py"
        )


def validate_embedding_model(model: nn.Module, kind: str) -> None:
    """Raise UsageError unless retrieval can be evaluated with the model."""
    missing = [name for name in EMBEDDING_METHODS if not callable(getattr(model, name, None))]
    if missing:
        raise UsageError(
            f"model.kind: `{kind}` has no {' and no '.join(missing)}, which evaluation calls. Add the methods (see "
            "mmray/models/protocol.py), or disable evaluation with a --data.eval-split that the set does not have"
        )
