"""Arms of `bench loader`: two PyTorch baseline datasets, and the actor that runs every arm.

`TextbookDataset` follows tutorials: Pillow, Resize, CenterCrop, ToTensor, Normalize, captions padded to 512.
`TunedDataset` is optimized: uint8 pixels, crop and resize in one call, captions padded to the longest of the batch.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

from mmray.bench.timing import WARMUP_ARRIVALS, Arrival
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import Blocks, SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.stream.stream import iter_blocks

TEXTBOOK_TOKENS = 512  # padding="max_length" of a BERT
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FOREVER = 10**9  # dataset length that no window reaches, so that no loader restarts its workers


@dataclass
class Source:
    """Encoded images and captions by row, from files or a prepared set."""

    files: list[tuple[str, str]] | None
    prepared: PreparedSet | None = None

    def __len__(self) -> int:
        return len(self.files) if self.files is not None else self.prepared.num_rows if self.prepared else 0

    def row(self, index: int) -> tuple[Any, str]:
        """Return an argument for Image.open, and the caption."""
        if self.files is not None:
            return self.files[index]
        assert self.prepared is not None
        row = self.prepared.read(np.array([index]))[0]
        return io.BytesIO(row.image), row.texts[0]


class TextbookDataset(Dataset[dict[str, Tensor]]):
    """Rows: image float32 [3, side, side], normalized; input_ids and attention_mask int64 [512]."""

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


class TunedDataset(Dataset[tuple[Tensor, list[int]]]):
    """Rows: image uint8 [3, side, side] and unpadded caption ids; `TunedDataset.collate` builds the batch."""

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
        """Return images uint8 [B, 3, side, side], ids and mask int64 [B, longest]."""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for _, ids in rows], batch_first=True)
        lengths = torch.tensor([len(ids) for _, ids in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"image": torch.stack([image for image, _ in rows]), "input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class InfiniteShuffledSampler:
    """Sampler of one rank over an endless shuffled order."""

    num_rows: int
    rank: int
    world: int

    def __iter__(self) -> Iterator[int]:
        draw = np.random.default_rng(0)
        while True:
            yield from draw.permutation(self.num_rows)[self.rank :: self.world].tolist()


def loader(
    dataset: TextbookDataset | TunedDataset, rank: int, world: int, batch: int, workers: int
) -> Iterable[dict[str, Tensor]]:
    """Return the DataLoader of one rank over an endless order with `workers` processes (0: in this process)."""
    return DataLoader(
        dataset,
        batch_size=batch,
        sampler=InfiniteShuffledSampler(len(dataset.source), rank, world),
        num_workers=workers,
        collate_fn=dataset.collate if isinstance(dataset, TunedDataset) else None,
        pin_memory=torch.cuda.is_available(),
    )


CHUNK_ROWS = 32  # rows per arrival of the arms without batches


@ray.remote(num_cpus=0)
class LoaderWorker:
    """A process that runs one window per method call and returns its arrivals; batches are dropped.

    A window ends `window_s` seconds after its first arrivals, which do not count.
    """

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank

    def stream(self, iterator: Any, plan: SamplePlan) -> list[Arrival]:
        """Consume mmray's stream to its end, in the micro-batches of a training worker."""
        return list(_blocks(iter_blocks(iterator), plan))

    def loader(
        self, world: int, dataset: TextbookDataset | TunedDataset, batch: int, workers: int, window_s: float
    ) -> list[Arrival]:
        """Consume a DataLoader with `workers` processes."""
        return collect(_batches(loader(dataset, self.rank, world, batch, workers)), window_s)

    def reader(self, world: int, reader: RowReader, plan: SamplePlan, window_s: float) -> list[Arrival]:
        """Read, decode and tokenize as the stream does, in this process without Ray Data: its upper bound."""
        return collect(_read(reader, plan, self.rank, world), window_s)

    def raw(self, world: int, prepared: PreparedSet, window_s: float) -> list[Arrival]:
        """Read the stored bytes of a set's images once, in the set's order."""
        return collect(_read_raw(prepared, self.rank, world), window_s)

    def copied_bytes_per_s(self, num_bytes: int) -> float | None:
        """Return the bandwidth from pinned host memory to the GPU, bytes/s; None without a GPU."""
        if not torch.cuda.is_available():
            return None
        host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        device.copy_(host, non_blocking=True)  # the first copy also initializes the device
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(8):
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return 8 * num_bytes / (time.perf_counter() - began_s)


def collect(arrivals: Iterable[Arrival], window_s: float) -> list[Arrival]:
    """Collect arrivals until `window_s` seconds after the warm-up arrivals."""
    seen: list[Arrival] = []
    for arrival in arrivals:
        seen.append(arrival)
        if len(seen) > WARMUP_ARRIVALS + 1 and arrival.at_s - seen[WARMUP_ARRIVALS].at_s >= window_s:
            break
    return seen


def _blocks(blocks: Iterable[dict[str, np.ndarray]], plan: SamplePlan) -> Iterator[Arrival]:
    for block in blocks:
        now_s = time.time()
        for _ in iter_micro_batches([block], plan):
            pass
        epoch = int(block["pos"].max()) // plan.num_rows
        yield Arrival(now_s, int(block["valid"].sum()), epoch)


def _batches(batches: Iterable[dict[str, torch.Tensor]]) -> Iterator[Arrival]:
    for batch in batches:
        yield Arrival(time.time(), len(batch["image"]))


def _read(reader: RowReader, plan: SamplePlan, rank: int, world: int) -> Iterator[Arrival]:
    for start in range(rank * CHUNK_ROWS, plan.steps * plan.global_rows, world * CHUNK_ROWS):
        block = reader.block(plan, np.arange(start, start + CHUNK_ROWS))
        yield Arrival(time.time(), int(block["valid"].sum()))


def _read_raw(prepared: PreparedSet, rank: int, world: int) -> Iterator[Arrival]:
    yield Arrival(time.time(), 0)  # starts the clock, because a small set may yield only one more
    for start in range(rank * CHUNK_ROWS, prepared.num_rows, world * CHUNK_ROWS):
        rows = prepared.read(np.arange(start, min(start + CHUNK_ROWS, prepared.num_rows)))
        yield Arrival(time.time(), len(rows), num_bytes=sum(len(row.image) for row in rows))


def drop_page_cache(prepared: PreparedSet) -> bool:
    """Drop a set's shards from the page cache; return False if that is impossible."""
    root = prepared.storage.local_path
    if root is None or not hasattr(os, "posix_fadvise") or prepared.manifest.settings.get("index_only"):
        return False
    for shard in prepared.manifest.shards:
        with (root / shard.file).open("rb") as file:
            os.fdatasync(file.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


class NoopReader:
    """Ray Data actor that returns blocks of zeros in the shape of `RowReader.block`, to measure Ray's own cost."""

    def __init__(self, image_side: int, num_tokens: int, blocks: Blocks) -> None:
        self.image_side, self.num_tokens, self.blocks = image_side, num_tokens, blocks

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        positions = self.blocks.positions(int(batch["id"][0]))
        rows, side = len(positions), self.image_side
        return {
            "image": np.zeros((rows, 3, side, side), np.uint8),
            "input_ids": np.zeros((rows, self.num_tokens), np.int32),
            "num_tokens": np.full(rows, self.num_tokens, np.int32),
            "key": np.zeros(rows, np.int64),
            "label": np.zeros(rows, np.int64),
            "valid": positions >= 0,
            "pos": positions,
        }
