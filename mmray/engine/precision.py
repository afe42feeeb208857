"""Mixed precision and seeding: the dtype of a forward, loss scaling, and reproducible random
numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b

import torch

from mmray.engine.parallel.device_defaults import capability_of, device_defaults

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Settings of autocast; weights, loss and optimizer stay in float32.

    `select_precision(setting, device)` returns it. `autocast()` returns the context manager of a
    forward, and `scaler()` the loss scaler.

    Attributes:
        name: `fp32`, `bf16` or `fp16`.
        dtype: Dtype of autocast; None for fp32.
        device_type: `cuda` or `cpu`.
    """

    name: str
    dtype: torch.dtype | None
    device_type: str

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context manager for a forward; without effect in fp32.

        It is new each time, because weights cast under no_grad must not be reused with gradients.
        """
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a loss scaler; disabled unless fp16, whose gradients underflow (bf16 has float32's
        range).
        """
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype == torch.float16)


def select_precision(setting: str, device: torch.device) -> Precision:
    """Resolve the setting `train.precision` for a device."""
    name = device_defaults(capability_of(device)).precision if setting == "auto" else setting
    return Precision(name, DTYPES[name], device.type)


def micro_seed(seed: int, step: int, rank: int, micro_index: int) -> int:
    """Return a 63-bit seed for a micro-batch; its second forward draws the same dropout masks."""
    # Hashed, because neighboring seeds give correlated streams.
    digest = blake2b(struct.pack("<4q", seed, step, rank, micro_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed torch's random number generators."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def fork_seeded_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager that seeds torch's random number generators, and restores them at its end.

    Args:
        device: A GPU whose generator is seeded in addition to the CPU's; or the CPU.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
