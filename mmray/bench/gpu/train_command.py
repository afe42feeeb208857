"""Stage `run` of command.py: `mmray train`, local and through Ray, against the loop alone.

Runs are commands, as a user starts them. Captions are longer than `max_tokens`, so the batches of
the loop alone have the shapes of those of a run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from mmray.bench import synthetic_images
from mmray.bench.gpu.workload import Case
from mmray.bench.step import WARMUP_STEPS, build_bench
from mmray.config import Batch, ClipImage, ClipText, Config, recipes, to_yaml
from mmray.engine.collectives import Group
from mmray.machine import cores

SKIPPED_LINES = 2  # of metrics.jsonl: the first steps compile and capture CUDA graphs
LOG_EVERY = 5  # steps
LOOP_WINDOWS = 3
WORDS = 80  # added to each caption
ROOT = Path(__file__).parents[3]  # of the package
TRAIN = [sys.executable, "-m", "mmray", "train"]
TINY = {"width": 16, "depth": 1, "heads": 2}
NUMBERS = {
    "cuda": {"photos": 4096, "rows": 1024, "steps": 60, "sample_steps": 300},
    "cpu": {"photos": 48, "rows": 8, "steps": 30, "sample_steps": 20},
}


def run(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that run `mmray train`, and its loop alone with the same
    global batch and micro-batch.

    The model is that of the recipe `sample`, and then of `clip` without and with Ray.

    Args:
        device: The device to measure.

    Yields:
        Name of the case, and a function that measures it and returns its values by name.
    """
    numbers = NUMBERS[device.type]
    folder = Path(tempfile.mkdtemp(prefix="mmray-bench-"))
    config = clip_config(device, str(folder / "photos-prepared"))
    files = {name: folder / f"{name}.yaml" for name in ("sample", "clip", "clip-ray")}
    files["clip"].write_text(to_yaml(config))
    files["clip-ray"].write_text(to_yaml(config.with_cluster(wait_for_nodes=True)))
    sample = recipes.load("sample")
    train_section = sample.train.replace(steps=numbers["sample_steps"], log_every=LOG_EVERY)
    sample = sample.replace(train=train_section)
    files["sample"].write_text(to_yaml(sample.with_cluster(accelerator=config.cluster.accelerator)))
    rates: dict[str, float] = {}

    def train(name: str) -> dict[str, Any]:
        row = train_command(folder, name, files[name])
        rates[name] = row["samples_per_s"]
        if "clip loop" in rates and name != "sample":
            row["run_vs_loop"] = row["samples_per_s"] / rates["clip loop"]
        return row

    def loop() -> dict[str, Any]:
        row = loop_alone(config, device)
        rates["clip loop"] = row["samples_per_s"]
        return row

    yield "sample", partial(train, "sample")
    yield "photos", partial(prepare_photos, folder, numbers["photos"])
    yield "clip loop", loop
    yield "clip", partial(train, "clip")
    yield "clip through Ray", partial(train, "clip-ray")


def clip_config(device: torch.device, prepared: str) -> Config:
    """Return the recipe `clip` with random weights for one worker; on a CPU with a tiny model.

    Args:
        device: The device of the worker.
        prepared: Folder of the prepared set to train on.
    """
    numbers = NUMBERS[device.type]
    cuda = device.type == "cuda"
    config = recipes.load("clip")
    inputs = config.model.inputs.replace(tokenizer="trained")
    model = config.model.replace(weights="none", vocab_size=49408, inputs=inputs)
    if not cuda:
        towers = {"image": ClipImage(**TINY, patch=16), "text": ClipText(**TINY)}
        model = model.replace(**towers, embed_dim=8, inputs=inputs.replace(image_side=32))
    train = config.train.replace(
        steps=numbers["steps"],
        epochs=None,
        log_every=LOG_EVERY,
        checkpoint_every=0,
        # with `auto` so few steps would be eager
        compile="inductor" if cuda else "none",
    )
    return config.replace(
        model=model,
        data=config.data.replace(train=prepared),
        batch=Batch(global_=numbers["rows"], micro=numbers["rows"]),
        train=train,
        evaluate=config.evaluate.replace(every=0),
    ).with_cluster(workers=1, accelerator="gpu" if cuda else "cpu")


