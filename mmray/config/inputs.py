"""Settings of what a model takes in: pixels, tokens, and how a conversation is laid out."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mmray.config.base import Section

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
