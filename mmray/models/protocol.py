"""Interface of models: batch -> named outputs. Read this to write your own model.

A model is an nn.Module named `package.module:Class` in `model.kind`. It is called with the `model`
section (free values are in its `settings`) and the vocabulary size of the tokenizer. Only `forward`
is required.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeGuard

from torch import Tensor, nn

from mmray.data.stream.collate import Batch

Outputs = dict[str, Tensor]  # by name, with a row for each sample, or a scalar
# Each row's part in the sum of a loss, and in its count: outputs of a model that computes its loss,
# and metrics of objectives.
ROW_LOSSES = "row_losses"
ROW_COUNTS = "row_counts"


class Encoded(NamedTuple):
    """What a branch computes for B rows.

    Attributes:
        features: Features of each of N positions (patches, tokens, frames) [B, N, W].
        mask: int64 [B, N], 0 for padding; None for images, which have none.
        embed: L2-normalized embeddings [B, D]; arbitrary for a row without the modality.
    """

    features: Tensor
    mask: Tensor | None
    embed: Tensor

    @staticmethod
    def embedding(result: Encoded | Tensor) -> Tensor:
        """Return the embeddings [B, D] of a branch that returns them alone, or an `Encoded`."""
        return result.embed if isinstance(result, Encoded) else result


class HeadScores(NamedTuple):
    """Scores and labels of a classification head, for the evaluation.

    Attributes:
        scores: Scores of each class [N, C].
        label: Correct class, int64 [N]; positions with -1 are left out of the metrics.
        num_classes: C.
    """

    scores: Tensor
    label: Tensor
    num_classes: int


def class_scores(outputs: Outputs, batch: Batch) -> dict[str, HeadScores]:
    """Return the scores of the classification head, if a model has one: `class_logits`."""
    logits = outputs.get("class_logits")
    if logits is None:
        return {}
    return {"classification": HeadScores(logits, batch["label"], logits.shape[1])}


class Model(nn.Module):
    """Base class of the built-in models: the methods that training and evaluation call.

    A class of your own may derive from it or from nn.Module, and implements `forward(batch)`, from
    a dict of tensors by column to a dict of outputs by name, such as `image_embed` and `text_embed`
    [B, D]. Evaluation and `mmray.load` also need `embed_image(image)` and `embed_text(input_ids,
    attention_mask)`, which return L2-normalized embeddings [B, D] of pixels uint8 [B, 3, S, S], and
    of token ids and their mask int64 [B, T], right-padded. The other methods are optional.

    Attributes:
        build_notes: Lines for the console about how the model was built.
        hf_names: For a model that transformers can open, the prefixes of names of
            weights, and those in transformers.
        shards_branches: Whether FSDP shards each branch as a whole besides its blocks.
    """

    build_notes: tuple[str, ...] = ()
    hf_names: ClassVar[Mapping[str, str]] = {}
    shards_branches: bool = True

    def forward(self, batch: Batch) -> Outputs:
        """Return the outputs that the objective reads.

        An output row must depend on its own sample only, and not on padding.

        Args:
            batch: `image` uint8 [B, 3, S, S] (raw pixels: normalize them in the model), `input_ids`
                and `attention_mask` int64 [B, T], right-padded, `label` (-1: none), `key` and `pos`
                int64 [B], `valid` bool [B], False for padding. With an objective that needs hard
                negatives also `negative_ids` and `negative_mask` int64 [B, T].
                `Towers.forward` and `Vlm.forward` list the columns of clips and of conversations.

        Returns:
            Tensors by name, with one row per sample [B, ...], or a scalar of the step. The
            objectives `contrastive` and `sigmoid` read `image_embed` and `text_embed` [B, D],
            L2-normalized, and `logit_scale`, `sigmoid` also `logit_bias`; `classification` reads
            `class_logits` [B, C], `captioning` `caption_losses` [B], sums over tokens.
        """
        raise NotImplementedError

    def head_scores(self, batch: Batch) -> dict[str, HeadScores]:
        """Return the scores of heads other than the embeddings, for the evaluation.

        Args:
            batch: The columns of `forward`, such as `image` uint8 [B, 3, S, S] and `label` int64
                [B], with one caption per image.

        Returns:
            For each head, by the name that its metrics get, such as `classification`, a HeadScores:
            `scores` [N, C], `label` int64 [N] and `num_classes`.
        """
        return {}

    def caption(self, image: Tensor, end_id: int) -> Tensor:
        """Return captions of images as token ids int64 [B, T], for a model whose forward returns
        `caption_losses`; tokens after `end_id` are arbitrary.

        Args:
            image: Pixels uint8 [B, 3, S, S].
        """
        raise NotImplementedError

    def branches(self) -> dict[str, nn.Module]:
        """Return parts of the model by name, such as {"image": ..., "text": ...}.

        Activation checkpointing, torch.compile and FSDP are applied to each part separately, and
        `train.parallel` `branches` puts the image and the text part on different GPUs.
        """
        return {}

    def parameter_parts(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each part that settings may name."""
        return {}

    def clamp_parameters(self) -> None:
        """Clamp weights after each optimizer step, such as the temperature; decorate it with
        torch.no_grad.
        """

    def architecture(self) -> dict[str, Any]:
        """Return JSON values with which the same layers are built without pretrained files; {} if
        the settings are enough.
        """
        return {}

    def synthetic_batch(self, rows: int) -> Batch | None:
        """Return a batch for dry runs; None: one of random pixels and captions fits."""
        return None

    def export_hf_config(self, eos_id: int | None, pad_id: int) -> dict[str, Any] | None:
        """Return the values of config.json for transformers; None if no class of transformers
        represents the model.

        Args:
            eos_id: Id of the token at the end of each caption; None: the tokenizer has none.
            pad_id: Id of the padding token.
        """
        return None

    @property
    def padding_length_and_id(self) -> tuple[int, int] | None:
        """Number of tokens to which each caption is padded, and id of the padding token, for a
        model that attends to its padding; None for others.
        """
        return None


