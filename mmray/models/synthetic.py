"""Random batches in the shape that a model takes, for dry runs, memory probes and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from mmray.data.columns import ExtraColumns, extra_columns
from mmray.data.stream.collate import Batch
from mmray.models.protocol import as_model

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.config import Model as ModelConfig

FILLS = {"boxes": (0, 0, 1, 1), "box_labels": 0, "has_text": True}


def synthetic_rows(
    model: nn.Module, spec: ModelConfig, rows: int, device: torch.device | str, seed: int = 0
) -> Batch:
    """Return a synthetic batch for a model: of its own `synthetic_batch(rows)`, if it has that,
    otherwise random pixels and random captions of the maximum length.
    """
    own = as_model(model).synthetic_batch(rows)
    if own is None:
        return synthetic_batch(spec.inputs, spec.vocab_size, rows, device, seed)
    return {name: column.to(device) for name, column in own.items()}


def synthetic_batch(
    inputs: Inputs, vocab_size: int, rows: int, device: torch.device | str, seed: int = 0
) -> Batch:
    """Return a batch of random pixels and random captions of the maximum length.

    Args:
        inputs: The `model.inputs` section, which defines sizes and columns.
        vocab_size: Token ids are below it.
        rows: Number of rows, all valid.
        device: Device of the result; the numbers come from the CPU, so they are equal on all.
        seed: Seed of the random numbers.

    Returns:
        `image` uint8 [rows, 3, S, S]; `input_ids` and `attention_mask` int64 [rows, T]; `key` (hash
        of a row's key) and `pos` int64 [rows], both 0, 1, ...; `label` int64 [rows], zeros; `valid`
        bool [rows], True. Models with boxes also get `boxes` float32 [rows, N, 4], `box_labels`
        int64 and `box_mask` bool [rows, N]; models of clips, in place of `image`, the columns of
        audio and video that `Towers.forward` lists.
    """
    generator = torch.Generator().manual_seed(seed)
    side = inputs.image_side
    tokens = inputs.max_tokens
    pixels = torch.randint(0, 256, (rows, 3, side, side), dtype=torch.uint8, generator=generator)
    batch = {
        **({} if getattr(inputs, "clip_s", 0) else {"image": pixels}),
        "input_ids": torch.randint(0, vocab_size, (rows, tokens), generator=generator),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
        "key": torch.arange(rows),
        "label": torch.zeros(rows, dtype=torch.long),
        "valid": torch.ones(rows, dtype=torch.bool),
        "pos": torch.arange(rows),
    }
    for extra in extra_columns(inputs):
        columns = extra.to_batch(_synthetic_columns(extra, rows, seed))
        batch |= {name: torch.from_numpy(column) for name, column in columns.items()}
    return {name: column.to(device) for name, column in batch.items()}


def _synthetic_columns(extra: ExtraColumns, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return further columns with as many values in each row as a row can have."""
    draw = np.random.default_rng(seed)
    columns = extra.empty(rows)
    for name, column in columns.items():
        if name in extra.counts:
            column[:] = columns[extra.counts[name]].shape[1]
        elif name in FILLS:
            column[:] = FILLS[name]
        else:  # pixels and samples
            column[:] = draw.integers(0, 256, column.shape, column.dtype)
    return columns
