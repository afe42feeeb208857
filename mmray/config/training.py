"""Settings of the training itself: batch arithmetic, optimizer, length, evaluation."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

import tyro
from pydantic import Field, field_validator, model_validator

from mmray.config.base import Section

_FACTOR = re.compile(r"\d+(\.\d*)?(e-?\d+)?")


class Batch(Section):
    """global = micro x accumulation x workers. Give `global` and `micro`, or `micro` and `accumulation`."""

    path: ClassVar[str] = "batch"
    micro: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None, description="Rows of one forward pass of one worker; auto: as many as fit, tried before the first step."
    )
    accumulation: int | None = Field(None, ge=1, description="Forward passes of one worker in a step.")
    by_length: bool = Field(
        False, description="Micro-batches of captions of like length: less padding, the same rows in a step."
    )
    global_: Annotated[int | None, tyro.conf.arg(name="global")] = Field(
        None, alias="global", ge=1, description="Rows of one optimizer step over all workers; never changes in a run."
    )


class Optimizer(Section):
    """AdamW, its learning rate and its clipping."""

    path: ClassVar[str] = "optimizer"
    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")
    final_lr_fraction: float = Field(0.0, ge=0, le=1, description="The last learning rate, as a share of the peak.")
    warmup_steps: int = Field(100, ge=0, description="Linear warm-up.")
    weight_decay: float = Field(0.1, ge=0, description="Decay of matrices; norms, biases, temperature get none.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.98), description="AdamW's moments."
    )
    eps: float = Field(1e-6, gt=0, description="AdamW's epsilon.")
    clip_norm: float = Field(1.0, ge=0, description="Largest gradient norm; 0 does not clip.")
    clip: Literal["global", "branches"] = Field(
        "global", description="Whose norm: of all weights together, or of each branch (and the rest) by itself."
    )
    schedule: Literal["cosine", "linear", "constant", "cooldown"] = Field(
        "cosine", description="After warm-up: fall all the way, stay, or stay and fall in the last `cooldown_fraction`."
    )
    cooldown_fraction: float = Field(0.2, gt=0, le=1, description="Share of the steps in which `cooldown` falls.")
    freeze: tuple[str, ...] = Field(
        (), description="Weights that stay as they are, by patterns of their names: `image.tower.*`."
    )
    lr_scale: tuple[str, ...] = Field(
        (), description="Other learning rates, `pattern=factor`: `image.*=0.1`; the last pattern that fits counts."
    )

    @field_validator("lr_scale")
    @classmethod
    def _factors_are_numbers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            pattern, _, factor = text.rpartition("=")
            if not pattern or not _FACTOR.fullmatch(factor):
                raise ValueError(f"write `pattern=factor`, for example `image.*=0.1` (got `{text}`)")
        return value


class Train(Section):
    """Length, precision and rhythm of a run. Give one of steps, samples, epochs."""

    path: ClassVar[str] = "train"
    steps: int | None = Field(None, ge=1, description="Optimizer steps in all.")
    samples: int | None = Field(None, ge=1, description="Rows in all (rounded up to whole steps).")
    epochs: float | None = Field(None, gt=0, description="Passes over the set.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 where the device does it well, fp16 on older GPUs, fp32 on a CPU."
    )
    seed: int = Field(0, ge=0, description="Everything random draws from it.")
    log_every: int = Field(10, ge=1, description="Steps between two lines of metrics.jsonl.")
    checkpoint_every: int | Literal["auto"] = Field(
        "auto",
        description="Steps between checkpoints; 0: only the last; auto: under 2% of the time, and after evaluations.",
    )
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept, beside the best.")
    max_nonfinite: int = Field(10, ge=1, description="So many non-finite steps in a row end the run.")
    ema: float = Field(
        0.0, ge=0, lt=1, description="Decay of averaged weights, which are then evaluated and exported; 0: none."
    )
    recompute: tuple[str, ...] = Field(
        (), description="Branches (`image`, `text`) whose activations are computed again in backward, to save memory."
    )
    compile: str = Field("none", description="`none`, or a torch.compile backend for the branches, as `inductor`.")
    channels_last: bool = Field(False, description="Weights and pixels with channels last (faster convolutions).")
    deterministic: bool = Field(False, description="torch's deterministic algorithms (slower on a GPU).")
    parallel: Literal["ddp", "fsdp", "branches", "single"] = Field(
        "ddp", description="Replicas, sharded weights, image and text branch on two devices of one worker, or one."
    )
    bucket_mb: float = Field(25.0, gt=0, description="Gradients that travel together (ddp).")
    gradient_views: bool = Field(True, description="Gradients live in the buckets; off takes their memory twice (ddp).")
    compress: Literal["none", "bf16", "fp16"] = Field("none", description="Format in which gradients travel (ddp).")
    refit_every: int = Field(50, ge=1, description="Steps between two cuts by measured time (branches).")
    profile: int = Field(0, ge=0, description="Steps of which a torch profile is written into the run's folder.")
    callbacks: tuple[str, ...] = Field((), description="Your own `package.module:Class`, called after each step.")

    @field_validator("checkpoint_every")
    @classmethod
    def _is_a_rhythm(cls, every: int | str) -> int | str:
        if isinstance(every, int) and every < 0:
            raise ValueError(f"must be `auto` or at least 0 (got {every})")
        return every

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        given = [name for name in ("steps", "samples", "epochs") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of steps, samples, epochs (got {', '.join(given)})")
        return self


class Scoring(Section):
    """Scores on held-out rows: retrieval always, where an equal caption is as right as the row's own; classes where
    they are named or the model has a head for them."""

    path: ClassVar[str] = "evaluate"
    batch: int = Field(128, ge=1, description="Rows embedded at once by one worker.")
    chunk: int = Field(4096, ge=1, description="Rows of the gallery scored at once; memory is chunk x chunk.")
    limit: int | None = Field(None, ge=1, description="Evaluate on the first N rows only.")
    answers: int = Field(
        0, ge=0, description="Rows a model that writes is asked about: BLEU and CIDEr against their captions; 0: none."
    )
    answer_tokens: int = Field(64, ge=1, description="Longest answer in tokens.")
    classes: tuple[str, ...] = Field(
        (),
        description="Names of the labels 0, 1, ...: zero-shot classification by them; empty: the set's own, where it "
        "was a folder for each class.",
    )
    prompts: tuple[str, ...] = Field(
        ("a photo of a {}.",), min_length=1, description="Sentences for a class, `{}` its name; their mean counts."
    )

    language: str | None = Field(
        None,
        description="Language of `classes` and `prompts`, where the model has tokens of languages.",
    )

    @field_validator("prompts")
    @classmethod
    def _prompts_have_a_place(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for prompt in value:
            if "{}" not in prompt:
                raise ValueError(f"each needs a place `{{}}` for the name of the class (got `{prompt}`)")
        return value


class Evaluate(Scoring):
    """Scores on held-out rows, and when a run takes them."""

    every: int = Field(0, ge=0, description="Steps between evaluations in training; 0: only at the end.")

    @property
    def scoring(self) -> Scoring:
        """What is scored and how, whenever that is."""
        return Scoring(**{name: getattr(self, name) for name in Scoring.model_fields})
