"""Settings of data: how raw rows become a prepared set, and how it is streamed."""

from __future__ import annotations

import math
import re
from typing import Annotated, ClassVar, Literal

import tyro
from pydantic import Field, field_validator, model_validator

from mmray.config.base import Section
from mmray.errors import UsageError
from mmray.storage.address import parse_host

# `data.train` of several sets: `prepared/a + 2 * prepared/b`, each with the weight of its rows in an epoch.
_TERM = re.compile(r"(?:(\S+) \* +)?(\S.*)")


def parse_mixture(text: str) -> list[tuple[str, float]]:
    """(address, weight) of each set, in order; a plain address is one set of weight 1. Raises ValueError."""
    found: list[tuple[str, float]] = []
    for term in text.split(" + "):
        match = _TERM.fullmatch(term.strip())
        weight = _weight(match[1]) if match else None
        if match is None or weight is None or match[2] in dict(found):
            raise ValueError(
                f"`{text}` is neither a set nor a sum of different ones, at `{term.strip()}`; write for example "
                "`prepared/a + 2 * prepared/b`"
            )
        found.append((match[2], weight))
    return found


def is_mixture(text: str) -> bool:
    """Whether it is more than one set as it stands."""
    return parse_mixture(text) != [(text.strip(), 1.0)]


def write_mixture(terms: list[tuple[str, float]]) -> str:
    """The text that parse_mixture reads."""
    return " + ".join(address if weight == 1 else f"{weight:g} * {address}" for address, weight in terms)


def _weight(text: str | None) -> float | None:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        return None
    return weight if 0 < weight < math.inf else None


class Prepare(Section):
    """How raw rows become a prepared set: checked, cleaned, packed."""

    path: ClassVar[str] = "prepare"
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="More quarantined rows than this, duplicates included, end it (exit 5)."
    )
    max_bad_run: int = Field(
        0, ge=0, description="So many bad rows one after another end it too (a folder that is gone); 0: no limit."
    )
    image_side: int = Field(0, ge=0, description="Re-encode images whose shorter side is longer; 0 keeps the bytes.")
    max_pixels: int = Field(25_000_000, ge=1, description="Images whose header says more are refused before decode.")
    duplicates: Literal["image", "row", "text", "keep"] = Field(
        "image",
        description="A later row is a duplicate when its images (row: images and captions; text: images or captions) "
        "came before; or keep all.",
    )
    holdout: float = Field(0.0, ge=0, lt=1, description="Share of the rows without a split that becomes split `test`.")
    vocab_size: int = Field(8192, ge=0, description="Tokenizer trained on the captions: its size; 0 trains none.")
    format: Literal[
        "auto", "jsonl", "csv", "tsv", "parquet", "webdataset", "coco", "folders", "pairs", "lists", "saved"
    ] = Field("auto", description="Format of the source; auto: by what it is.")
    columns: tuple[str, ...] = Field((), description="Columns of other names, as OURS=THEIRS: image=url text=caption.")
    allow_urls: Annotated[tuple[str, ...], tyro.conf.arg(metavar="HOST [HOST ...]")] = Field(
        (),
        description="Hosts that images are fetched from where rows name them by https addresses "
        "(images.example.org, or host:8443); none: such rows are set aside.",
    )
    caption: str = Field("a photo of a {}", description="Caption of a class, where a source has classes and no text.")
    check: Literal["full", "header", "none"] = Field(
        "full", description="Images are decoded whole, or their headers read, or taken as they are."
    )
    reference: bool = Field(
        False, description="Keep the images where they are and write an index of them; the source must then stay."
    )
    against: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = Field(
        (), description="A prepared set whose images must not be in this one (repeat for several): leaks are counted."
    )
    near_bits: int = Field(
        7, ge=-1, le=31, description="Bits of a 256-bit perceptual hash that near-duplicates may differ in; -1: exact."
    )
    drop_leaked: bool = Field(
        False, description="Set leaks aside: rows in `against`, or of `train` in a held-out split."
    )
    rows_per_shard: int = Field(
        512, ge=1, le=65536, description="Source rows in one task and its shard files; 8192 for 100 million rows."
    )

    @field_validator("columns")
    @classmethod
    def _columns_are_pairs(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        known = (
            "id",
            "image",
            "images",
            "text",
            "texts",
            "label",
            "split",
            "language",
            "boxes",
            "box_labels",
            "messages",
        )
        for column in columns:
            ours, mark, theirs = column.partition("=")
            if not mark or not theirs or ours not in known:
                raise ValueError(f"must be OURS=THEIRS, ours one of {', '.join(known)} (got {column!r})")
        return columns

    @field_validator("allow_urls")
    @classmethod
    def _urls_are_of_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted({parse_host(host) for host in hosts}))

    @model_validator(mode="after")
    def _references_are_as_they_are(self) -> Prepare:
        if self.reference and self.image_side:
            raise UsageError("prepare.reference keeps images as they are: prepare.image_side must be 0 with it")
        return self

    @property
    def column_names(self) -> dict[str, str]:
        """Our name of a column -> the name it has in the source."""
        return {ours: theirs for ours, _, theirs in (column.partition("=") for column in self.columns)}