def prepare_photos(folder: Path, num: int) -> dict[str, Any]:
    """Generate photographs on all cores, and prepare them with `mmray prepare`.

    Args:
        folder: Folder in which `photos` and the set `photos-prepared` (256 pixels) are written.
        num: Number of photographs.

    Returns:
        {"rows": num}.

    Raises:
        RuntimeError: `mmray prepare` failed.
    """
    workers = min(cores(), num)
    starts = [num * part // workers for part in range(workers + 1)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        parts = pool.map(generate, starts[:-1], starts[1:])
        items = [item for part in parts for item in part]
    source = synthetic_images.write_files(items, folder / "photos")
    file = source / synthetic_images.CAPTIONS
    command = [sys.executable, "-m", "mmray", "prepare", str(file), str(folder / "photos-prepared")]
    run_command([*command, "--image-side", "256", "--duplicates", "keep"], folder)
    return {"rows": num}


def generate(start: int, stop: int) -> list[tuple[bytes, str]]:
    """Return synthetic photographs with captions of more than WORDS (80) words.

    Args:
        start: Number of the first photograph.
        stop: Number after the last one.

    Returns:
        JPEG bytes and caption of each.
    """
    photos = synthetic_images.synthetic_photos(stop, start)
    words = synthetic_images.WORDS.split()
    more = " ".join(words[number % len(words)] for number in range(WORDS))
    return [(image, f"{caption} {more}") for image, caption in photos]


def train_command(folder: Path, name: str, config: Path) -> dict[str, Any]:
    """Run `mmray train`, and return what its files say about its speed.

    Args:
        folder: Storage of the run.
        name: Name of the run.
        config: The recipe file.

    Returns:
        `samples_per_s` (median), `lowest`, `highest`, `first_steps_taken_s` (seconds from the
        command to the stage `training`), `elapsed_s`, `data_wait_share` (0 to 1), `peak_gib`, and
        recall@1 if it was evaluated.

    Raises:
        RuntimeError: The command failed.
        AssertionError: The run was stopped or restarted.
    """
    place = ["--run.storage", str(folder), "--run.name", name]
    run_command([*TRAIN, str(config), *place], folder)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    result = json.loads((folder / name / "result.json").read_text())
    assert result["status"] == "finished" and result["restarts"] == 0, result
    timed = lines[SKIPPED_LINES:]
    rates = [line["throughput/samples_per_s"] for line in timed]
    started_s = {stage["stage"]: stage["at_s"] for stage in result["starts"][-1]}
    row = {
        "samples_per_s": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "first_steps_taken_s": started_s.get("training"),
        "elapsed_s": result["elapsed_s"],
        "data_wait_share": statistics.median(line["time/data_wait_share"] for line in timed),
        "peak_gib": lines[-1]["memory/peak_gib"],
    }
    scores = {name: value for name, value in result["scores"].items() if "recall_at_1/" in name}
    return row | scores


def run_command(command: list[str], folder: Path) -> None:
    """Run a command in a folder, and print its output.

    Args:
        command: The program and its arguments.
        folder: The working directory.

    Raises:
        RuntimeError: It failed; the message has the end of its output.
    """
    # of this process, also if mmray is not installed
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)  # into the log of the stage
    if done.returncode:
        end = " | ".join(done.stdout.splitlines()[-3:])
        raise RuntimeError(f"{' '.join(command[1:5])} ended with {done.returncode}: {end}")


def loop_alone(config: Config, device: torch.device) -> dict[str, Any]:
    """Time mmray's loop on synthetic batches, with the settings of a run.

    Args:
        config: The config of the run.
        device: The device to measure.

    Returns:
        `samples_per_s` (median), `lowest` and `highest` of several timings.
    """
    numbers = NUMBERS[device.type]
    rows = numbers["rows"]
    train = config.train.replace(parallel="single")
    bench = build_bench(config.replace(train=train), Group(device=device), rows)
    steps = WARMUP_STEPS + numbers["steps"] // LOOP_WINDOWS
    bench.loop_window(WARMUP_STEPS + 1)  # compiles
    rates = []
    for _ in range(LOOP_WINDOWS):
        seconds, _ = bench.loop_window(steps)
        rates.append(rows * (steps - WARMUP_STEPS) / seconds)
    return {"samples_per_s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
