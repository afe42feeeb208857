"""Interface of models: batch -> named outputs. Read this to write your own model.

A model is an nn.Module named `package.module:Class` in `model.kind`. It is called with the `model`
section (free values are in its `settings`) and the vocabulary size of the tokenizer. Only `forward`
is required.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from mmray.data.stream.collate import Batch

if TYPE_CHECKING:
    from mmray.data.text.tokenizer import TextEncoder


class HeadScores(NamedTuple):
    """Scores and labels of a classification head, for the evaluation.

    Attributes:
        scores: Scores of each class [N, C].
        label: Correct class, int64 [N]; positions with a number outside 0..C-1 are left out of the
            metrics.
        num_classes: C.
        unit: What N counts: `rows` or `boxes`.
    """

    scores: Tensor
    label: Tensor
    num_classes: int
    unit: str = "rows"


class Model(Protocol):
    """Interface of a model: a torch module whose methods training and evaluation call.

    A class implements `forward(batch)`, from a dict of tensors by column to a dict of outputs by
    name, such as `image_embed` and `text_embed` [B, D]. The other methods are optional:
    `embed_image` and `embed_text` for evaluation and `mmray.load`, `head_scores` for the evaluation
    of other heads, `use_tokenizer` for texts that the model holds, `branches` for FSDP, compile and
    activation checkpointing by part, and `clamp_parameters` after each optimizer step.
    """

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs that the objective reads.

        An output row must depend on its own sample only, and not on padding.

        Args:
            batch: `image` uint8 [B, 3, S, S] (raw pixels: normalize them in the model), `input_ids`
                and `attention_mask` int64 [B, T], right-padded, `label` (-1: none), `key` and `pos`
                int64 [B], `valid` bool [B], False for padding. With `inputs.max_boxes` also `boxes`
                float32 [B, N, 4], `box_labels` int64 and `box_mask` bool [B, N]; with an objective
                that needs hard negatives `negative_ids` and `negative_mask` int64 [B, T].
                `Towers.forward` and `Vlm.forward` list the columns of clips and of conversations.

        Returns:
            Tensors by name, with one row per sample [B, ...], or a scalar of the step. The
            objectives `contrastive` and `sigmoid` read `image_embed` and `text_embed` [B, D],
            L2-normalized, and `logit_scale`, `sigmoid` also `logit_bias`; `classification` reads
            `class_logits` [B, C].
        """

    def embed_image(self, image: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of images, pixels uint8 [B, 3, S, S].

        Optional; evaluation and `mmray.load` need it.
        """

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of captions.

        Optional; evaluation and `mmray.load` need it.

        Args:
            input_ids: Token ids int64 [B, T], right-padded.
            attention_mask: int64 [B, T], 1 for a token and 0 for padding.
        """

    def head_scores(self, batch: Batch) -> dict[str, HeadScores]:
        """Return the scores of heads other than the embeddings, for the evaluation.

        Optional.

        Args:
            batch: The columns of `forward`, such as `image` uint8 [B, 3, S, S] and `label` int64
                [B], with one caption per image.

        Returns:
            For each head, by the name that its metrics get, such as `classification`, a HeadScores:
            `scores` [N, C], `label` int64 [N], `num_classes` and `unit` (`rows` or `boxes`).
        """

    def use_tokenizer(self, encoder: TextEncoder) -> None:
        """Tokenize texts that the model holds, such as label names.

        Optional; called once before the first forward.

        Args:
            encoder: Its `encode(texts)` returns ids int32 [N, T] and numbers of tokens int32 [N].
        """

    def branches(self) -> dict[str, nn.Module]:
        """Return parts of the model by name, such as {"image": ..., "text": ...}.

        Optional. Activation checkpointing, torch.compile and FSDP are applied to each part
        separately, and `train.parallel` `branches` puts the image and the text part on different
        GPUs.
        """

    def clamp_parameters(self) -> None:
        """Clamp weights after each optimizer step, such as the temperature; decorate it with
        torch.no_grad.

        Optional.
        """


# Argument of the builders. None: read pretrained weights, if the settings name any;
# `architecture()` of the same model: its shape with random weights, because the caller loads them;
# {}: random weights in the shape of the settings.
Architecture = dict[str, Any] | None
EMBEDDING_METHODS = ("embed_image", "embed_text")


def find_blocks(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the repeated layers (blocks) of a module, such as transformer layers, in order.

    They are the children of its outermost ModuleList and Sequential containers, which may be nested
    in other modules.

    Args:
        module: The module, such as an image or a text branch.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from find_blocks(child)


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 shards a module, so that its forwards have collectives."""
    return hasattr(module, "set_reshard_after_forward")  # FSDP2 adds this method