def as_model(module: nn.Module) -> Model:
    """Return a module as a Model: a user's nn.Module gets the defaults of the methods it lacks.

    Its class is replaced in place by a subclass of both, as FSDP2 does, so its weights keep their
    names.
    """
    if not isinstance(module, Model):
        own = type(module)
        module.__class__ = type(own.__name__, (own, Model), {"__module__": own.__module__})
    assert isinstance(module, Model)
    return module


@dataclass(frozen=True)
class WeightSource:
    """Where a model gets its weights from, and the layers that its settings do not define.

    Attributes:
        pretrained: Whether to read the pretrained weights that the settings name, if any. Otherwise
            weights are random, because the caller loads others or needs none.
        saved: For random weights, layers of a saved model as its `architecture()` returned them;
            empty: those of the settings, or of the files that they name.
    """

    pretrained: bool = True
    saved: Mapping[str, Any] = field(default_factory=dict)


PRETRAINED = WeightSource()
RANDOM_WEIGHTS = WeightSource(pretrained=False)


def saved_layers(architecture: Mapping[str, Any]) -> WeightSource:
    """Return the source of a model with random weights and the layers of a checkpoint or export."""
    return WeightSource(pretrained=False, saved=architecture)


class ImageTextModel(Model):
    """Interface of a model that evaluation can score, also of a module of the user's own."""

    def embed_image(self, image: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of images, pixels uint8 [B, 3, S, S]."""
        raise NotImplementedError

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the L2-normalized embeddings [B, D] of captions."""
        raise NotImplementedError


EMBEDDING_METHODS = ("embed_image", "embed_text")


def missing_methods(module: nn.Module) -> list[str]:
    """Return which of EMBEDDING_METHODS a module lacks."""
    return [name for name in EMBEDDING_METHODS if not callable(getattr(module, name, None))]


def can_embed(module: nn.Module) -> TypeGuard[ImageTextModel]:
    """Return whether a module has the methods of an ImageTextModel."""
    return not missing_methods(module)


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
