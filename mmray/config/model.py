"""Settings that all model kinds share, and settings of objectives.

`model_section` returns the section of a kind; model_kinds.py has the built-in ones.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

import tyro
from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from mmray import plugins
from mmray.builtin import KINDS, OBJECTIVES, ONLINE_METHODS, REMOVED_KINDS
from mmray.config.base import Section, check_name, parse_weighted_sum
from mmray.errors import UsageError

Fit = Literal["squash", "crop", "pad"]
Interpolation = Literal["bilinear", "bicubic"]
RGB = tuple[float, float, float]
MaxTokens = Annotated[
    int,
    Field(ge=4, le=8192, description="Maximum number of tokens of a text; longer ones are cut."),
]


class InputsBase(Section, settings_prefix="model.inputs"):
    """Image preprocessing and tokenization, without the size of an image."""

    interpolation: Interpolation = Field("bicubic", description="Resampling filter.")
    mean: RGB = Field((0.485, 0.456, 0.406), description="Mean per channel, pixels in 0..1.")
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (0.229, 0.224, 0.225), description="Standard deviation per channel, pixels in 0..1."
    )
    tokenizer: str = Field(
        "trained",
        description="`trained` (by prepare), a folder or file (tokenizer.json, or CLIP's "
        "bpe_simple_vocab_16e6.txt.gz), or a hub name.",
    )
    max_tokens: MaxTokens = 64


class Inputs(InputsBase):
    """Image preprocessing and tokenization, shared by data, evaluation and export."""

    image_side: int = Field(
        224, ge=8, le=4096, description="Height and width of the model's input image in pixels."
    )
    fit: Fit = Field(
        "crop",
        description="How an image becomes square: center `crop`, `squash`, or `pad` with white.",
    )


TEACHER_OBJECTIVES = {"distillation", "feature_distillation"}
_KIND = tyro.conf.arg(
    metavar=f"{{{','.join(KINDS)}}}|package.module:Class",
    help="Model kind, or a class of your own.",
)


class Lora(Section, settings_prefix="model.lora"):
    """Low-rank adapters (LoRA); all other weights are frozen, except those of `train`."""

    rank: int = Field(
        0, ge=0, le=1024, description="Rank of the adapters; 0: none, all weights are trained."
    )
    alpha: int = Field(16, ge=1, description="Adapter outputs are scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("*.q_proj", "*.v_proj"),
        min_length=1,
        description="Name patterns of the linear layers that get an adapter; of a vision-language "
        "model those of its language model.",
    )
    encoder_targets: tuple[str, ...] = Field(
        (),
        description="Of a vision-language model: name patterns of linear layers of its encoders of "
        "images and audio that get an adapter, too.",
    )
    load_in_4bit: bool = Field(
        False,
        description="Of a vision-language model: keep the frozen weights of linear layers in 4 "
        "bits (QLoRA; NF4 of bitsandbytes).",
    )
    train: str = Field(
        "",
        description="Parts that are trained fully, as `project|head`: modules of this name, or "
        "patterns of weight names.",
    )


class Model(Section, settings_prefix="model"):
    """Settings common to all model kinds; data, evaluation and export use only these.

    A subclass with the settings of a kind sets the class attributes.

    Attributes:
        branches: Names of the branches (parts such as `image` and `text`) that `branches()` of the
            torch module returns; empty: not known, so settings that name parts are checked later,
            with the built model.
        shares_only_loss: Whether no branch reads the output of another one, only the loss reads
            all, as `train.parallel branches` needs.
        media_kinds: Kinds of media that a row may have, of `image`, `audio` and `video`; rows with
            others are not used.
        takes_clips: Whether the model embeds audio and video clips, of which a row may lack some.
        generates_text: Whether the model writes text about any number of images.
        uses_transformers: Whether its torch module always imports transformers.
        objectives: Built-in objectives that can train the model, the usual one first; empty: not
            known.
    """

    branches: ClassVar[tuple[str, ...]] = ()
    shares_only_loss: ClassVar[bool] = False
    media_kinds: ClassVar[tuple[str, ...]] = ("image",)
    takes_clips: ClassVar[bool] = False
    generates_text: ClassVar[bool] = False
    uses_transformers: ClassVar[bool] = False
    objectives: ClassVar[tuple[str, ...]] = ()

    kind: Annotated[str, _KIND] = ""
    inputs: Inputs = Inputs()
    vocab_size: int = Field(
        0, ge=0, description="Rows of the token embedding; 0: the tokenizer's vocabulary size."
    )
    lora: Lora = Lora()

    @model_validator(mode="before")
    @classmethod
    def _set_kind(cls, values: object) -> Any:
        """Set the name that KINDS has for this section; a user's own model is given its name."""
        if not isinstance(values, dict):
            return values
        path = f"{cls.__module__}:{cls.__qualname__}"
        own = next((name for name, kind in KINDS.items() if kind.settings == path), "")
        given = values.get("kind") or own
        if not given or (own and given != own):
            expected = f"`{own}`" if own else "your own class, as package.module:Class"
            raise UsageError(f"model.kind: must be {expected} (got {values.get('kind')!r})")
        return values | {"kind": given}

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, values: object) -> Any:
        """Complete sections that are given in part, such as `text: {depth: 6}`, with the defaults
        of this model kind, because the same section has other defaults in another kind.
        """
        if not isinstance(values, dict):
            return values
        completed = dict(values)
        for name, field in cls.model_fields.items():
            default = field.default
            given = values.get(name)
            if isinstance(default, Section) and type(given) is type(default):
                given = {key: value for key, value in given if key in given.model_fields_set}
            if isinstance(default, Section) and isinstance(given, dict):
                completed[name] = dict(default) | given
        return completed

    @property
    def initial_weights(self) -> str:
        """Value of `model.weights`; `none` for kinds without this setting."""
        return "none"

    @property
    def synced_batch_norm(self) -> str:
        """Name of the image tower whose statistics of BatchNorm are synchronized; empty: none."""
        return ""

    @property
    def has_decoder(self) -> bool:
        """Whether the model has a decoder of captions."""
        return False

    @property
    def drops_at_random(self) -> bool:
        """Whether the image or the text branch has dropout in training."""
        return False

    @property
    def usable_objectives(self) -> tuple[str, ...]:
        """Those of `objectives` that suit the settings of the model."""
        return self.objectives

    def with_vocab(self, vocab_size: int, pad_id: int | None) -> Self:
        """Return the section with the vocabulary size of a tokenizer, unless the config sets it."""
        if 0 < self.vocab_size < vocab_size:
            raise UsageError(
                f"model.vocab_size: {self.vocab_size} embedding rows are too few for a tokenizer "
                f"of {vocab_size} tokens; set 0 or a larger number"
            )
        return self.replace(vocab_size=self.vocab_size or vocab_size)

    def part_weights(self) -> dict[str, str]:
        """Return the weights of parts that are models of transformers, by the name of the part."""
        return {}

    def unsupported_reasons(self) -> list[str]:
        """Return why no model can be built from these settings, a sentence with a fix each; [] if
        it can.
        """
        return []

    def label_problem(self, label: int) -> str:
        """Return why the model has no class for a label of the data; "" if it has one."""
        return ""


