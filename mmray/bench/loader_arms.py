"""The PyTorch DataLoaders that the stream is measured against: the textbook's, and the best one written by hand.

`Textbook` is what tutorials do: Pillow, Resize, CenterCrop, ToTensor, Normalize, captions padded to 512. `Tuned` is
what an expert makes of it: uint8 pixels, crop and resize in one call, captions padded to the longest of the batch.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

from mmray.data.store.prepared_set import PreparedSet

TEXTBOOK_TOKENS = 512  # padding="max_length" of a BERT
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FOREVER = 10**9  # indices of a window without an epoch's end: neither loader pays for restarting its workers


@dataclass
class Source:
    """Encoded images and captions by row: of files, or of a prepared set."""

    files: list[tuple[str, str]] | None
    prepared: PreparedSet | None = None

    def __len__(self) -> int:
        return len(self.files) if self.files is not None else self.prepared.num_rows if self.prepared else 0

    def row(self, index: int) -> tuple[Any, str]:
        """What Image.open takes, and the caption."""
        if self.files is not None:
            return self.files[index]
        assert self.prepared is not None
        row = self.prepared.read(np.array([index]))[0]
        return io.BytesIO(row.images[0]), row.texts[0]


class Textbook(Dataset[dict[str, Tensor]]):
    """image float32 [3, side, side] normalised; input_ids and attention_mask int64 [512]."""

    def __init__(self, source: Source, tokenizer_json: str, side: int, max_tokens: int = TEXTBOOK_TOKENS) -> None:
        self.source, self.tokenizer_json, self.max_tokens = source, tokenizer_json, max_tokens
        self.transform = Compose([Resize(side * 256 // 224), CenterCrop(side), ToTensor(), Normalize(MEAN, STD)])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.enable_truncation(self.max_tokens)
        tokenizer.enable_padding(length=self.max_tokens)
        return tokenizer

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, text = self.source.row(index % len(self.source))
        encoded = self.tokenizer.encode(text)
        return {
            "image": self.transform(Image.open(file).convert("RGB")),
            "input_ids": torch.tensor(encoded.ids),
            "attention_mask": torch.tensor(encoded.attention_mask),
        }


class Tuned(Dataset[tuple[Tensor, list[int]]]):
    """image uint8 [3, side, side] and the ids of a caption, not padded; `Tuned.collate` makes the batch."""

    def __init__(self, source: Source, tokenizer_json: str, side: int, max_tokens: int) -> None:
        self.source, self.tokenizer_json, self.side, self.max_tokens = source, tokenizer_json, side, max_tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.enable_truncation(self.max_tokens)
        tokenizer.no_padding()
        return tokenizer

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> tuple[Tensor, list[int]]:
        file, text = self.source.row(index % len(self.source))
        image = Image.open(file).convert("RGB")
        short = min(image.size)
        left, top = (image.width - short) / 2, (image.height - short) / 2
        box = (left, top, left + short, top + short)
        square = image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        pixels = np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))
        return torch.from_numpy(pixels), self.tokenizer.encode(text).ids

    @staticmethod
    def collate(rows: list[tuple[Tensor, list[int]]]) -> dict[str, Tensor]:
        """uint8 [B, 3, side, side], ids and mask int64 [B, longest]."""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for _, ids in rows], batch_first=True)
        lengths = torch.tensor([len(ids) for _, ids in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"image": torch.stack([image for image, _ in rows]), "input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class Shuffled:
    """A rank's indices of a shuffled order without end, as a sampler: no epoch's end falls into a window."""

    num_rows: int
    rank: int
    world: int

    def __iter__(self) -> Iterator[int]:
        draw = np.random.default_rng(0)
        while True:
            yield from draw.permutation(self.num_rows)[self.rank :: self.world].tolist()


def loader(dataset: Textbook | Tuned, rank: int, world: int, batch: int, workers: int) -> Iterable[dict[str, Tensor]]:
    """A DataLoader of one rank over an order without end, with `workers` processes (0: in this one)."""
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=Shuffled(len(dataset.source), rank, world),
        num_workers=workers,
        collate_fn=dataset.collate if isinstance(dataset, Tuned) else None,
        pin_memory=torch.cuda.is_available(),
    )
