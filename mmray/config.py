"""Every setting of mmray: typed, ranged, documented once, frozen.

A config is built by a recipe (mmray/recipes.py) or read from YAML, changed by `--section.field value` flags, checked
here on the driver before any resource is asked for, and saved unchanged with the run and with each checkpoint.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Literal

import tyro
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmray.errors import UsageError

Fit = Literal["squash", "crop", "pad"]
Interpolation = Literal["bilinear", "bicubic"]


class Section(BaseModel):
    """A frozen group of settings; an unknown or bad value raises UsageError with the setting's full name."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    path: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _say_it_plainly(cls, value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise UsageError("\n".join(_explain(cls, item) for item in error.errors())) from None


def _explain(section: type[Section], item: Any) -> str:
    """One line for one pydantic error: setting, what is wrong, the value, and the nearest name for a typo."""
    name = ".".join([section.path, *(str(part) for part in item["loc"] if part not in ("int", "float", "str"))])
    name = name.strip(".") or "config"
    if item["type"] == "extra_forbidden":
        known = [field.alias or key for key, field in section.model_fields.items()]
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        return f"{name}: there is no such setting" + (f"; did you mean `{near[0]}`?" if near else f" (known: {known})")
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if item["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name}: {message} (got {item['input']!r})"


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

    @model_validator(mode="after")
    def _std_is_positive(self) -> Inputs:
        if min(self.std) <= 0:
            raise ValueError(f"std must be above 0 in each channel (got {self.std})")
        return self


class ImageTower(Section):
    """The image branch."""

    path: ClassVar[str] = "model.image"
    name: Literal["convnet", "vit", "resnet18", "resnet34", "resnet50", "resnet101"] = Field(
        "resnet50", description="A small GroupNorm network, a ViT, or a torchvision ResNet."
    )
    weights: str = Field(
        "none", description="`none`, `pretrained` (torchvision's, through the hub), or a file of weights."
    )
    width: int = Field(48, ge=8, description="Channels of the first stage (convnet), or of a token (vit).")
    depth: int = Field(4, ge=1, description="Stages (convnet) or blocks (vit).")
    heads: int = Field(4, ge=1, description="Attention heads (vit).")
    patch: int = Field(16, ge=1, description="Side of a patch in pixels (vit).")


class TextTower(Section):
    """The text branch."""

    path: ClassVar[str] = "model.text"
    name: Literal["bert"] = Field("bert", description="transformers' BERT.")
    weights: str = Field("none", description="`none`, a directory saved by transformers, or a hub name.")
    width: int = Field(128, ge=8, description="Width of a token (ignored with pretrained weights).")
    depth: int = Field(2, ge=1, description="Layers (ignored with pretrained weights).")
    heads: int = Field(4, ge=1, description="Attention heads (ignored with pretrained weights).")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of hidden states and attention.")
    vocab_size: int = Field(0, ge=0, description="Rows of the embedding; 0: as many as the tokenizer has.")


class TwoTower(Section):
    """Two encoders that meet at the loss (CLIP's layout)."""

    path: ClassVar[str] = "model"
    kind: str = Field("two_tower", description="`two_tower`, or your own `package.module:Class`.")
    inputs: Inputs = Inputs()
    image: ImageTower = ImageTower()
    text: TextTower = TextTower()
    embed_dim: int = Field(256, ge=2, description="Width of the shared embedding.")
    temperature: float = Field(0.07, gt=0.01, le=1, description="Softmax temperature at the start; it is learned.")
    batch_norm: Literal["local", "frozen", "synced"] = Field(
        "local", description="Running statistics: each worker's own, the weights' (eval mode), or synced (GPU only)."
    )


class Objective(Section):
    """Outputs to a loss."""

    path: ClassVar[str] = "objective"
    kind: str = Field("contrastive", description="`contrastive`, or your own `package.module:Class`.")


class Prepare(Section):
    """How raw rows become a prepared set: checked, cleaned, packed."""

    path: ClassVar[str] = "prepare"
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="More quarantined rows than this, duplicates included, end it (exit 5)."
    )
    image_side: int = Field(0, ge=0, description="Re-encode images whose shorter side is longer; 0 keeps the bytes.")
    max_pixels: int = Field(25_000_000, ge=1, description="Images whose header says more are refused before decode.")
    duplicates: Literal["image", "row", "keep"] = Field(
        "image",
        description="A later row is a duplicate when its images (or images and texts) came before; or keep all.",
    )
    holdout: float = Field(0.0, ge=0, lt=1, description="Share of the rows without a split that becomes split `test`.")
    vocab_size: int = Field(8192, ge=0, description="Tokenizer trained on the captions: its size; 0 trains none.")
    rows_per_shard: int = Field(512, ge=1, le=65536, description="Source rows in one task and its shard files.")


