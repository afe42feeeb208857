"""What the stages of the GPU benchmark measure: recipes and rows of a step, on a CPU tiny ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Measurement, Timer

from mmray.config import Clip, ClipImage, ClipText, Config, Inputs, TwoTower, recipes
from tests.gpu.device_checks import INPUTS, MODELS, TOWERS

# several rows: each has its `case`
Case = tuple[str, Callable[[], dict[str, Any] | list[dict[str, Any]]]]
GLOBAL_BATCH_SIZE = 1024
SMALL_ROWS = 128  # the share of eight GPUs in 1,024
TINY_GLOBAL_BATCH_SIZE = 8
TINY_ROWS = 4
LOG_EVERY = 5  # steps
MAX_TIMING_S = 1.0  # limit of `time_calls`
# CLIP with ViT-L/14, whose image branch is 1,024 wide; its rows fit on a GPU of 80 GB.
VIT_L = Clip(
    inputs=Inputs(image_side=224, max_tokens=77),
    image=ClipImage(width=1024, depth=24, heads=16, patch=14),
    text=ClipText(width=768, depth=12, heads=12),
    embed_dim=768,
)
VIT_L_ROWS = 192
TINY = {model.kind: model for model, _ in MODELS.values()} | {
    "two_tower": TwoTower(inputs=INPUTS, **TOWERS, embed_dim=8)
}


def recipe(name: str, device: torch.device, **train: Any) -> Config:
    """Return a recipe (a complete config) for one worker; on a CPU with a tiny model.

    Args:
        name: Name of a built-in recipe, such as `clip`; on a CPU one of kind `clip`, `siglip`
            or `two_tower`.
        device: The device of the worker.
        train: Fields of the section `train` to change, such as `precision="bf16"`.
    """
    config = recipes.load(name)
    model = config.model if device.type == "cuda" else TINY[config.model.kind]
    settings = {
        "parallel": "single",
        "steps": None,
        "samples": None,
        "epochs": None,
        "log_every": LOG_EVERY,
    } | train
    cluster = config.cluster.replace(
        workers=1, accelerator="gpu" if device.type == "cuda" else "cpu"
    )
    return config.replace(model=model, cluster=cluster, train=config.train.replace(**settings))


def rows_of(device: torch.device) -> tuple[int, int]:
    """Return the numbers of rows of a step in a slow and in a fast measurement.

    The device limits the speed of the first one. The second one is so small that starting kernels
    takes the host longer than running them takes the device.

    Args:
        device: The device to measure; on a CPU both numbers are small.
    """
    cuda = device.type == "cuda"
    return (GLOBAL_BATCH_SIZE, SMALL_ROWS) if cuda else (TINY_GLOBAL_BATCH_SIZE, TINY_ROWS)


def time_calls(function: Callable[[], Any]) -> Measurement:
    """Time a function, including the kernels that it queues, in several measurements.

    Args:
        function: Called without arguments, often, for about a second at most.

    Returns:
        A Measurement of torch: `median` and `times`, seconds of a call.
    """
    # Not blocked_autorange, which often returns one measurement, so without a spread.
    timer = Timer("function()", globals={"function": function})
    return timer.adaptive_autorange(max_run_time=MAX_TIMING_S)
