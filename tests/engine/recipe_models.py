"""The tiny models of device_checks.py, trained on any number of ranks under any strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mmray import config
from mmray.data.stream.collate import iter_micro_batches
from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.collectives import Group
from mmray.engine.parallel.strategy import strategy_class
from mmray.engine.parallel.transforms import (
    apply_transforms,
    checkpoint_activations,
    compile_branches,
)
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from mmray.models.build import build, build_on
from mmray.models.protocol import saved_layers
from mmray.models.synthetic import synthetic_batch
from tests.engine import toy
from tests.gpu.device_checks import (  # noqa: F401 - for other tests
    IMAGE,
    IMAGE_INPUTS,
    INPUTS,
    MODELS,
    SHAPE,
    TEXT,
    TOWERS,
    VOCAB,
)

ROWS, STEPS = 8, 2
WITH_DROPOUT = config.TwoTower(
    inputs=INPUTS,
    image=config.ImageTower(name="convnet", width=8, depth=1),
    text=config.TextTower(width=16, depth=2, heads=2, dropout=0.3),
    embed_dim=8,
)
RESNET = TOWERS["image"].model_copy(update={"name": "resnet18"})
TOWERS_SPEC = config.Towers(
    inputs=config.ClipInputs(image_side=16, max_tokens=6, clip_s=0.3, frames=3, audio_rate=8000),
    **TOWERS,
    audio=config.AudioTower(width=16, depth=1, heads=2),
    video=config.FrameTransformer(depth=1, heads=2),
    embed_dim=8,
)
PAIRS = "audio_text + video_text + 0.5 * audio_video"
# Configs of transformers by part, from which a model has random weights without files.
WHISPER = {
    "model_type": "whisper",
    "vocab_size": 50,
    "num_mel_bins": 80,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 16,
    "max_source_positions": 100,  # 2 s
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
CLAP_AUDIO = {
    "model_type": "clap_audio_model",
    "patch_embeds_hidden_size": 8,
    "hidden_size": 16,
    "depths": [1, 1],
    "num_attention_heads": [2, 2],
    "num_hidden_layers": 2,
    "patch_size": 16,
    "patch_stride": [16, 16],
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "towers of Whisper": {"audio": WHISPER},
    "towers of CLAP": {"audio": CLAP_AUDIO},
}
OTHER_MODELS: dict[str, tuple[config.Model, str]] = {
    "resnet18": (
        config.TwoTower(
            inputs=INPUTS, image=RESNET, text=TOWERS["text"], embed_dim=8, batch_norm="frozen"
        ),
        "contrastive",
    ),
    "captioner": (
        config.Siglip(
            inputs=INPUTS, image=IMAGE, text=TEXT, decoder=config.CaptionDecoder(**SHAPE)
        ),
        "sigmoid + 2 * captioning",
    ),
    "towers": (TOWERS_SPEC, PAIRS),
    "towers with heads": (
        TOWERS_SPEC.replace(
            cross=config.CrossAttention(width=16, depth=1, heads=2), matching=True, classes=3
        ),
        f"{PAIRS} + 0.5 * clip_matching + classification",
    ),
    "towers of Whisper": (
        TOWERS_SPEC.replace(
            inputs=TOWERS_SPEC.inputs.replace(image_side=32, frames=4, audio_rate=16_000),
            audio=config.AudioTower(weights="Whisper"),
        ),
        PAIRS,
    ),
    "towers of CLAP": (
        TOWERS_SPEC.replace(
            inputs=TOWERS_SPEC.inputs.replace(audio_rate=48_000),
            audio=config.AudioTower(weights="CLAP"),
            video=config.FrameTransformer(depth=0),
        ),
        PAIRS,
    ),
}


def without_modalities(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of `towers`, some of which lack a modality; the last four have no audio."""
    if "has_text" not in batch:
        return batch
    missing = {
        "has_text": ([2, 6], None),
        "has_audio": ([1, 4, 5, 6, 7], "num_samples"),
        "has_video": ([0, 5], "num_frames"),
    }
    batch["num_samples"][3] = 700  # a shorter clip
    batch["num_frames"][3] = 1
    for name, (rows, count) in missing.items():
        batch[name][rows] = False
        if count is not None:
            batch[count][rows] = 0
    batch["label"] = torch.arange(len(batch["label"])) % 4 - 1  # some rows have none
    return batch