class Data(Section):
    """Where rows come from and how they are streamed."""

    path: ClassVar[str] = "data"
    train: str = Field("sample", description="A prepared set, a raw source (prepared first, once), or `sample`.")
    train_split: str = Field("train", description="Split to train on, where the set has splits.")
    eval: str | None = Field(None, description="Set to evaluate on; none: `eval_split` of the training set, if there.")
    eval_split: str = Field("test", description="Split to evaluate on, where the set has splits.")
    cache: str = Field("prepared", description="Folder for sets that were prepared on the way.")
    workers: int | Literal["auto"] = Field("auto", description="Ray Data actors that decode; auto: from cores, memory.")
    limit: int | None = Field(None, ge=1, description="Train on the first N rows only, to try things.")
    shuffle: bool = Field(True, description="Another order each epoch, from the seed; off: source order.")
    block_mb: float = Field(24.0, gt=0, le=512, description="Size of a block in the object store, in MB.")
    max_bad_rows: int = Field(16, ge=0, description="Rows that may fail at training time before the run fails.")

    @model_validator(mode="after")
    def _workers_is_positive(self) -> Data:
        if isinstance(self.workers, int) and self.workers < 1:
            raise ValueError(f"workers must be `auto` or at least 1 (got {self.workers})")
        return self


class Batch(Section):
    """global = micro x accumulation x workers. Give `global` and `micro`, or `micro` and `accumulation`."""

    path: ClassVar[str] = "batch"
    micro: int | None = Field(None, ge=1, description="Rows of one forward pass of one worker.")
    accumulation: int | None = Field(None, ge=1, description="Forward passes of one worker in a step.")
    global_: Annotated[int | None, tyro.conf.arg(name="global")] = Field(
        None, alias="global", ge=1, description="Rows of one optimizer step over all workers; never changes in a run."
    )


class Optimizer(Section):
    """AdamW with warm-up and cosine decay."""

    path: ClassVar[str] = "optimizer"
    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")
    final_lr_fraction: float = Field(0.0, ge=0, le=1, description="The last learning rate, as a share of the peak.")
    warmup_steps: int = Field(100, ge=0, description="Linear warm-up.")
    weight_decay: float = Field(0.1, ge=0, description="Decay of matrices; norms, biases, temperature get none.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="AdamW's moments.")
    eps: float = Field(1e-6, gt=0, description="AdamW's epsilon.")
    clip_norm: float = Field(1.0, ge=0, description="Largest gradient norm; 0 does not clip.")


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
    checkpoint_every: int = Field(500, ge=0, description="Steps between checkpoints; 0: only the last step.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept, beside the best.")
    max_nonfinite: int = Field(10, ge=1, description="So many non-finite steps in a row end the run.")
    deterministic: bool = Field(False, description="torch's deterministic algorithms (slower on a GPU).")
    callbacks: tuple[str, ...] = Field((), description="Your own `package.module:Class`, called after each step.")

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        given = [name for name in ("steps", "samples", "epochs") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of steps, samples, epochs (got {', '.join(given)})")
        return self


class Evaluate(Section):
    """Retrieval on held-out rows."""

    path: ClassVar[str] = "evaluate"
    every: int = Field(0, ge=0, description="Steps between evaluations in training; 0: only at the end.")
    batch: int = Field(128, ge=1, description="Rows embedded at once by one worker.")
    chunk: int = Field(4096, ge=1, description="Rows of the gallery scored at once; memory is chunk x chunk.")
    limit: int | None = Field(None, ge=1, description="Evaluate on the first N rows only.")


class Cluster(Section):
    """What a run asks of Ray."""

    path: ClassVar[str] = "cluster"
    address: str | None = Field(None, description="Ray address; none: RAY_ADDRESS where it is set, else this machine.")
    workers: int = Field(1, ge=1, description="Training workers (one GPU each, or CPU only).")
    accelerator: Literal["auto", "gpu", "cpu"] = Field("auto", description="auto: GPUs where the cluster has them.")
    cpus_per_worker: float = Field(1.0, gt=0, description="CPUs of a training worker.")
    max_failures: int = Field(3, ge=0, description="Worker failures after which the run gives up.")
    start_timeout_s: float = Field(600.0, gt=0, description="Wait this long for nodes that scale up.")
    collective_timeout_s: float = Field(300.0, gt=0, description="A collective that takes longer is an error.")


class Run(Section):
    """Name and place of a run's files."""

    path: ClassVar[str] = "run"
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Its folder; none: the recipe.")
    storage: str = Field("runs", description="Folder that every node sees.")
    resume: Literal["auto", "never", "must"] = Field("auto", description="Go on from the newest checkpoint, or not.")


class Config(Section):
    """One run, whole."""

    recipe: str = Field("custom", description="The recipe it began as.")
    model: TwoTower = TwoTower()
    objective: Objective = Objective()
    prepare: Prepare = Prepare()
    data: Data = Data()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    cluster: Cluster = Cluster()
    run: Run = Run()


def to_yaml(config: Section) -> str:
    """YAML that `from_yaml` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def from_yaml(text: str, where: str) -> Config:
    """Config of a YAML text; `where` names the file in errors. Raises UsageError."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{where} holds no settings: write `section: {{field: value}}`, as --print-config does")
    try:
        return Config.model_validate(values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