ClassNames = Annotated[
    tuple[str, ...],
    Field(description="Names of the labels 0, 1, ... of the data; empty: those of the sets."),
]


class CustomModel(Model):
    """Settings of a model class of your own, which `kind` names as `package.module:Class`.

    The class, a torch module, is called with (this section, vocabulary size); it reads its own
    settings from the dict `settings`.
    """

    settings: dict[str, bool | int | float | str] = Field(
        {}, description="Settings passed to your class."
    )
    class_names: ClassNames = ()


def model_section(kind: str) -> type[Model]:
    """Return the settings class of the section `model` for a kind.

    Args:
        kind: A built-in kind such as `clip`, or a user's `package.module:Class`.

    Returns:
        A subclass of Model, the settings of this kind.

    Raises:
        UsageError: The kind is unknown, or was removed.
    """
    if kind in REMOVED_KINDS:
        raise UsageError(REMOVED_KINDS[kind])
    if kind in KINDS:
        section: type[Model] = plugins.load_class(KINDS[kind].settings, "model.kind")
        return section
    if ":" in kind:
        return CustomModel
    raise UsageError(
        f"model.kind: unknown kind `{kind}`; use one of {', '.join(KINDS)}, or your own as "
        "package.module:Class"
    )


def _validate_model(value: object) -> Any:
    """Validate the values of a `model` section as its kind."""
    if not isinstance(value, dict):
        return value
    return model_section(str(value.get("kind", "two_tower"))).model_validate(value)


# A section of any kind.
AnyModel = Annotated[SerializeAsAny[Model], BeforeValidator(_validate_model)]


class Objective(Section, settings_prefix="objective"):
    """Loss to train on: a built-in one, your own, or a weighted sum."""

    kind: str = Field(
        "contrastive",
        description=f"{', '.join(f'`{name}`' for name in OBJECTIVES)}, your own "
        "`package.module:Class`, or a sum such as `contrastive + 0.5 * matching`.",
    )
    beta: float = Field(
        0.1, gt=0, description="Of dpo: strength with which the model stays near its reference."
    )
    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo"] = Field(
        "sigmoid",
        description="Of dpo: `sigmoid`, `sigmoid_norm` (by the mean over the tokens of an answer, "
        "not their sum) or `ipo`, as in TRL.",
    )
    reference: str = Field(
        "reference",
        description="Of dpo: the column of the reference model's log-probabilities that `mmray "
        "score` wrote, or `adapters_off`, the model without its LoRA adapters.",
    )

    teacher: str = Field(
        "clip_score",
        description="Of distillation: the column that `mmray score --embeddings` wrote with the "
        "weights of the teacher.",
    )

    @property
    def terms(self) -> dict[str, float]:
        """Weight of each objective: {contrastive: 1, matching: 0.5} of `contrastive + 0.5 *
        matching`.
        """
        return parse_terms(self.kind)

    @property
    def is_dpo(self) -> bool:
        """Whether it trains on rows with a chosen and a rejected answer."""
        return "dpo" in self.terms

    @property
    def has_teacher(self) -> bool:
        """Whether it reads the embeddings of another model."""
        return not TEACHER_OBJECTIVES.isdisjoint(self.terms)

    @field_validator("kind")
    @classmethod
    def _check_terms(cls, kind: str) -> str:
        for name in parse_terms(kind):
            if name.lower() in ONLINE_METHODS:
                raise ValueError(
                    f"`{name}` generates the answers that it trains on, with an inference engine "
                    "next to training. mmray trains on stored rows: use `dpo` with stored answers, "
                    "or TRL or verl"
                )
            check_name(name, OBJECTIVES)
        return kind


def parse_terms(kind: str) -> dict[str, float]:
    """Parse the value of `objective.kind`, such as `contrastive + 0.5 * matching`, into weights of
    objectives; spaces around + and * are optional.

    Raises:
        ValueError: A term is invalid, or an objective is repeated.
    """
    spaced = re.sub(r"\s*([+*])\s*", r" \1 ", kind)
    try:
        return parse_weighted_sum(spaced)
    except ValueError as error:
        raise ValueError(
            f"cannot parse `{error}` in `{kind}`. Write an objective or a sum of different ones, "
            "for example `contrastive` or `contrastive + 0.5 * matching`."
        ) from None
