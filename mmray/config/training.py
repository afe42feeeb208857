"""Settings of training: batch, optimizer, schedule, checkpoints, evaluation."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

import tyro
from pydantic import Field, ValidationInfo, field_validator, model_validator

from mmray.builtin import STRATEGIES
from mmray.config.base import Section, check_name
from mmray.config.prompts import expand_prompts
from mmray.plugins import load_part

Fraction = Annotated[float, Field(ge=0, lt=1)]
BUILT_IN = {
    "kind": ("adamw", "muon"),
    "schedule": ("cosine", "linear", "constant", "cooldown"),
}
Multiplier = Annotated[str, Field(pattern=r"^.+=\d+(\.\d*)?(e-?\d+)?$")]


class Batch(Section, settings_prefix="batch"):
    """global = micro x accumulation x workers.

    Give `global` and `micro`, or `micro` and `accumulation`; or `global` and `tokens`.
    """

    micro: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="Rows per forward pass and worker; auto: as many as fit in memory, "
        "measured before step 1.",
    )
    accumulation: int | None = Field(None, ge=1, description="Forward passes per worker and step.")
    tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens per forward pass and worker, for vision-language models, whose "
        "rows differ in length; instead of `micro`. Rows are divided evenly among the workers.",
    )
    group_by_length: bool = Field(
        False, description="Group rows of similar caption (or clip) length in a micro-batch."
    )
    global_: Annotated[int | None, tyro.conf.arg(name="global")] = Field(
        None,
        alias="global",
        ge=1,
        description="Rows per optimizer step over all workers; constant during a run.",
    )

    @property
    def is_searched(self) -> bool:
        """Whether the largest micro-batch that fits is searched before step 1 (`micro` `auto`)."""
        return self.micro == "auto"

    def without_overridden(self, given: Collection[str]) -> Batch:
        """Return a copy without the settings that would contradict other settings, which are set
        next.

        These settings become None:
        - `global` if `micro` and `accumulation` are given without it;
        - `micro` and `accumulation` if `tokens` is given without them;
        - a `micro` of `auto` if `accumulation` is given without `micro`.
        """
        names = {name.removeprefix("batch.") for name in given if name.startswith("batch.")}
        if {"micro", "accumulation"} <= names and "global" not in names:
            return self.replace(global_=None)
        if "tokens" in names and not {"micro", "accumulation"} & names:
            return self.replace(micro=None, accumulation=None)
        if "accumulation" in names and "micro" not in names and self.is_searched:
            return self.replace(micro=None)  # derived from the accumulation
        return self


class Optimizer(Section, settings_prefix="optimizer"):
    """Optimizer, learning rate schedule and gradient clipping."""

    kind: str = Field(
        "adamw",
        description="`adamw`, `muon` (with AdamW for all but hidden matrices), or a class as "
        "`package.module:Class`, such as `timm.optim:Lion`.",
    )
    settings: dict[str, bool | int | float | str] = Field(
        {}, description="Further arguments of the optimizer's class, such as `eps 1e-8`."
    )
    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")
    final_lr_fraction: float = Field(
        0.0, ge=0, le=1, description="Final learning rate as a fraction of the peak."
    )
    warmup_steps: int = Field(100, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(
        0.1, ge=0, description="Weight decay of matrices; others have none."
    )
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.98), description="Betas of the built-in optimizers."
    )
    clip_norm: float = Field(1.0, ge=0, description="Maximum gradient norm; 0: no clipping.")
    schedule: str = Field(
        "cosine",
        description="Learning rate after warm-up: `cosine`, `linear`, `constant`, `cooldown` "
        "(constant, then linear in "
        "the last 20%), or your own `package.module:function` of (step, steps).",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Name patterns of frozen weights, such as `image.tower.*`; `image[:-2]`: a "
        "branch before its last 2 blocks.",
    )
    lr_multipliers: tuple[Multiplier, ...] = Field(
        (),
        description="Learning rate factors as `pattern=factor`, such as `image.*=0.1`; the "
        "last match applies.",
    )
    layer_decay: tuple[Multiplier, ...] = Field(
        (),
        description="Factor of the learning rate from each block of a branch to the block before, "
        "as `image=0.75`, on top of `lr_multipliers`.",
    )

    @field_validator("kind", "schedule")
    @classmethod
    def _check_name(cls, value: str, info: ValidationInfo) -> str:
        return check_name(value, BUILT_IN[str(info.field_name)])


class Train(Section, settings_prefix="train"):
    """Length, precision and parallelism of a run. Give one of steps, samples, epochs."""

    steps: int | None = Field(None, ge=1, description="Total optimizer steps.")
    samples: int | None = Field(None, ge=1, description="Total rows, rounded up to whole steps.")
    epochs: float | None = Field(
        None, gt=0, description="Passes over the training set, rounded up to whole steps."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="bf16 and fp16: autocast of float32 weights; auto: bf16 if the device supports "
        "it, fp16 on older GPUs, fp32 on a CPU.",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of all random numbers.")
    log_every: int = Field(10, ge=1, description="Steps between two lines of metrics.jsonl.")
    checkpoint_every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Steps between checkpoints; 0: only at the end; auto: after each evaluation, "
        "and in between as "
        "often as costs at most 2% of the time.",
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Newest checkpoints to keep, in addition to the best."
    )
    ema: Fraction = Field(
        0.0,
        description="Decay of an exponential moving average of the weights, for evaluation "
        "and export; 0: none.",
    )
    activation_checkpointing: tuple[str, ...] = Field(
        (),
        description="Branches (`image`, `text`) to recompute in backward.",
    )
    compile: Literal["auto", "none", "inductor", "aot_eager", "eager"] = Field(
        "auto",
        description="Backend of torch.compile for the blocks of the towers; aot_eager, eager: to "
        "debug; auto: inductor for runs of some minutes on GPUs of compute capability 8.0 or "
        "newer, otherwise none.",
    )
    float8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="Recipe of torchao (extra `float8`) for the matrix products of wide trainable "
        "linear layers: at least 1,024 inputs and outputs, and faster by torchao's measurements on "
        "an H100; needs bf16, compile, and GPUs of compute capability 8.9 (`rowwise`: 9.0) or "
        "higher.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="CUDA graphs of the towers, so that the host does not limit small batches; "
        "auto: on one GPU with one micro-batch per step, for towers without dropout and updated "
        "BatchNorm, without activation checkpointing, if memory allows.",
    )
    deterministic: bool = Field(
        False, description="Use torch's deterministic algorithms (slower on a GPU)."
    )
    parallel: str = Field(
        "ddp",
        description="`ddp`; FSDP2 over all workers (`fsdp`) or within a node (`hsdp`); `branches`: "
        "a worker with a GPU per branch; `single`: one process; or your own "
        "`package.module:Class`.",
    )
    profile: int = Field(
        0, ge=0, description="Steps to record with torch.profiler into the run's folder."
    )
    callbacks: tuple[str, ...] = Field(
        (), description="Your own `package.module:Class`, called after each step."
    )

    @model_validator(mode="after")
    def _check_length(self) -> Train:
        lengths = [
            name
            for name, value in self
            if name in ("steps", "samples", "epochs") and value is not None
        ]
        if len(lengths) > 1:
            raise ValueError(f"give one of steps, samples, epochs (got {', '.join(lengths)})")
        return self

    def with_length_of(self, other: Train) -> Train:
        """Return a copy with the length of another section: its `steps`, `samples` and `epochs`."""
        return self.replace(steps=other.steps, samples=other.samples, epochs=other.epochs)

    @property
    def gpus_per_worker(self) -> int:
        """Number of GPUs of each worker that trains on GPUs."""
        return int(load_part(self.parallel, "train.parallel", STRATEGIES).num_devices)


class EvalSettings(Section, settings_prefix="evaluate"):
    """Metrics on held-out rows: retrieval, and classification if there are class names or a
    classification head.
    """

    batch: int = Field(128, ge=1, description="Rows per forward pass and worker.")
    limit: int | None = Field(None, ge=1, description="Evaluate on the first N rows only.")
    loss_batch: int | None = Field(
        None,
        ge=1,
        description="Rows among which the held-out contrastive loss is computed; None: "
        "the global batch.",
    )
    num_generations: int = Field(
        0,
        ge=0,
        description="Answers that a vision-language model generates, for exact match, ANLS, etc.",
    )
    metrics: tuple[str, ...] = Field(
        (),
        description="Your own `package.module:function` of the embeddings, or of the generated "
        "answers, which returns metrics by name.",
    )
    classes: tuple[str, ...] = Field(
        (),
        description="Names of the labels 0, 1, ..., or a .txt file with one a line; empty: those "
        "of the set, if any.",
    )
    prompts: tuple[str, ...] = Field(
        ("a photo of a {}.",),
        min_length=1,
        description="Zero-shot prompts, with `{}` for the class name, or `imagenet` (80 prompts), "
        "`cifar` (18) or `simple` (7); their embeddings are averaged.",
    )

    def with_prompts(self, name: str) -> Self:
        """Return the settings with the texts of all prompts."""
        return self.replace(prompts=expand_prompts((name,) if name else self.prompts))

    @field_validator("prompts")
    @classmethod
    def _check_prompts(cls, prompts: tuple[str, ...]) -> tuple[str, ...]:
        expand_prompts(prompts)
        return prompts

    @field_validator("classes")
    @classmethod
    def _read_classes(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        if len(classes) != 1 or not classes[0].endswith(".txt"):
            return classes
        try:
            lines = Path(classes[0]).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the names in {classes[0]}: {error}") from None
        return tuple(line.strip() for line in lines if line.strip())


class Evaluate(EvalSettings):
    """Metrics on held-out rows and their interval."""

    every: int = Field(0, ge=0, description="Steps between evaluations; 0: only at the end.")
    where: Literal["training", "beside"] = Field(
        "training",
        description="`training`: on the workers, between two steps; `beside`: each checkpoint, in "
        "tasks of Ray on a free GPU or on nodes for data, while training continues.",
    )

    def outside_run(self, data: str | None) -> EvalSettings:
        """Return the settings of an evaluation by `mmray evaluate`, which has no `every`."""
        values = {name: value for name, value in self if name in EvalSettings.model_fields}
        return EvalSettings(**values | ({} if data is None else {"limit": None}))
