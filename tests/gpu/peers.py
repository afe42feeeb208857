"""Stage `peers` of command.py: mmray's loop compared with open_clip's own, for the same model, rows
and precision.

`PYTHONPATH=CHECKOUT/src` measures a checkout of open_clip in place of the installed release.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch

from mmray.bench.results import compare
from mmray.bench.step import WARMUP_STEPS, build_bench
from mmray.engine.collectives import Group
from tests.gpu.workload import GLOBAL_BATCH_SIZE, SMALL_ROWS, VIT_L, VIT_L_ROWS, Case, recipe

ROUNDS = 2
TOKENS = 77
VOCAB_SIZE = 49408
# open_clip's name, mmray's model (None: that of the recipe `clip`), rows of a step, timed steps
SIZES: tuple[tuple[str, Any, int, int], ...] = (
    ("ViT-B-32", None, GLOBAL_BATCH_SIZE, 15),
    ("ViT-B-32", None, SMALL_ROWS, 60),
    ("ViT-L-14", VIT_L, VIT_L_ROWS, 10),
)


class Loader:
    """The attributes and batches that open_clip's loop reads of a DataLoader; it starts the clock
    at the first timed step.
    """

    def __init__(self, batches: list[Any], steps: int) -> None:
        self.batches = batches
        self.num_batches = steps
        self.num_samples = steps * len(batches[0]["image"])
        self.start_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.num_batches):
            if step == WARMUP_STEPS:
                torch.cuda.synchronize()
                self.start_s = time.perf_counter()
            yield self.batches[step % len(self.batches)]


def peers(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that time open_clip's training loop, eager and compiled, and
    mmray's.

    Args:
        device: A GPU.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns dicts:
        the ratios of samples/s, then one of each loop.
    """
    for name, model, rows, steps in SIZES:
        yield f"{name}, {rows} rows", partial(measure, device, name, model, rows, steps)


def measure(
    device: torch.device, name: str, model: Any, rows: int, steps: int
) -> list[dict[str, Any]]:
    """Time the three loops in turn.

    Args:
        device: A GPU.
        name: Name of open_clip's model.
        model: The same as a `model` section; None: that of the recipe `clip`.
        rows: Rows of a step.
        steps: Timed steps of a measurement.
    """
    torch.compiler.reset()
    arms = {
        "mmray": mmray_loop(device, model, rows, steps),
        "open_clip": open_clip_loop(device, name, rows, steps, ""),
        "open_clip compiled": open_clip_loop(device, name, rows, steps, "--torchcompile"),
    }
    first_s = {}
    for arm, window in arms.items():
        start_s = time.perf_counter()
        window()  # compiles
        first_s[arm] = time.perf_counter() - start_s
    ratios = {
        "mmray_vs_open_clip": ("mmray", "open_clip"),
        "mmray_vs_open_clip_compiled": ("mmray", "open_clip compiled"),
    }
    result = compare(arms, ROUNDS, "samples_per_s", ratios)
    case = f"{name}, {rows} rows"
    first = {"case": case, "open_clip": version("open_clip_torch")} | result["ratios"]
    return [
        first,
        *(
            {"case": f"{case}, {row['arm']}", "first_window_s": first_s[row["arm"]]} | row
            for row in result["rows"]
        ),
    ]


def mmray_loop(
    device: torch.device, model: Any, rows: int, steps: int
) -> Callable[[], dict[str, float]]:
    """Return a function that times mmray's loop."""
    config = recipe("clip", device, compile="inductor")
    if model is not None:
        config = config.replace(model=model)
    bench = build_bench(config, Group(device=device), rows)

    def window() -> dict[str, float]:
        torch.cuda.reset_peak_memory_stats(device)
        seconds, loss = bench.loop_window(WARMUP_STEPS + steps)
        return {"samples_per_s": rows * steps / seconds, "loss": loss} | peak(device)

    return window


def open_clip_loop(
    device: torch.device, name: str, rows: int, steps: int, flags: str
) -> Callable[[], dict[str, float]]:
    """Return a function that times `train_one_epoch` of open_clip, as its command calls it."""
    import open_clip
    from open_clip_train import params, train

    options = params.parse_args(
        f"--device {device.type} --precision amp_bf16 --skip-scheduler --batch-size {rows} "
        f"--grad-clip-norm 1 --log-every-n-steps 5 {flags}".split()
    )
    vars(options).update(distill=False, rank=0, world_size=1, wandb=False, distributed=False)
    net = open_clip.create_model(name, device=device, output_dict=True)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-5, betas=(0.9, 0.98), eps=1e-6)
    generator = torch.Generator().manual_seed(0)
    side = net.visual.image_size[0]
    batches = [
        {
            "image": torch.randn(rows, 3, side, side, generator=generator).pin_memory(),
            "text": torch.randint(1, VOCAB_SIZE, (rows, TOKENS), generator=generator).pin_memory(),
        }
        for _ in range(2)
    ]
    task: Any = open_clip.create_task(options, model=net)
    state = train.TrainState(task, adam)
    if options.torchcompile:
        task.compile(target="task", backend=None, mode=None)

    def window() -> dict[str, float]:
        torch.cuda.reset_peak_memory_stats(device)
        loader = Loader(batches, WARMUP_STEPS + steps)
        data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        train.train_one_epoch(state, data, options)
        torch.cuda.synchronize()
        return {"samples_per_s": rows * steps / (time.perf_counter() - loader.start_s)} | peak(
            device
        )

    return window


def peak(device: torch.device) -> dict[str, float]:
    """Return the largest memory allocated since it was reset."""
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30}
