"""Settings of data preparation, streaming and augmentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from pydantic import Field, ValidationInfo, field_validator, model_validator

from mmray.builtin import CHAT_COLUMNS, COLUMNS, FORMATS, KEEP_ALL, is_column_name
from mmray.config.base import Section, check_name, parse_range
from mmray.config.sets import (
    EvalSet,
    Mixture,
    parse_captions,
    parse_eval_sets,
)
from mmray.errors import UsageError

Fraction = Annotated[float, Field(ge=0, le=1)]
FULL_SHUFFLE = "1x1"  # value of data.shuffle_blocks in the config.yaml of a run
# Values of data.shuffle_blocks in a config.yaml; earlier versions wrote two numbers.
STORED_SHUFFLE = rf"{FULL_SHUFFLE}|[1-9]\d*x[1-9]\d*x[1-9]\d*"


class Prepare(Section, settings_prefix="prepare"):
    """Validation, deduplication and packing of raw rows into a prepared set."""

    max_bad_fraction: Fraction = Field(
        0.01, description="Maximum fraction of quarantined rows; above it, exit code 5."
    )
    image_side: int = Field(
        0, ge=0, description="Re-encode images whose shorter side is longer; 0: keep all bytes."
    )
    audio_rate: int = Field(
        0,
        ge=0,
        le=48_000,
        description="Re-encode audio as FLAC with one channel and this many samples a second, such "
        "as the model takes; 0: keep all bytes.",
    )
    max_pixels: int = Field(
        25_000_000,
        ge=1,
        le=178_956_970,
        description="Quarantine images of more pixels, before they are decoded. Pillow opens none "
        "of more than the maximum.",
    )
    pages: Literal["first", "images"] = Field(
        "first",
        description="Pages of a TIFF in a conversation: images makes each an image of the row; "
        "first: the others are counted and not used.",
    )
    duplicates: Literal["image", "row", "keep"] = Field(
        "image",
        description="Quarantine rows that repeat an earlier row's images (and conversation), or "
        "its images and captions (row), or keep all, even rows with the id of another.",
    )
    group: Literal["none", "image"] = Field(
        "none",
        description="image: make one row with all captions of the rows that have the same path or "
        "URL of an image.",
    )
    holdout: float = Field(
        0.0, ge=0, lt=1, description="Fraction of the rows without a split that becomes `test`."
    )
    split: str = Field(
        "auto",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Split of the rows: auto by the column `split`, otherwise by the names of "
        "files and folders; none; or a split for all rows.",
    )
    vocab_size: int = Field(
        8192, ge=0, description="Size of the tokenizer trained on the captions; 0: train none."
    )
    format: Annotated[
        str, tyro.conf.arg(metavar=f"{{auto,{','.join(FORMATS)}}}|package.module:Class")
    ] = Field("auto", description="Format of the source, or a class of your own; auto: detect it.")
    columns: tuple[str, ...] = Field(
        (), description="Columns of the source, as OURS=THEIRS: image=url text=caption."
    )
    keep: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME,NAME|all")] = Field(
        (),
        description="Columns of the source (numbers, booleans, texts) to store, such as "
        "similarity,width, for data.where; all: all that mmray does not read.",
    )
    compute: Annotated[str | None, tyro.conf.arg(metavar="package.module:function")] = Field(
        None,
        description="Your own function of a row that returns numbers, booleans and texts by name, "
        "which are stored as columns like those of `keep`.",
    )
    caption: str = Field(
        "a photo of a {}", description="Caption of a class, for sources with classes and no text."
    )
    repair_text: bool = Field(
        False,
        description="Repair wrongly decoded captions with ftfy and unescape "
        "HTML, as open_clip does.",
    )
    check: Literal["full", "header"] = Field(
        "full", description="Validate images and clips fully, or by their headers."
    )
    root: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = Field(
        (),
        description="Another folder whose files rows may name besides that of the source, by "
        "paths relative to it, absolute paths, paths with `..`, or symbolic links.",
    )
    index_only: bool = Field(
        False, description="Index the images in the source, which must stay, instead of copying."
    )
    check_contamination: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = Field(
        (), description="Count rows whose image is also in this prepared set, such as a benchmark."
    )
    drop_overlap: bool = Field(
        False,
        description="Quarantine rows found by `check_contamination`, and training rows also "
        "in another split.",
    )
    rows_per_shard: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = Field(
        "auto",
        description="Rows per shard, and per task except for tars; auto: 512 on a disk, 4096 on an "
        "object store, up to 16,384 in large sets.",
    )

    @field_validator("format")
    @classmethod
    def _check_format(cls, name: str) -> str:
        return check_name(name, ("auto", *FORMATS))

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for column in columns:
            ours, equals, theirs = column.partition("=")
            names = (*COLUMNS, *CHAT_COLUMNS)
            if not equals or not theirs or ours not in names:
                raise ValueError(
                    f"must be OURS=THEIRS, with OURS one of {', '.join(names)} (got {column!r})"
                )
        return columns

    @field_validator("keep")
    @classmethod
    def _check_keep(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(name.strip() for text in keep for name in text.split(",") if name.strip())
        for name in names:
            if name in COLUMNS:
                raise ValueError(f"`{name}` is a column that mmray stores itself; leave it out")
            if not is_column_name(name):
                raise ValueError(
                    f"`{name}` cannot be a name in data.where; rename the column to letters, "
                    "digits and _"
                )
            if names.count(name) > 1 or (name == KEEP_ALL and len(names) > 1):
                raise ValueError(f"`{name}` must be the only value (got {','.join(names)})")
        return names

    @field_validator("root")
    @classmethod
    def _make_absolute(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            each if "://" in each else str(Path(each).expanduser().absolute()) for each in folders
        )

    @model_validator(mode="after")
    def _check_index_only(self) -> Prepare:
        if self.index_only and (self.image_side or self.audio_rate or self.pages != "first"):
            raise UsageError(
                "prepare.index_only does not copy images and audio, so prepare.image_side and "
                "prepare.audio_rate must be 0, and prepare.pages `first`"
            )
        if self.index_only and self.root:
            raise UsageError(
                "prepare.index_only refers to images in the folder of the source only: leave out "
                "prepare.root, or copy the images"
            )
        return self

    @property
    def column_names(self) -> dict[str, str]:
        """Name in the source of each renamed column, such as {"text": "caption"}."""
        return {
            ours: theirs for ours, _, theirs in (column.partition("=") for column in self.columns)
        }


class Data(Section, settings_prefix="data"):
    """Data sets, row selection and streaming; training takes the split `train` of a set with
    splits.
    """

    train: str = Field(
        "sample",
        description="A prepared set, a raw source (prepared on first use), `sample`, or a mixture: "
        "`prepared/a + 2 * prepared/b` repeats the rows of b in each epoch, and `prepared/a:0.75, "
        "prepared/b:0.25` takes 75 % of the rows from a.",
    )
    eval: str | None = Field(
        None,
        description="Set to evaluate on, or several named ones, each maybe with a task, "
        "`retrieval` or `zero_shot PROMPTS`: `flickr=prepared/flickr, in1k=prepared/in1k "
        "(zero_shot imagenet)`; None: `eval_split` of the (first) training set.",
    )
    eval_split: str = Field("test", description="Split to evaluate on, if the set has splits.")
    where: str | None = Field(
        None,
        description="Train on the rows for which this holds of columns that `prepare --keep` or "
        "`score` stored: `similarity > 0.3 and width >= 200`.",
    )
    captions: str | None = Field(
        None,
        description="Columns of captions to train on, each with its share: `alt=0.3, "
        "synthetic=0.7`; rows without any are left out. None: all that `prepare --columns "
        "text=alt,synthetic` stored, alike.",
    )
    eval_captions: str | None = Field(
        None,
        description="Column of captions to evaluate on; rows without it are left out. None: the "
        "first that was stored.",
    )
    eval_where: str | None = Field(
        None, description="Evaluate on the rows for which this holds, like `where`."
    )
    cache: str = Field("prepared", description="Folder for sets that a run prepares.")
    workers: int | str = Field(
        "auto",
        description="Decode processes of the run, or a range such as 4-32: more while training "
        "waits for data; auto: at least one per training worker, at most what is free.",
    )
    targets: Literal["all", "last"] = Field(
        "all",
        description="Messages of the assistant that are trained: all, or the last of each row. "
        "`weight`, `loss` and `train` of a message multiply its loss.",
    )
    reasoning: Literal["trained", "masked"] = Field(
        "trained", description="Whether the reasoning of these messages is trained, too."
    )
    augment: str | None = Field(
        None,
        description="Your own `package.module:function` of a resized training image and a random "
        "generator, which returns the augmented image.",
    )
    limit: int | None = Field(None, ge=1, description="Train on the first N rows only.")
    shuffle: bool = Field(
        True, description="Shuffle each epoch differently, by the seed; False: source order."
    )
    shuffle_blocks: str | int = Field(
        "auto",
        description="LANESxROWSxBLOCKS: lanes of the global batch, each with its share of the "
        "epoch x adjacent rows of a block x blocks shuffled together; 1: shuffle single rows; "
        "auto: single rows on disks; on object stores by the size of rows and cache.",
    )
    local_cache: str | None = Field(
        "auto",
        description="Folder on each data node that caches blocks of sets on object stores; auto: "
        "in its temporary folder; None: read rows without a cache.",
    )
    local_cache_gb: float = Field(
        20.0, gt=0, description="Size limit of the local cache in GB; a larger one shuffles better."
    )
    block_mb: float = Field(
        24.0,
        gt=0,
        le=512,
        description="Maximum MB of the rows that a data process decodes at a time.",
    )

    @field_validator("train", "eval", "captions", "eval_captions")
    @classmethod
    def _check_syntax(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None:
            return None
        if info.field_name == "train":
            Mixture.parse(text)
        elif info.field_name == "eval":
            parse_eval_sets(text)
        elif len(parse_captions(text)) > 1 and info.field_name == "eval_captions":
            raise ValueError(f"an evaluation uses one column (got `{text}`)")
        return text

    @model_validator(mode="after")
    def _check_limit(self) -> Data:
        if self.limit is not None and not Mixture.parse(self.train).is_single:
            raise UsageError(
                "data.limit needs a single set; for a mixture, give the sets smaller weights"
            )
        return self

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, workers: int | str) -> int | str:
        if workers != "auto":
            try:
                parse_range(workers)
            except ValueError as error:
                raise ValueError(f"{error}, or auto") from None
        return workers

    @property
    def eval_sets(self) -> list[EvalSet]:
        """The sets of the setting `eval`. If it is None, one set with empty name and address, for
        the split `eval_split` of the training set.
        """
        return parse_eval_sets(self.eval or "")

    @property
    def worker_range(self) -> tuple[int, int] | None:
        """Smallest and largest number of processes that read and decode rows; None if `workers` is
        `auto`.
        """
        return None if self.workers == "auto" else parse_range(self.workers)

    @field_validator("shuffle_blocks")
    @classmethod
    def _check_shuffle_blocks(cls, value: str | int) -> str | int:
        text = FULL_SHUFFLE if str(value) == "1" else str(value)
        if not re.fullmatch(f"auto|{STORED_SHUFFLE}", text):
            raise ValueError(
                "must be `auto`, 1, or lanes x rows per block x blocks per window as 64x1024x4 "
                f"(got {value!r}; rows x blocks was the shuffle of an earlier version, which must "
                "finish the runs that it started)"
            )
        return text

    @property
    def block_shuffle(self) -> tuple[int, int, int] | None:
        """Lanes, rows per block and blocks per window of the block shuffle, such as (64, 1024, 4).

        A block is a range of adjacent rows of the set. The blocks of an epoch are permuted and
        divided among lanes, each of which fills the same part of every global batch. In a lane, the
        rows of a window of blocks are shuffled. None if single rows are shuffled, or if
        `shuffle_blocks` is still `auto`.
        """
        if self.shuffle_blocks in ("auto", FULL_SHUFFLE):
            return None
        lanes, rows, blocks = str(self.shuffle_blocks).split("x")
        return int(lanes), int(rows), int(blocks)


class Augment(Section, settings_prefix="augment"):
    """Random augmentation of training images; held-out images are not augmented.

    The random numbers depend on the seed of the run, how often the run has taken the row before,
    and the key (name) of the row.
    """

    function: ClassVar[str | None] = None  # RowReader adds `data.augment`
    crop_scale: tuple[float, float] = Field(
        (1.0, 1.0), description="Area of a random crop, lowest and highest fraction."
    )
    flip: Fraction = Field(
        0.0,
        description="Probability of a horizontal flip; wrong if captions mention left and right.",
    )
    color_jitter: tuple[float, float, float, float] = Field(
        (0.0, 0.0, 0.0, 0.0),
        description="Brightness, contrast, saturation and hue jitter, as in torchvision.",
    )

    @property
    def has_random_crop(self) -> bool:
        """Whether images are cropped at random."""
        return self.crop_scale != (1.0, 1.0)

    @property
    def is_active(self) -> bool:
        """Whether any augmentation is on."""
        return self.has_random_crop or any((self.flip, *self.color_jitter))

    @model_validator(mode="after")
    def _check_ranges(self) -> Augment:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                "crop_scale must be two shares of the area, 0 < low <= high <= 1 "
                f"(got {low:g} {high:g})"
            )
        *factors, hue = self.color_jitter
        if not (all(0 <= factor < 1 for factor in factors) and 0 <= hue <= 0.5):
            values = " ".join(f"{factor:g}" for factor in self.color_jitter)
            raise ValueError(
                f"color_jitter must be three numbers in [0, 1) and a hue in [0, 0.5] (got {values})"
            )
        return self