class Data(Section):
    """Where rows come from and how they are streamed."""

    path: ClassVar[str] = "data"
    train: str = Field(
        "sample",
        description="A prepared set, a raw source (prepared first, once), `sample`, or a sum of them, each weight "
        "times an epoch: `prepared/a + 2 * prepared/b`.",
    )
    train_split: str = Field("train", description="Split to train on, where the set has splits.")
    eval: str | None = Field(None, description="Set to evaluate on; none: `eval_split` of the training set, if there.")
    eval_split: str = Field("test", description="Split to evaluate on, where the set has splits.")
    cache: str = Field("prepared", description="Folder for sets that were prepared on the way.")
    workers: int | Literal["auto"] = Field("auto", description="Ray Data actors that decode; auto: from cores, memory.")
    limit: int | None = Field(None, ge=1, description="Train on the first N rows only, to try things.")
    shuffle: bool = Field(True, description="Another order each epoch, from the seed; off: source order.")
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Rows that lie together and come near each other, for few large reads of an object store; 1: any "
        "row comes anywhere; auto: from the bytes of a row on a store, 1 on a disk or of single files.",
    )
    window: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Chunks whose rows are mixed; auto: 16; with a local cache 256 or a step's rows."
    )
    local_cache: str | None = Field(
        None, description="Folder of each data node that keeps what was read of an object store; none: nothing is kept."
    )
    local_cache_gb: float = Field(20.0, gt=0, description="What the local cache may hold, in GB.")
    block_mb: float = Field(
        24.0, gt=0, le=512, description="Size of a block in MB; less where object stores are small."
    )
    keep_mb: float = Field(
        256.0,
        ge=0,
        description="Memory of a data worker for decoded images, in MB, where those of the whole set fit and nothing "
        "varies them; 0: each is decoded in each epoch.",
    )
    max_bad_rows: int = Field(16, ge=0, description="Rows that may fail at training time before the run fails.")

    @model_validator(mode="after")
    def _train_is_a_set_or_a_sum(self) -> Data:
        try:
            mixed = is_mixture(self.train)
        except ValueError as error:
            raise UsageError(f"data.train: {error}") from None
        if mixed and self.limit is not None:
            raise UsageError("data.limit is for one set; give the sets of a sum smaller weights instead")
        return self

    @model_validator(mode="after")
    def _workers_is_positive(self) -> Data:
        if isinstance(self.workers, int) and self.workers < 1:
            raise ValueError(f"workers must be `auto` or at least 1 (got {self.workers})")
        return self


# Settings of augmentation: how a training image is varied, another way each epoch.
class Augment(Section):
    """Variations of training images, drawn from (seed, epoch, key); held-out images are never varied."""

    path: ClassVar[str] = "augment"
    crop_scale: tuple[float, float] = Field(
        (1.0, 1.0), description="Random resized crop: smallest and largest share of the image's area; 1 1 is off."
    )
    crop_ratio: tuple[float, float] = Field((0.75, 4 / 3), description="Width by height of the random crop, from-to.")
    flip: float = Field(0.0, ge=0, le=1, description="Chance of a left-right flip; wrong where captions name sides.")
    brightness: float = Field(0.0, ge=0, lt=1, description="Brightness times 1 - b to 1 + b.")
    contrast: float = Field(0.0, ge=0, lt=1, description="Contrast times 1 - c to 1 + c.")
    saturation: float = Field(0.0, ge=0, lt=1, description="Saturation times 1 - s to 1 + s.")
    hue: float = Field(0.0, ge=0, le=0.5, description="Hue shifted by up to this share of the colour circle.")

    @property
    def crops(self) -> bool:
        return self.crop_scale != (1.0, 1.0)

    @property
    def varies(self) -> bool:
        return self.crops or any((self.flip, self.brightness, self.contrast, self.saturation, self.hue))

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> Augment:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale must be two shares of the area, 0 < low <= high <= 1 (got {low:g} {high:g})")
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"crop_ratio must be two ratios, 0 < low <= high (got {low:g} {high:g})")
        return self
