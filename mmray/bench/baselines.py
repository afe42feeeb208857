"""What `bench loader` compares: two PyTorch baseline datasets, and the process of a consumer."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.actors import rank_blocks
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import ResumePoint
from mmray.data.stream.pool_size import DecoderLimits
from mmray.data.stream.reader import RowReader

TEXTBOOK_TOKENS = 512  # padding="max_length" of a BERT
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
UNLIMITED_ROWS = 10**9  # rows that no window reaches, so that no loader restarts its workers
WARMUP_ARRIVALS = 6  # first arrivals of a consumer, excluded because other processes are starting


class Arrival(NamedTuple):
    """A block that a consumer received.

    Attributes:
        at_s: When it arrived, in seconds since the epoch (time.time()).
        rows: Number of rows.
    """

    at_s: float
    rows: int


def rows_per_s(consumers: Sequence[Sequence[Arrival]]) -> float:
    """Return the rows/s of all consumers together, which receive blocks of rows at the same time.

    The rate of a consumer is measured from its first arrival after the WARMUP_ARRIVALS (6) of the
    warm-up to its last one; with fewer than 8 arrivals between the last two, and with one it is 0.
    """
    total = 0.0
    for arrivals in consumers:
        counted = arrivals[min(WARMUP_ARRIVALS, max(0, len(arrivals) - 2)) :]
        took_s = counted[-1].at_s - counted[0].at_s
        total += sum(arrival.rows for arrival in counted[1:]) / took_s if took_s > 0 else 0.0
    return total


class CaptionDataset(Dataset[Any]):
    """Base of the PyTorch datasets that `bench loader` compares with the stream: it tokenizes
    captions. A subclass implements `__len__` and `__getitem__`, which reads an image or a clip.

    `encode(text)` returns a dict with `input_ids` and `attention_mask`, int64 [T].

    Args:
        max_tokens: Maximum number of tokens of a caption; longer ones are truncated.
        pad: Whether captions are padded to `max_tokens`; otherwise the collate function pads.
    """

    def __init__(self, tokenizer_json: str, max_tokens: int, pad: bool) -> None:
        self.tokenizer_json = tokenizer_json
        self.max_tokens = max_tokens
        self.pad = pad

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that truncates captions to `max_tokens`; it pads them to it if `pad` is set."""
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.enable_truncation(self.max_tokens)
        if self.pad:
            tokenizer.enable_padding(length=self.max_tokens)
        else:
            tokenizer.no_padding()
        return tokenizer

    def encode(self, text: str) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, int64 [T], of a caption; T is `max_tokens` with
        `pad`.
        """
        encoded = self.tokenizer.encode(text)
        return {
            "input_ids": torch.tensor(encoded.ids),
            "attention_mask": torch.tensor(encoded.attention_mask),
        }


class TextbookDataset(CaptionDataset):
    """PyTorch dataset of images in plain code, as tutorials write it: a baseline of `mmray bench
    loader`.

    A row has `image` float32 [3, side, side], normalized with the mean and deviation of ImageNet,
    and `input_ids` and `attention_mask` int64 [512].

    Args:
        files: (image file, caption) of each row.
        side: Height and width of an image in pixels.
    """

    def __init__(self, files: list[tuple[str, str]], tokenizer_json: str, side: int) -> None:
        super().__init__(tokenizer_json, TEXTBOOK_TOKENS, pad=True)
        self.files = files
        self.transform = Compose(
            [Resize(side * 256 // 224), CenterCrop(side), ToTensor(), Normalize(MEAN, STD)]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, text = self.files[index]
        image = Image.open(file).convert("RGB")
        return {"image": self.transform(image)} | self.encode(text)


class TunedDataset(CaptionDataset):
    """PyTorch dataset of images with little work per row, a baseline of `mmray bench loader`.

    `TunedDataset.collate` builds the batch. A row is an image uint8 [3, side, side] and the ids of
    the unpadded caption.

    Args:
        side: Height and width of an image in pixels.
        max_tokens: Longer captions are truncated.
    """

    def __init__(
        self, prepared: PreparedSet, tokenizer_json: str, side: int, max_tokens: int
    ) -> None:
        super().__init__(tokenizer_json, max_tokens, pad=False)
        self.prepared = prepared
        self.side = side

    def __len__(self) -> int:
        return self.prepared.num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, list[int]]:
        row = self.prepared.read(np.array([index]))[0]
        image = Image.open(io.BytesIO(row.image)).convert("RGB")
        short = min(image.size)
        left = (image.width - short) / 2
        top = (image.height - short) / 2
        box = (left, top, left + short, top + short)
        square = image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        pixels = np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))
        return torch.from_numpy(pixels), self.tokenizer.encode(row.texts[0]).ids

    @staticmethod
    def collate(rows: list[tuple[Tensor, list[int]]]) -> dict[str, Tensor]:
        """Build a batch.

        Args:
            rows: Pixels uint8 [3, side, side] and token ids of the caption, of each row.

        Returns:
            `image` uint8 [B, 3, side, side]; `input_ids` and `attention_mask` int64 [B, T], padded
            with 0 to the longest caption.
        """
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for _, ids in rows], batch_first=True
        )
        lengths = torch.tensor([len(ids) for _, ids in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {
            "image": torch.stack([image for image, _ in rows]),
            "input_ids": ids,
            "attention_mask": mask,
        }


@ray.remote(num_cpus=0)
class LoaderWorker:
    """A process that receives rows and drops them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def run(self, receive: Callable[..., list[Arrival]], *arguments: object) -> list[Arrival]:
        return receive(*arguments)


def receive_stream(
    rank: int, reader: RowReader, start: ResumePoint, block_mb: float, decoders: int
) -> list[Arrival]:
    """Receive the rows of a rank, with all ranks on this node, to the end of the stream."""
    arrivals = []
    limits = DecoderLimits(decoders, decoders, decoders)
    rows = start.plan.rank_rows
    world_size = start.plan.world_size
    blocks = rank_blocks(reader, start, rank, world_size, block_mb, limits, print)
    with closing(blocks):
        for block in blocks:
            arrivals.append(Arrival(time.time(), int(block["valid"].sum())))
            for _ in iter_micro_batches([block], rows, rows):
                pass
    return arrivals


def receive_batches(
    rank: int, dataset: Dataset[Any], batch: int, workers: int, window_s: float
) -> list[Arrival]:
    """Receive batches of random rows from a PyTorch DataLoader for some seconds.

    Args:
        rank: Seed of the rows.
        dataset: A baseline with `__len__` and `__getitem__`, such as TextbookDataset.
        batch: Rows of a batch.
        workers: Processes of the DataLoader.
        window_s: Seconds after the warm-up.

    Returns:
        The arrival of each batch, also of the warm-up.
    """
    seed = torch.Generator().manual_seed(rank)
    sized: Any = dataset
    batches = DataLoader(
        dataset,
        batch_size=batch,
        sampler=RandomSampler(sized, replacement=True, num_samples=UNLIMITED_ROWS, generator=seed),
        num_workers=workers,
        collate_fn=dataset.collate if isinstance(dataset, TunedDataset) else None,
        pin_memory=torch.cuda.is_available(),
    )
    arrivals: list[Arrival] = []
    for each in batches:
        arrivals.append(Arrival(time.time(), len(each["input_ids"])))
        is_warm = len(arrivals) > WARMUP_ARRIVALS + 1
        if is_warm and arrivals[-1].at_s - arrivals[WARMUP_ARRIVALS].at_s >= window_s:
            break
    return arrivals
