"""Random batches in the shape that a model takes, for dry runs, memory probes and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmray.data.columns import extra_columns

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.config import Model as ModelConfig


def synthetic_rows(
    model: nn.Module, spec: ModelConfig, rows: int, device: torch.device | str, seed: int = 0
) -> dict[str, Tensor]:
    """Return a synthetic batch for a model: its own `synthetic_batch`, or that of its inputs.

    Arguments as of `synthetic_batch`; `spec` is the `model` section.
    """
    own = getattr(model, "synthetic_batch", None)
    if own is None:
        return synthetic_batch(spec.inputs, spec.vocab_size, rows, device, seed)
    return {name: column.to(device) for name, column in own(rows).items()}


def synthetic_batch(
    inputs: Inputs, vocab_size: int, rows: int, device: torch.device | str, seed: int = 0
) -> dict[str, Tensor]:
    """Return a batch of random pixels and full-length random captions, with distinct keys and
    positions.

    Args:
        inputs: The `model.inputs` section, which defines the columns (data/stream/collate.py).
        vocab_size: Token ids are below it.
        rows: Number of rows, all valid.
        device: Device of the result; the numbers come from the CPU, so they are equal on all.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    side = inputs.image_side
    tokens = inputs.max_tokens
    batch = {
        "image": torch.randint(
            0, 256, (rows, 3, side, side), dtype=torch.uint8, generator=generator
        ),
        "input_ids": torch.randint(0, vocab_size, (rows, tokens), generator=generator),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
        "key": torch.arange(rows),
        "label": torch.zeros(rows, dtype=torch.long),
        "valid": torch.ones(rows, dtype=torch.bool),
        "pos": torch.arange(rows),
    }
    if hasattr(inputs, "chat"):
        batch |= {
            "labels": batch["input_ids"].clone(),
            "image_pos": torch.zeros(rows, dtype=torch.long),
        }
    for extra in extra_columns(inputs):
        columns = extra.to_batch(extra.synthetic(rows))
        batch |= {name: torch.from_numpy(column) for name, column in columns.items()}
    return {name: column.to(device) for name, column in batch.items()}
