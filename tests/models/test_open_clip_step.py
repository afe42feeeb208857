"""A step of the recipe `clip-scratch` is open_clip's, where open_clip is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmray import objectives
from mmray.config import recipes
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients
from mmray.models.build import build
from mmray.models.open_clip import rename_to_hf

open_clip = pytest.importorskip("open_clip")
VOCAB = 80
SIDE = 32
TOKENS = 10
LR = 5e-4
CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": SIDE, "patch_size": 8, "layers": 2, "width": 64},
    "text_cfg": {
        "context_length": TOKENS,
        "vocab_size": VOCAB,
        "layers": 2,
        "width": 32,
        "heads": 2,
    },
}


def save_open_clip(folder: Path, seed: int) -> nn.Module:
    """Write a random model of open_clip and its config; return the model in float64."""
    normalization = recipes.OPENAI_INPUTS.model_dump(include={"mean", "std"})
    config = {"model_cfg": CONFIG, "preprocess_cfg": normalization}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    net = open_clip.create_model(f"local-dir:{folder}", output_dict=True, load_weights=False)
    torch.save(net.state_dict(), folder / "open_clip_pytorch_model.bin")
    return net.double()


def open_clip_steps(net: nn.Module, image: Tensor, ids: Tensor, steps: int) -> dict[str, Tensor]:
    """Weights, under transformers' names, after steps with open_clip's parameter groups."""
    mean = torch.tensor(recipes.OPENAI_INPUTS.mean).view(3, 1, 1)
    std = torch.tensor(recipes.OPENAI_INPUTS.std).view(3, 1, 1)
    pixels = ((image / 255 - mean) / std).double()
    config = recipes.clip_scratch().optimizer
    decayed = []
    others = []
    for name, weight in net.named_parameters():
        is_plain = weight.ndim < 2 or any(part in name for part in ("bn", "ln", "bias"))
        (others if is_plain or "logit_scale" in name else decayed).append(weight)
    groups = [
        {"params": others, "weight_decay": 0.0},
        {"params": decayed, "weight_decay": config.weight_decay},
    ]
    # epsilon: open_clip's for a ViT
    adam = torch.optim.AdamW(groups, lr=LR, betas=config.betas, eps=1e-6)
    loss = open_clip.ClipLoss()
    for _ in range(steps):
        adam.zero_grad()
        out = net(pixels, ids)
        loss(out["image_features"], out["text_features"], out["logit_scale"]).backward()
        adam.step()
        with torch.no_grad():
            net.logit_scale.clamp_(0, torch.log(torch.tensor(100.0)).item())
    return rename_to_hf(net.state_dict())


def mmray_steps(folder: Path, image: Tensor, ids: Tensor, steps: int) -> dict[str, Tensor]:
    """Weights after the steps of the recipe, from the same file, under transformers' names."""
    recipe = recipes.clip_scratch()
    inputs = recipe.model.inputs.model_copy(update={"image_side": SIDE, "max_tokens": TOKENS})
    weights = str(folder / "open_clip_pytorch_model.bin")
    spec = recipe.model.model_copy(update={"inputs": inputs, "weights": weights})
    net = build(spec, VOCAB).double()
    objective = objectives.build(recipe.objective)
    train = recipe.train.model_copy(update={"precision": "fp32"})
    state = TrainState.build(train, recipe.optimizer, net, objective, Group())
    adam = state.optimizer
    for part in adam.param_groups:
        part["lr"] = LR
    mask = ids != 0
    batch = {
        "image": image,
        "input_ids": ids,
        "attention_mask": mask.long(),
        "key": torch.arange(len(ids)),
        "valid": mask.any(dim=1),
    }
    for _ in range(steps):
        adam.zero_grad()
        halves = [
            {name: column[part] for name, column in batch.items()}
            for part in torch.arange(len(ids)).chunk(2)
        ]
        rows = make_local_batch(halves)
        accumulate_gradients(state, rows, seed_of=lambda index: index)
        adam.step()
        net.clamp_parameters()
    names = dict(net.hf_names)
    out = {}
    for name, value in net.state_dict().items():
        prefix = next((ours for ours in names if name.startswith(ours)), None)
        if prefix is not None:
            out[names[prefix] + name.removeprefix(prefix)] = value
    return out


def test_two_steps_from_equal_weights_equal_open_clips(tmp_path: Path) -> None:
    """Two micro-batches here, one in open_clip; float64."""
    net = save_open_clip(tmp_path, seed=1)
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (8, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    ids = torch.randint(1, VOCAB - 1, (8, TOKENS), generator=generator)
    ids[:, -2:] = 0
    ids[:, -3] = VOCAB - 1  # the largest id, at which open_clip pools
    ours = mmray_steps(tmp_path, image, ids, 2)
    theirs = open_clip_steps(net, image, ids, 2)
    compared = 0
    for name, value in theirs.items():
        if name in ours:
            torch.testing.assert_close(
                ours[name].flatten(),
                value.double().flatten(),
                rtol=1e-6,
                atol=1e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )
            compared += 1
    # q, k and v are one matrix and one bias in each of the four layers of open_clip
    assert compared == len(list(net.parameters())) + 2 * 2 * 4
