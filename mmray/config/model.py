"""Settings of models and objectives: one section for each kind of model, chosen by its `kind`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import tyro
from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from mmray.config.base import Section
from mmray.errors import UsageError

# Settings of what a model takes in: pixels, tokens, and how a conversation is laid out.
Fit = Literal["squash", "crop", "pad"]
Interpolation = Literal["bilinear", "bicubic"]


class Inputs(Section):
    """What the model takes in: data, evaluation and export read it here and hold no second copy."""

    path: ClassVar[str] = "model.inputs"
    image_side: int = Field(224, ge=8, le=4096, description="Height and width of the pixels the model sees.")
    fit: Fit = Field("crop", description="How an image becomes square: crop its centre, squash it, or pad with white.")
    interpolation: Interpolation = Field("bicubic", description="Resampling filter.")
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="Per-channel mean, pixels in 0..1.")
    std: tuple[float, float, float] = Field((0.229, 0.224, 0.225), description="Per-channel deviation, pixels in 0..1.")
    tokenizer: str = Field(
        "trained",
        description="`trained` (on the captions, at prepare time), a directory with tokenizer.json, "
        "a WordPiece vocab.txt, or a hub name.",
    )
    max_tokens: int = Field(64, ge=4, le=8192, description="Longest caption in tokens; what is longer is cut.")
    language_token: str = Field(
        "",
        description="Token of a row's `language` before its words, `{}` the language: `[{}]`, or as a given "
        "tokenizer calls it; empty: none.",
    )
    max_boxes: int = Field(
        0, ge=0, le=1024, description="Boxes of an image in a batch, the largest; 0: batches have none."
    )

    @field_validator("language_token")
    @classmethod
    def _language_has_a_place(cls, value: str) -> str:
        if value and not (value.count("{}") == 1 and all(value.split("{}"))):
            raise ValueError(f"needs one place `{{}}` for the language, and a sign on each side of it (got {value!r})")
        return value

    @model_validator(mode="after")
    def _std_is_positive(self) -> Inputs:
        if min(self.std) <= 0:
            raise ValueError(f"std must be above 0 in each channel (got {self.std})")
        return self


class Chat(Section):
    """How a conversation is laid out for a model that writes; `{}` is what is said."""

    path: ClassVar[str] = "model.inputs.chat"
    image: str = Field("<image>", min_length=1, description="Token in whose place the image stands.")
    after_image: str = Field("\n", description="What follows it, before the first words of the user.")
    system: str = Field("{} ", description="Words of the system, where a conversation begins with some.")
    user: str = Field("USER: {} ", description="Words of the user.")
    assistant: str = Field("ASSISTANT: {}", description="Words of the assistant: these are learned.")
    end: str = Field("</s>", description="Token that ends the assistant's words; it is learned as well.")
    question: str = Field("Describe the image.", description="What is asked where a row has captions only.")

    @field_validator("system", "user", "assistant")
    @classmethod
    def _have_a_place(cls, value: str) -> str:
        if value.count("{}") != 1:
            raise ValueError(f"needs one place `{{}}` for what is said (got {value!r})")
        return value


class ChatInputs(Inputs):
    """What a model that writes takes in."""

    chat: Chat = Chat()
    max_tokens: int = Field(512, ge=4, le=8192, description="Longest conversation in tokens; what is longer is cut.")

    @field_validator("language_token")
    @classmethod
    def _has_no_language_token(cls, value: str) -> str:
        if value:
            raise ValueError(f"a model that writes has no token of a language; leave it empty (got {value!r})")
        return value


_EACH_KIND = tyro.conf.arg(metavar="{two_tower,clip,siglip,fusion,generative}|package.module:Class")


class Lora(Section):
    """Low-rank adapters beside the weights: with them, nothing else learns."""

    path: ClassVar[str] = "model.lora"
    rank: int = Field(0, ge=0, le=1024, description="Rank of the adapters; 0: none, and all weights learn.")
    alpha: int = Field(16, ge=1, description="What they add is scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("*.q_proj", "*.v_proj"), min_length=1, description="Linear layers that get one, by patterns of their names."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of what the adapters read.")


class Model(Section):
    """What every kind of model has; data, evaluation and export need no more of it than this."""

    path: ClassVar[str] = "model"
    kind: str
    inputs: Inputs = Inputs()
    vocab_size: int = Field(0, ge=0, description="Rows of the token embedding; 0: as many as the tokenizer has.")
    lora: Lora = Lora()

    def with_tokens(self, vocab_size: int, pad_id: int | None) -> Self:
        """The same model, with what it leaves to its tokenizer: the number of tokens, and the one that it pads with."""
        return self.replace(vocab_size=self.vocab_size or vocab_size)

    def with_absolute_weights(self) -> Self:
        """The same model, its weights on this machine under names that a worker in another folder finds as well."""
        update: dict[str, Any] = {}
        for name in ("image", "text"):
            if isinstance(part := getattr(self, name, None), Section) and hasattr(part, "weights"):
                update[name] = part.replace(weights=_absolute(part.weights))
        if hasattr(self, "weights"):
            update["weights"] = _absolute(self.weights)
        return self.replace(**update)


def _absolute(weights: str) -> str:
    place = Path(weights).expanduser()
    return str(place.resolve()) if weights not in ("none", "pretrained") and place.exists() else weights


class TwoEncoders(Model):
    """What models have whose branches meet in one embedding space."""

    temperature: float = Field(0.07, gt=0.001, le=1, description="Temperature of the scores at the start; it learns.")
    logit_bias: float | None = Field(
        None, description="Start of the bias that objective `sigmoid` learns (-10 in SigLIP); none: there is no bias."
    )


class ImageTower(Section):
    """The image branch."""

    path: ClassVar[str] = "model.image"
    name: Literal["convnet", "vit", "resnet18", "resnet34", "resnet50", "resnet101", "transformers"] = Field(
        "resnet50",
        description="A small GroupNorm network, a ViT, a torchvision ResNet, or the ViT, DINOv2 or ResNet of "
        "transformers that `weights` holds.",
    )
    weights: str = Field(
        "none",
        description="`none`, `pretrained` (torchvision's, through the hub), or a file of weights; with `transformers` "
        "a directory it saved, or a hub name.",
    )
    width: int = Field(48, ge=8, description="Channels of the first stage (convnet), or of a token (vit).")
    depth: int = Field(4, ge=1, description="Stages (convnet) or blocks (vit).")
    heads: int = Field(4, ge=1, description="Attention heads (vit).")
    patch: int = Field(16, ge=1, description="Side of a patch in pixels (vit).")


class TextTower(Section):
    """The text branch."""

    path: ClassVar[str] = "model.text"
    name: Literal["bert"] = Field("bert", description="transformers' BERT, or what of its like the weights are.")
    weights: str = Field(
        "none",
        description="`none`, a directory saved by transformers, or a hub name: BERT, RoBERTa, DistilBERT and the like.",
    )
    width: int = Field(128, ge=8, description="Width of a token (ignored with pretrained weights).")
    depth: int = Field(2, ge=1, description="Layers (ignored with pretrained weights).")
    heads: int = Field(4, ge=1, description="Attention heads (ignored with pretrained weights).")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of hidden states and attention.")


class Towers(TwoEncoders):
    """An image tower and a text tower, each chosen by name."""

    image: ImageTower = ImageTower()
    text: TextTower = TextTower()
    embed_dim: int = Field(256, ge=2, description="Width of the shared embedding.")
    batch_norm: Literal["local", "frozen", "synced"] = Field(
        "local", description="Running statistics: each worker's own, the weights' (eval mode), or synced (GPU only)."
    )


class TwoTower(Towers):
    """Two encoders that meet at the loss (CLIP's layout)."""

    kind: Annotated[Literal["two_tower"], _EACH_KIND] = Field(
        "two_tower", description="Two towers that meet at the loss."
    )


class CrossAttention(Section):
    """The layers in which words look at places of the image."""

    path: ClassVar[str] = "model.cross"
    width: int = Field(256, ge=8, description="Width of a token.")
    depth: int = Field(4, ge=1, description="Layers.")
    heads: int = Field(8, ge=1, description="Attention heads.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of hidden states and attention.")


class Fusion(Towers):
    """Two towers, and layers of cross-attention between words and places of the image."""

    kind: Annotated[Literal["fusion"], _EACH_KIND] = Field(
        "fusion", description="Cross-attention between words and places of the image."
    )
    cross: CrossAttention = CrossAttention()
    matching: bool = Field(True, description="A head that says whether image and text match (objective `matching`).")
    classes: int = Field(0, ge=0, description="Classes of the pair (objective `classification`); 0: no such head.")
    regions: bool = Field(False, description="A head that names boxes by texts of labels (objective `region_text`).")
    region_labels: tuple[str, ...] = Field(
        (), description="Names of the box labels 0, 1, ...; empty: those that the training set knows (COCO's do)."
    )


class ClipImage(Section):
    """The image encoder of a CLIP or SigLIP (ignored where saved weights bring their own shape)."""

    path: ClassVar[str] = "model.image"
    width: int = Field(768, ge=8, description="Width of a token.")
    depth: int = Field(12, ge=1, description="Layers.")
    heads: int = Field(12, ge=1, description="Attention heads.")
    patch: int = Field(32, ge=1, description="Side of a patch in pixels.")


class ClipText(Section):
    """The text encoder of a CLIP or SigLIP (ignored where saved weights bring their own shape)."""

    path: ClassVar[str] = "model.text"
    width: int = Field(512, ge=8, description="Width of a token.")
    depth: int = Field(12, ge=1, description="Layers.")
    heads: int = Field(8, ge=1, description="Attention heads.")


class Transformers(TwoEncoders):
    """transformers' CLIP family."""

    weights: str = Field(
        "none", description="`none`, a directory saved by transformers, a hub name, or an open_clip checkpoint (clip)."
    )
    image: ClipImage = ClipImage()
    text: ClipText = ClipText()
    patch_dropout: float = Field(0.0, ge=0, lt=1, description="Share of an image's patches left out in training.")


class Clip(Transformers):
    """transformers' CLIP: causal text encoder, features of the last token, softmax contrastive."""

    kind: Annotated[Literal["clip"], _EACH_KIND] = Field("clip", description="transformers' CLIP.")
    embed_dim: int = Field(512, ge=2, description="Width of the shared embedding.")
    activation: Literal["quick_gelu", "gelu"] = Field(
        "quick_gelu", description="As in OpenAI's weights; most others of open_clip use gelu."
    )


class Siglip(Transformers):
    """transformers' SigLIP: attention pooling, text padded to max_tokens, a sigmoid for each pair."""

    kind: Annotated[Literal["siglip"], _EACH_KIND] = Field("siglip", description="transformers' SigLIP.")
    inputs: Inputs = Inputs(fit="squash", mean=(0.5,) * 3, std=(0.5,) * 3)
    image: ClipImage = ClipImage(patch=16)
    text: ClipText = ClipText(width=768, heads=12)
    temperature: float = Field(0.1, gt=0.001, le=1, description="Temperature of the scores at the start; it learns.")
    logit_bias: float | None = Field(-10.0, description="Start of the learned bias; none: there is no bias.")
    pad_id: int | None = Field(
        None, ge=0, description="Token that captions are filled up with; none: the tokenizer's, else the weights' own."
    )

    def with_tokens(self, vocab_size: int, pad_id: int | None) -> Self:
        """As of every model; this one looks at its padding."""
        own = pad_id if self.pad_id is None else self.pad_id
        return super().with_tokens(vocab_size, pad_id).replace(pad_id=own)


class Decoder(Section):
    """The language model (ignored where saved weights bring their own shape)."""

    path: ClassVar[str] = "model.text"
    width: int = Field(512, ge=8, description="Width of a token.")
    depth: int = Field(8, ge=1, description="Layers.")
    heads: int = Field(8, ge=1, description="Attention heads.")
    max_positions: int = Field(2048, ge=8, description="Longest conversation, the image's places included.")


class Generative(Model):
    """transformers' LLaVA: features of one picture in a Llama's words, trained on what the assistant says."""

    kind: Annotated[Literal["generative"], _EACH_KIND] = Field(
        "generative", description="transformers' LLaVA, one crop an image."
    )
    inputs: ChatInputs = ChatInputs()
    weights: str = Field("none", description="`none`, a directory saved by transformers, or a hub name.")
    image: ClipImage = ClipImage(patch=16)
    text: Decoder = Decoder()


class Own(Model):
    """A model of your own, called with this section and the number of tokens."""

    kind: Annotated[str, _EACH_KIND] = Field(description="`package.module:Class`.")
    settings: dict[str, bool | int | float | str] = Field({}, description="Whatever your class wants to know.")


KINDS: dict[str, type[Model]] = {
    "two_tower": TwoTower,
    "clip": Clip,
    "siglip": Siglip,
    "fusion": Fusion,
    "generative": Generative,
}


def section_of(kind: str) -> type[Model]:
    """The section that describes models of this kind. Raises UsageError."""
    if kind in KINDS:
        return KINDS[kind]
    if ":" in kind:
        return Own
    raise UsageError(
        f"model.kind: there is no `{kind}`; take one of {', '.join(KINDS)}, or name your own as package.module:Class"
    )


def _tag(value: Any) -> str:
    kind = value.get("kind", "two_tower") if isinstance(value, dict) else getattr(value, "kind", "two_tower")
    return section_of(str(kind)).__name__


AnyModel = Annotated[
    Annotated[TwoTower, Tag("TwoTower")]
    | Annotated[Clip, Tag("Clip")]
    | Annotated[Siglip, Tag("Siglip")]
    | Annotated[Fusion, Tag("Fusion")]
    | Annotated[Generative, Tag("Generative")]
    | Annotated[Own, Tag("Own")],
    Discriminator(_tag),
]


class Objective(Section):
    """Outputs to a loss."""

    path: ClassVar[str] = "objective"
    kind: str = Field(
        "contrastive",
        description="`contrastive`, `sigmoid`, `matching`, `classification`, `region_text`, `language_modelling`, your "
        "own `package.module:Class`, or a sum such as `contrastive + 0.5 * matching`.",
    )
    chunk: int = Field(
        4096,
        ge=1,
        description="Texts that `sigmoid` scores at once; all of them in a sum with `contrastive` or `matching`.",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share that `classification` gives to all classes.")
