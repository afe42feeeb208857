"""What a model is: a batch to named outputs, and what else is asked of it. Read this to bring a model of your own.

Your own is an nn.Module, named `package.module:Class` in `model.kind` and called with the `model` section (its
`settings` hold what you like) and the number of tokens. Only `Model.forward` is required; held-out rows are scored
with the methods of `Embeds`; the rest of this file is read where a model has it, and left out where it has not.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from mmray.data.stream.collate import Batch
from mmray.errors import UsageError


class Model(Protocol):
    """Turns batches into outputs: required of every model."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Named outputs, those that the objective reads: a row for each row [B, ...], or a scalar of the step.

        batch: `image` uint8 [B, 3, S, S] (raw pixels: normalise them yourself), `input_ids` and `attention_mask` int64
        [B, T], padded on the right, `label`, `key` and `pos` int64 [B], `valid` bool [B]; columns of boxes, of partners
        and of conversations where they are asked for. `contrastive` and `sigmoid` read `image_embed` and `text_embed`
        [B, D] of length 1 and `logit_scale`, `sigmoid` also `logit_bias`; `classification` reads `class_logits`
        [B, C]. Rows may not see each other, and what is in padding may not change a row.
        """


class EmbeddingModel(Protocol):
    """Puts images and texts into one space: required where rows are held out, and of what `mmray.load` opens.

    Scored by retrieval, `forward` gives `image_embed` as well.
    """

    def embed_image(self, image: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> embeddings [B, D] of length 1."""

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask int64 [B, T] (1 is a token) -> embeddings [B, D] of length 1."""


class TrainingHooks(Protocol):
    """Further methods that training calls, each where the model has it."""

    def branches(self) -> dict[str, nn.Module]:
        """Parts by name: for optimizer.clip_per, train.activation_checkpointing, and where fsdp and `branches` cut."""

    def constrain(self) -> None:
        """Called after each optimizer step (decorate it with torch.no_grad): keeps weights within their bounds."""

    def architecture(self) -> dict[str, Any]:
        """What weights need besides the section to be loaded again, as JSON values; kept in checkpoints and exports.

        A user's own class is not given it back: it is built from the section alone.
        """


class Heads(Protocol):
    """Heads and what they read; None, or not there: the model has no such head."""

    class_head: nn.Linear | None  # [B, W] -> logits [B, C]: evaluation tells its accuracy
    match_head: nn.Linear | None  # [B, W] -> [B, 1]: for `match` of what `mmray.load` opens
    region_head: nn.Module | None  # names boxes, with `labels`
    labels: Any  # a LabelTexts (models/regions.py): texts of the labels, read from the tokenizer before the first step

    def embed_pair(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Pixels and captions of the same rows -> what class_head and match_head read, [B, W]."""

    def embed_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Pixels and boxes [B, N, 4] in fractions of the square -> embeddings [B, N, D] of length 1."""

    def classify_regions(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Pixels and boxes [B, N, 4] -> logits [B, N, C] of the labels."""

    def scalar_outputs(self) -> dict[str, Tensor]:
        """`logit_scale`, with which boxes and texts are compared."""


class HfExport(Protocol):
    """What an export asks (models/hf_format.py); without it, a model leaves in mmray's own form."""

    hf_names: tuple[tuple[str, str], ...]  # prefixes of the weights' names, own and transformers'
    padded_to: tuple[int, int]  # tokens and pad id that each caption is filled up to, of a model that sees padding
    chat: Any  # of a model that writes: the section of its marks (model.inputs.chat)

    def hf_config(self, *ids: int | None) -> dict[str, Any] | None:
        """config.json of the same model for transformers, from the ids of end, padding and, if it writes, image."""

    def hf_processor(self) -> dict[str, Any]:
        """processor_config.json of transformers."""


EMBEDDING_METHODS = ("embed_image", "embed_text")
OPTIONAL_METHODS = (
    *EMBEDDING_METHODS,
    *("branches", "constrain", "architecture"),
    *("embed_pair", "embed_regions", "name_regions", "shared_outputs"),
    *("hf_config", "hf_processor"),
)


def validate_model(model: nn.Module, kind: str) -> None:
    """Raise UsageError unless the model has a forward, and each method of this file that it has can be called."""
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise UsageError(f"model.kind: `{kind}` has no forward(batch) (see mmray/models/protocol.py)")
    wrong = [name for name in OPTIONAL_METHODS if not callable(getattr(model, name, _absent))]
    if wrong:
        raise UsageError(
            f"model.kind: {', '.join(wrong)} of `{kind}` cannot be called, and would be: make it a method, or give it "
            "another name (see mmray/models/protocol.py)"
        )


def validate_embedding_model(model: nn.Module, kind: str) -> None:
    """Raise UsageError unless held-out rows can be scored with the model by retrieval."""
    missing = [name for name in EMBEDDING_METHODS if not callable(getattr(model, name, None))]
    if missing:
        raise UsageError(
            f"model.kind: `{kind}` has no {' and no '.join(missing)}, with which held-out rows are scored: add what is "
            "missing (see mmray/models/protocol.py), or hold no rows out (--data.eval-split with a name that no split "
            "of the set has)"
        )


def _absent() -> None:
    """Stands for a method that a model may leave out."""