def train_kind(
    kind: str,
    group: Group,
    parallel: str,
    steps: int = STEPS,
    checkpointing: bool = False,
    backend: Any = None,
    micro: int = 3,
) -> torch.Tensor:
    """All weights after some steps in micro-batches of `micro` rows; the last row is padding.

    A sharded model has its weights on rank 0 only, as in a worker.
    `checkpointing`: of activations. `backend`: of torch.compile, for the blocks.
    """
    spec, objective = (MODELS | OTHER_MODELS)[kind]
    torch.manual_seed(3)
    shards = strategy_class(toy.train_settings(parallel=parallel)).shards_weights
    device = "meta" if shards and group.rank > 0 else "cpu"
    model = build_on(device, spec, VOCAB, saved_layers(ARCHITECTURES.get(kind, {})))
    model.double().train()
    for branch in model.branches().values():
        if checkpointing:
            checkpoint_activations(branch, compiles=backend is not None)
    compile_branches(model, toy.train_settings(compile=backend or "none"))
    state = toy.train_state(model, group, toy.objective(objective), parallel=parallel)
    share = ROWS // group.world_size
    for step in range(steps):
        batch = without_modalities(synthetic_batch(spec.inputs, VOCAB, ROWS, "cpu", seed=step))
        batch["valid"][-1] = False
        own_rows = {
            name: column[group.rank * share : (group.rank + 1) * share]
            for name, column in batch.items()
        }
        optimizer_step(state, make_local_batch(toy.cut(own_rows, micro)), lambda index: index)
    return toy.flat(model)


def train_stream(
    group: Group, micro: int, group_by_length: bool = True, steps: int = 5, **settings: Any
) -> torch.Tensor:
    """The weights of a run of CLIP on blocks of captions of different lengths."""
    plan = SamplePlan(
        num_rows=20, global_batch_size=8, world_size=group.world_size, seed=1, steps=steps
    )
    train = toy.train_settings(**settings)
    spec, objective = MODELS["clip"]
    torch.manual_seed(3)
    model = apply_transforms(build(spec, VOCAB).double(), train, toy.OPTIMIZER, group)
    options = {
        "objective": toy.objective(objective),
        "train": train,
        "group_by_length": group_by_length,
    }
    if steps:
        blocks = caption_blocks(plan, group.rank)
        micro_batches = iter_micro_batches(blocks, plan.rank_rows, micro, group_by_length)
        loop.train_loop(toy.train_spec(model, plan, group, micro, **options), micro_batches)
    return toy.flat(model)


def caption_blocks(plan: SamplePlan, rank: int) -> Iterator[dict[str, np.ndarray]]:
    """A rank's blocks of one step each, with random captions; each seventh row is not valid."""
    draw, rows = np.random.default_rng(2), plan.num_rows
    side = INPUTS.image_side
    columns = {
        "image": draw.integers(0, 256, (rows, 3, side, side), dtype=np.uint8),
        "input_ids": draw.integers(1, VOCAB, (rows, INPUTS.max_tokens)).astype(np.int32),
        "num_tokens": draw.integers(2, INPUTS.max_tokens + 1, rows).astype(np.int32),
        "key": np.arange(rows),
        "label": np.full(rows, -1),
        "valid": np.arange(rows) % 7 > 0,
    }
    for step in range(plan.steps):
        positions = plan.positions(step, rank)
        real = positions >= 0
        block = {
            name: column[np.where(real, plan.row_ids_at(positions), 0)]
            for name, column in columns.items()
        }
        yield block | {"valid": block["valid"] & real, "pos": positions}
