"""Random batches in the shape that a model takes, for dry runs, memory probes and benchmarks."""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from mmray.data.images.patches import patch_grid, pixel_shape, takes_patches
from mmray.data.media.clips import clip_batch, clip_columns
from mmray.data.stream.blocks import TEACHER_COLUMNS
from mmray.data.stream.collate import Batch
from mmray.models.protocol import as_model

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.config import Model as ModelConfig

_SIZES = ((480, 640), (640, 480), (640, 640), (360, 640))  # height and width of images in pixels


def synthetic_rows(
    model: nn.Module, spec: ModelConfig, rows: int, device: torch.device | str
) -> Batch:
    """Return a synthetic batch for a model: of its own `synthetic_batch(rows)`, if it has that,
    otherwise random pixels and random captions of the maximum length.
    """
    own = as_model(model).synthetic_batch(rows)
    if own is None:
        # Embeddings of a teacher, of one number each, because the width of the model is not known.
        teacher = {name: torch.ones(rows, 1, device=device) for name in TEACHER_COLUMNS}
        return synthetic_batch(spec.inputs, spec.vocab_size, rows, device) | teacher
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
        `image` uint8 [rows, 3, S, S], or as patches, of images of several aspect ratios;
        `input_ids` and `attention_mask` int64 [rows, T]; `key` (hash of a row's key) and `pos`
        int64 [rows], both 0, 1, ...; `label` int64 [rows], zeros; `valid` bool [rows], True. Models
        of clips get, in place of `image`, the columns of audio and video that `Towers.forward`
        lists.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = inputs.max_tokens
    shape = (rows, *pixel_shape(inputs))
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if takes_patches(inputs):
        # Patches after those of an image stay random; they must have no effect.
        grids = [patch_grid(*size, inputs) for size in islice(cycle(_SIZES), rows)]
        pixels[:, 0, :2] = torch.tensor(grids)
    clips = clip_columns(inputs)
    batch = {
        **({"image": pixels} if clips is None else {}),
        "input_ids": torch.randint(0, vocab_size, (rows, tokens), generator=generator),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
        "key": torch.arange(rows),
        "label": torch.zeros(rows, dtype=torch.long),
        "valid": torch.ones(rows, dtype=torch.bool),
        "pos": torch.arange(rows),
    }
    if clips is not None:
        # As many frames and samples as a row can have.
        draw = np.random.default_rng(seed)
        columns = clips.empty(rows)
        columns["has_text"][:] = True
        for medium, count in (("video", "num_frames"), ("audio", "num_samples")):
            if medium in columns:
                media = columns[medium]
                media[:] = draw.integers(0, 256, media.shape, media.dtype)
                columns[count][:] = media.shape[1]
        batch |= {name: torch.from_numpy(each) for name, each in clip_batch(columns).items()}
    return {name: column.to(device) for name, column in batch.items()}
