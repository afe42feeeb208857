"""Settings of the built-in model kinds: a section for each kind, and the sections of its parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from mmray.builtin import GROUP_CHANNELS, SAMPLE_VLM
from mmray.config.base import Section
from mmray.config.model import RGB, ClassNames, Inputs, InputsBase, Interpolation, Model

EmbedDim = Annotated[int, Field(ge=2, description="Size of the shared embedding.")]
Temperature = Annotated[
    float,
    Field(
        gt=0.001,
        le=1,
        description="Initial temperature of the scores, unless `model.weights` define it; it is "
        "learned.",
    ),
]
LogitBias = Annotated[
    float | None,
    Field(
        description="Initial bias of the scores (objective `sigmoid`), unless `model.weights` "
        "define it; None: none."
    ),
]
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


def _absolute(weights: str) -> str:
    """Return the absolute path of local weights, because workers run in another folder."""
    file = Path(weights).expanduser()
    return (
        str(file.resolve()) if weights not in ("none", "pretrained") and file.exists() else weights
    )


Weights = Annotated[str, AfterValidator(_absolute)]


class Transformer(Section):
    """Shape of a transformer; each model kind has its own default."""

    width: int = Field(128, ge=8, description="Hidden size.")
    depth: int = Field(2, ge=1, description="Number of layers.")
    heads: int = Field(4, ge=1, description="Attention heads.")


class VisionTransformer(Transformer):
    """Shape of a transformer over the patches of an image."""

    patch: int = Field(16, ge=1, description="Side of a patch in pixels.")


class DropoutTransformer(Transformer):
    """Shape of a transformer, with dropout in training."""

    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of hidden states and attention.")


def _head_reasons(*parts: Transformer) -> list[str]:
    return [
        f"{part.settings_prefix}.heads: {part.heads} heads do not divide the width of "
        f"{part.width}; change one of them"
        for part in parts
        if part.width % part.heads
    ]


def _patch_reasons(side: int, patch: int) -> list[str]:
    problem = (
        f"patches of {patch} pixels do not tile an image of {side} pixels (model.inputs.image_side)"
    )
    return [f"model.image.patch: {problem}; change one of them"] if side % patch else []


def _pretrained_reasons(setting: str, weights: str) -> list[str]:
    problem = (
        "only the ResNets of model.image.name have a default; set `none`, a hub name or a "
        "local path"
    )
    return (
        [f"{setting}: `pretrained` names no weights, {problem}"] if weights == "pretrained" else []
    )


class EmbeddingModel(Model):
    """Base of the settings of models with an image and a text branch and one embedding space.

    `branches` are the names of the parts of its torch module, and `objectives` those that can train
    it. Scores are cosines divided by a learned temperature, which starts at `temperature`, plus a
    learned bias, which starts at `logit_bias` (None: no bias).
    """

    branches: ClassVar[tuple[str, ...]] = ("image", "text")
    shares_only_loss = True
    objectives: ClassVar[tuple[str, ...]] = (
        "contrastive",
        "sigmoid",
        "distillation",
        "feature_distillation",
    )

    temperature: Temperature = 0.07
    logit_bias: LogitBias = None


class CaptionDecoder(DropoutTransformer, settings_prefix="model.decoder"):
    """Shape of the decoder of captions (`captioning`), which attends to the image encoder's
    positions.
    """

    width: int = Field(512, ge=8, description="Hidden size.")
    depth: int = Field(0, ge=0, description="Number of layers; 0: no decoder.")
    heads: int = Field(8, ge=1, description="Attention heads.")


class DualEncoder(EmbeddingModel):
    """Base of the settings of models with an image and a text branch alone, and maybe a decoder of
    captions.
    """

    objectives = (*EmbeddingModel.objectives, "captioning")

    decoder: CaptionDecoder = CaptionDecoder()

    @property
    def has_decoder(self) -> bool:
        return self.decoder.depth > 0

    @property
    def branches(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("image", "text", "decoder") if self.has_decoder else ("image", "text")

    @property
    def shares_only_loss(self) -> bool:  # type: ignore[override]
        return not self.has_decoder

    def unsupported_reasons(self) -> list[str]:
        decoder = _head_reasons(self.decoder) if self.has_decoder else []
        return super().unsupported_reasons() + decoder


class ImageTower(VisionTransformer, settings_prefix="model.image"):
    """Settings of the image tower; of a `convnet`, `width` is the channels of the first stage and
    `depth` the number of stages.
    """

    name: Literal[
        "convnet", "vit", "resnet18", "resnet34", "resnet50", "resnet101", "transformers"
    ] = Field(
        "resnet50",
        description="Small GroupNorm network, ViT, torchvision ResNet, or the transformers model "
        "in `weights`.",
    )
    weights: Weights = Field(
        "none",
        description="`none`, `pretrained`, or a weights file; `transformers`: a saved "
        "folder or a hub name.",
    )


class TextTower(DropoutTransformer, settings_prefix="model.text"):
    """Settings of the text tower: a transformer, or a pretrained one such as BERT, whose weights
    define its shape.
    """

    weights: Weights = Field(
        "none", description="`none`, a folder saved by transformers, or a hub name (BERT etc.)."
    )


class TowerModel(EmbeddingModel):
    """Base of the settings of models with an image tower and a text tower."""

    image: ImageTower = ImageTower(width=48, depth=4)
    text: TextTower = TextTower()
    embed_dim: EmbedDim = 256
    batch_norm: Literal["local", "frozen", "synced"] = Field(
        "local",
        description="Batch-norm statistics: per worker, frozen at the values of the "
        "weights, or synced (GPU only).",
    )

    @property
    def synced_batch_norm(self) -> str:
        return self.image.name if self.batch_norm == "synced" else ""

    @property
    def drops_at_random(self) -> bool:
        return self.text.dropout > 0

    def unsupported_reasons(self) -> list[str]:
        text = _pretrained_reasons("model.text.weights", self.text.weights)
        return (
            self._image_reasons()
            + text
            + (_head_reasons(self.text) if self.text.weights == "none" else [])
        )

    def part_weights(self) -> dict[str, str]:
        parts = {"text": self.text.weights}
        if self.image.name == "transformers":
            parts["image"] = self.image.weights
        return parts

    def _image_reasons(self) -> list[str]:
        image = self.image
        side = self.inputs.image_side
        if image.name.startswith("resnet"):
            if self.batch_norm == "frozen" and image.weights == "none":
                return [
                    "model.batch_norm: `frozen` needs the running statistics of trained weights, "
                    "but model.image.weights is `none`. Set model.batch_norm to `local`, or "
                    "model.image.weights to `pretrained` or a file"
                ]
            return []
        if image.name == "transformers":
            if image.weights in ("none", "pretrained"):
                return [
                    "model.image.weights: model.image.name `transformers` takes its shape from the "
                    "weights; set a directory saved by transformers, or a hub name (got "
                    f"`{image.weights}`)"
                ]
            return []
        reasons = _pretrained_reasons("model.image.weights", image.weights)
        if image.name == "vit":
            return reasons + _head_reasons(image) + _patch_reasons(side, image.patch)
        if image.width % GROUP_CHANNELS:
            reasons.append(
                f"model.image.width: the convnet needs a multiple of {GROUP_CHANNELS} "
                f"(got {image.width})"
            )
        least = 2 ** (image.depth + 1)
        if side < least:
            reasons.append(
                f"model.image.depth: {image.depth} stages need images of at least {least} pixels, "
                f"not {side}. Reduce the depth or increase model.inputs.image_side"
            )
        return reasons


class TwoTower(DualEncoder, TowerModel):
    """Settings of a dual encoder: image and text towers with one embedding space and a contrastive
    loss.
    """


class CrossAttention(DropoutTransformer, settings_prefix="model.cross"):
    """Shape of the cross-attention layers from text tokens to the features of other modalities."""


class AudioTower(DropoutTransformer, settings_prefix="model.audio"):
    """Shape of the transformer over the log-mel spectrogram of an audio clip; a token is 40 ms."""

    weights: Weights = Field(
        "none",
        description="`none`, or a folder of transformers or hub name with a Whisper or CLAP model, "
        "whose audio encoder is used instead.",
    )


class FrameTransformer(DropoutTransformer, settings_prefix="model.video"):
    """Settings of the transformer over the frames of a video clip; its width is that of the image
    tower.
    """

    depth: int = Field(1, ge=0, description="Number of layers; 0: the mean over the frames.")


class ClipInputs(Inputs):
    """How clips are taken from the audio and video in the time span of a text, and how the text is
    tokenized.
    """

    clip_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description="Longest clip in seconds; longer spans are cut at random. 0: the model has "
        "images in place of audio and video.",
    )
    frames: int = Field(
        8, ge=0, le=512, description="Most frames of a clip; 0: the model has no video."
    )
    frame_rate: float = Field(
        0.0, ge=0, le=60, description="Frames a second; 0: `frames` at equal distances."
    )
    audio_rate: int = Field(
        16_000, ge=0, le=48_000, description="Samples a second; 0: the model has no audio."
    )


PAIRS = {
    "contrastive": ("image", "text"),
    "sigmoid": ("image", "text"),
    "audio_text": ("audio", "text"),
    "video_text": ("video", "text"),
    "audio_video": ("audio", "video"),
}
"""Modalities that an objective compares, by its name."""


class Towers(TowerModel):
    """Settings of a model with branches for text and images, or for text, audio and video of which
    a row may lack some; one embedding space; and heads. Those of matching and classification score
    a text with the other modalities of its row, by cross-attention from its tokens.
    """

    # Branches also meet in the cross-attention.
    shares_only_loss = False
    objectives = (*PAIRS, "matching", "clip_matching", "classification")

    inputs: ClipInputs = ClipInputs()
    audio: AudioTower = AudioTower(width=256, depth=6, heads=4)
    video: FrameTransformer = FrameTransformer()
    cross: CrossAttention = CrossAttention(width=256, depth=4, heads=8)
    matching: bool = Field(
        False, description="Head that scores whether a text matches (`matching`, `clip_matching`)."
    )
    classes: int = Field(
        0, ge=0, description="Classes of the classification head (`classification`); 0: none."
    )
    class_names: ClassNames = ()

    @property
    def takes_clips(self) -> bool:  # type: ignore[override]
        return self.inputs.clip_s > 0

    @property
    def media_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """Kinds of media that the model uses: `image` (of clips as a frame); `video` for its frames
        or its sound; `audio`.
        """
        if not self.takes_clips:
            return ("image",)
        frames = ("image", "video") if self.inputs.frames else ()
        sound = ("audio", "video") if self.inputs.audio_rate else ()
        return tuple(dict.fromkeys((*frames, *sound)))

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities that the model has: `text`, then `image`, or `audio` if
        `inputs.audio_rate` is not 0 and `video` if `inputs.frames` is not 0.
        """
        if not self.takes_clips:
            return ("text", "image")
        audio = ("audio",) if self.inputs.audio_rate else ()
        video = ("video",) if self.inputs.frames else ()
        return ("text", *audio, *video)

    @property
    def branches(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the parts of the model that the settings name: the modalities, and `cross`
        (cross-attention) if it has a matching or a classification head.
        """
        return (*self.modalities, "cross") if self.matching or self.classes else self.modalities

    @property
    def usable_objectives(self) -> tuple[str, ...]:
        pairs = [name for name, pair in PAIRS.items() if {*pair} <= {*self.modalities}]
        return (*pairs, "clip_matching" if self.takes_clips else "matching", "classification")

    def part_weights(self) -> dict[str, str]:
        return super().part_weights() | {"audio": self.audio.weights}

    def unsupported_reasons(self) -> list[str]:
        inputs = self.inputs
        reasons = super().unsupported_reasons()
        if "cross" in self.branches:
            reasons += _head_reasons(self.cross)
        if "audio" in self.branches and self.audio.weights == "none":
            reasons += _head_reasons(self.audio)
        if len(self.modalities) == 1:
            reasons.append(
                "model.inputs: without audio (audio_rate 0) and video (frames 0) there is nothing "
                "to compare texts with; set one of them"
            )
        if (
            "video" in self.modalities
            and inputs.frame_rate
            and inputs.frames < inputs.clip_s * inputs.frame_rate
        ):
            reasons.append(
                f"model.inputs.frames: {inputs.frames} frames at {inputs.frame_rate:g} a second "
                f"end before a clip of {inputs.clip_s:g} s; set frames to "
                f"{math.ceil(inputs.clip_s * inputs.frame_rate)}, or a smaller clip_s"
            )
        return reasons

    def label_problem(self, label: int) -> str:
        if not self.classes or 0 <= label < self.classes:
            return ""
        if label < 0 and self.class_names:
            return (
                "a label that is none of model.class_names "
                f"({', '.join(self.class_names[:20])[:200]}): name the classes of all sets"
            )
        fix = "number the classes from 0"
        if label > 0:
            fix = f"set --model.classes to {label + 1} or more"
        return (
            f"label {label}, but model.classes is {self.classes}, so labels are 0 to "
            f"{self.classes - 1}: {fix}"
        )


class ClipImage(VisionTransformer, settings_prefix="model.image"):
    """Shape of the image encoder of CLIP or SigLIP; unused with `model.weights`, which define
    it.
    """


class ClipText(Transformer, settings_prefix="model.text"):
    """Shape of the text encoder of CLIP or SigLIP; unused with `model.weights`, which define it."""


class HfModel(Model):
    """Base of the settings of models that are one class of transformers."""

    uses_transformers = True

    weights: Weights = Field(
        "none",
        description="`none`, a folder saved by transformers, a hub name, or an open_clip "
        "checkpoint (clip, siglip).",
    )

    @property
    def initial_weights(self) -> str:
        return self.weights

    @property
    def is_checkpoint_file(self) -> bool:
        """Whether `weights` is a checkpoint file (`.pt`, `.pth`, `.bin` or `.safetensors`), not a
        folder or a name.
        """
        file = Path(self.weights).expanduser()
        return file.suffix in CHECKPOINT_SUFFIXES and not file.is_dir()

    def unsupported_reasons(self) -> list[str]:
        model: Any = self
        if self.weights != "none":  # the weights define the shape
            return _pretrained_reasons("model.weights", self.weights)
        return _head_reasons(model.image, model.text) + self._size_reasons()

    def _size_reasons(self) -> list[str]:
        model: Any = self
        return _patch_reasons(self.inputs.image_side, model.image.patch)


class ClipFamily(DualEncoder, HfModel):
    """Base of the settings of transformers' CLIP and SigLIP."""

    image: ClipImage = ClipImage(width=768, depth=12, heads=12, patch=32)
    text: ClipText = ClipText(width=512, depth=12, heads=8)
    patch_dropout: float = Field(
        0.0, ge=0, lt=1, description="Fraction of image patches dropped in training."
    )
    kept_positions: int = Field(
        0,
        ge=0,
        description="Leading text positions that keep their weights if max_tokens exceeds the "
        "positions of the weights (Long-CLIP: 20); the others are interpolated.",
    )

    @property
    def declared_activation(self) -> str | None:
        """Activation of the MLPs that the settings name; None: that of the weights."""
        return None

    @property
    def drops_at_random(self) -> bool:
        return self.patch_dropout > 0


class Clip(ClipFamily):
    """Settings of transformers' CLIP: causal text encoder, features of the last token, softmax
    loss.
    """

    embed_dim: EmbedDim = 512
    activation: Literal["quick_gelu", "gelu"] | None = Field(
        None,
        description="Activation of the MLPs; None: as in the weights, quick_gelu without weights.",
    )

    @property
    def declared_activation(self) -> str | None:
        return self.activation


class Siglip(ClipFamily):
    """Settings of transformers' SigLIP: attention pooling, padded text, sigmoid loss."""

    inputs: Inputs = Inputs(fit="squash", mean=(0.5,) * 3, std=(0.5,) * 3)
    image: ClipImage = ClipImage(width=768, depth=12, heads=12)
    text: ClipText = ClipText(width=768, depth=12, heads=12)
    temperature: Temperature = 0.1
    logit_bias: LogitBias = -10.0
    pad_id: int | None = Field(
        None, ge=0, description="Padding token id; None: as in the tokenizer or the weights."
    )

    def with_vocab(self, vocab_size: int, pad_id: int | None) -> Self:
        return (
            super()
            .with_vocab(vocab_size, pad_id)
            .replace(pad_id=pad_id if self.pad_id is None else self.pad_id)
        )


class NaflexInputs(InputsBase):
    """Image preprocessing and tokenization of a model that reads patches of images in their own
    aspect ratio.
    """

    interpolation: Interpolation = "bilinear"
    mean: RGB = (0.5, 0.5, 0.5)
    std: RGB = (0.5, 0.5, 0.5)
    patch: int = Field(16, ge=2, le=256, description="Side of a patch in pixels.")
    max_patches: int = Field(
        256,
        ge=4,
        le=4096,
        description="Most patches of an image, which is resized to about as many.",
    )


class NaflexImage(Transformer, settings_prefix="model.image"):
    """Shape of the image encoder of SigLIP 2's NaFlex; unused with `model.weights`, which define
    it.
    """


class Naflex(Siglip):
    """Settings of transformers' Siglip2Model (NaFlex): SigLIP with images in their own aspect
    ratio, as patches within a budget.
    """

    inputs: NaflexInputs = NaflexInputs()  # type: ignore[assignment]
    image: NaflexImage = NaflexImage(width=768, depth=12, heads=12)  # type: ignore[assignment]

    def unsupported_reasons(self) -> list[str]:
        reasons = super().unsupported_reasons()
        if self.patch_dropout:
            reasons.append(
                "model.patch_dropout: kind naflex has a budget of patches instead; set it to 0, "
                "and model.inputs.max_patches lower"
            )
        if self.has_decoder:
            reasons.append(
                "model.decoder: it would attend to the padding of images of kind naflex; set "
                "--model.decoder.depth 0, or train a siglip"
            )
        return reasons

    def _size_reasons(self) -> list[str]:
        return []


class VlmInputs(Section, settings_prefix="model.inputs"):
    """Limits of the inputs of a vision-language model, which its processor (of transformers)
    computes.
    """

    max_tokens: int = Field(
        4096,
        ge=4,
        description="Maximum number of tokens of a conversation with its images; rows with a "
        "longer one are quarantined, because a cut may go through an image.",
    )
    max_pixels: int | None = Field(
        None, ge=1, description="Most pixels of an image after resizing; None: the processor's."
    )
    min_pixels: int | None = Field(
        None, ge=1, description="Fewest pixels of an image after resizing; None: the processor's."
    )
    frames: int = Field(
        0, ge=0, le=768, description="Most frames of a video; 0: rows with videos are not used."
    )
    frame_rate: float = Field(
        2.0,
        gt=0,
        le=60,
        description="Frames a second of a video, unless they would be more than `frames`.",
    )
    frame_pixels: int | None = Field(
        None, ge=1, description="Most pixels of a frame after resizing; None: the processor's."
    )
    question: str = Field(
        "Describe the image.", description="User message for rows that only have captions."
    )


class Vlm(Model):
    """Settings of any supported vision-language model of transformers; the loss covers the
    assistant's messages.
    """

    branches = ("vision", "audio", "language")
    objectives = ("language_modelling", "dpo")
    generates_text = True
    uses_transformers = True

    inputs: VlmInputs = VlmInputs()  # type: ignore[assignment]
    weights: Weights = Field(
        "none",
        description="A folder saved by transformers with its processor, or a hub name; a folder "
        "without weight files is a model with random weights.",
    )
    vision: Weights = Field(
        "none",
        description="In place of `weights`: a folder or hub name of a CLIP or SigLIP, whose image "
        "encoder becomes part of a new model.",
    )
    language: Weights = Field(
        "none",
        description="Folder or hub name of the causal language model of the new model.",
    )
    projector: Literal["mlp", "pixel_shuffle"] = Field(
        "mlp",
        description="Projector of the new model: two layers (a LLaVA), or pixel shuffle and one "
        "layer (an Idefics3 with a SigLIP), with up to 16 times fewer tokens.",
    )

    @property
    def initial_weights(self) -> str:
        return self.weights

    @property
    def is_written_by_run(self) -> bool:
        """Whether the run writes the folder of the model before it starts."""
        return self.weights == SAMPLE_VLM or self.vision != "none"

    def with_vocab(self, vocab_size: int, pad_id: int | None) -> Self:
        return self  # the weights define it

    def unsupported_reasons(self) -> list[str]:
        parts = {self.vision, self.language}
        if parts == {"none"} and self.weights == "none":
            return [
                "model.weights: model.kind `vlm` takes its architecture and its processor from "
                "weights; set a folder saved by transformers, or a hub name; or model.vision and "
                "model.language, for a new model"
            ]
        if (parts != {"none"} or self.projector != "mlp") and (
            "none" in parts or self.weights != "none"
        ):
            return [
                "model.vision, model.language: a new model (and model.projector) needs both, and "
                "no model.weights (got "
                f"`{self.vision}`, `{self.language}` and `{self.weights}`)"
            ]
        return []
