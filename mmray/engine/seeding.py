"""Dropout from (seed, step, rank, micro index): nothing random is stored, and a second forward draws the same masks."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def micro_seed(seed: int, step: int, rank: int, micro_index: int) -> int:
    """A 63-bit seed for the forward of one micro-batch; hashed, since neighbouring seeds give kindred streams."""
    digest = blake2b(struct.pack("<4q", seed, step, rank, micro_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int, deterministic: bool) -> None:
    """Torch's generators start from `seed`; `deterministic`: from here on it takes no other algorithms."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators (CPU and `device`) start from `seed` inside, and are put back after."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
