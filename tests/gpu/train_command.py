"""Stage `run` of command.py: `mmray train`, local and through Ray, against the loop alone.

Runs are commands, as a user starts them. The batches of the loop alone have the shapes of those of
a run: captions of the photographs are longer than `max_tokens`, and the captions of the sample are
padded to it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmray.bench import synthetic_images
from mmray.bench.results import compare
from mmray.bench.step import WARMUP_STEPS, build_bench
from mmray.config import Batch, Config, recipes, to_yaml
from mmray.engine.collectives import Group
from tests.gpu.workload import LOG_EVERY, Case, recipe, rows_of

SKIPPED_LINES = 2  # first lines of metrics.jsonl: these steps compile and capture CUDA graphs
LOOP_WINDOWS = 3
CAPTIONS = 16  # captions of a photograph; each is a row of the set
WORDS = 80  # added to each caption
VOCAB_SIZE = 49408  # CLIP's; the tokenizer of the captions has less
ROOT = Path(__file__).parents[2]  # folder that contains the package
TRAIN = [sys.executable, "-m", "mmray", "train"]
NUMBERS = {
    "cuda": {"photos": 256, "clip_steps": 60, "sample_steps": 300, "small_steps": 100},
    "cpu": {"photos": 3, "clip_steps": 30, "sample_steps": 20, "small_steps": 20},
}


def run(device: torch.device) -> Iterator[Case]:
    """Yield cases (named measurements) that run `mmray train`, and its loop alone with the same
    global batch and micro-batch.

    Runs of the recipe `sample` and of `clip` are `sample`, `clip`, and the same `through Ray`;
    `sample loop` and `clip loop` are their loops alone. `photos` prepares the set of `clip`.
    `sample-vlm` and `sample-av` train the samples of conversations and of clips.

    Args:
        device: The device to measure.

    Yields:
        (name, function) of each case: the function is called without arguments, and returns a dict:
        what `train_command`, `prepare_photos` or `loop_alone` returns, and for runs `run_vs_loop`
        (samples/s of the run relative to those of the loop alone).
    """
    numbers = NUMBERS[device.type]
    folder = Path(tempfile.mkdtemp(prefix="mmray-bench-"))
    configs = {
        "sample": sample_config(device),
        "clip": clip_config(device, str(folder / "photos-prepared")),
        "sample-vlm": small_config("sample-vlm", device, numbers["small_steps"]),
        "sample-av": small_config("sample-av", device, numbers["small_steps"]),
    }
    rates: dict[str, float] = {}

    def loop(name: str) -> dict[str, Any]:
        row = loop_alone(configs[name], numbers[f"{name}_steps"], device)
        rates[name] = row["samples_per_s"]
        return row

    def train(name: str, wait_for_nodes: bool = False) -> dict[str, Any]:
        run_name = f"{name}-ray" if wait_for_nodes else name
        file = folder / f"{run_name}.yaml"
        file.write_text(to_yaml(configs[name].with_cluster(wait_for_nodes=wait_for_nodes)))
        row = train_command(folder, run_name, file)
        if name in rates:
            row["run_vs_loop"] = row["samples_per_s"] / rates[name]
        return row

    yield "sample loop", partial(loop, "sample")
    yield "sample", partial(train, "sample")
    yield "photos", partial(prepare_photos, folder, numbers["photos"])
    yield "clip loop", partial(loop, "clip")
    yield "clip", partial(train, "clip")
    for name in ("sample-vlm", "sample-av"):
        yield name, partial(train, name)
    yield "clip through Ray", partial(train, "clip", wait_for_nodes=True)
    yield "sample through Ray", partial(train, "sample", wait_for_nodes=True)


def sample_config(device: torch.device) -> Config:
    """Return the recipe `sample` for one worker, with at most 16 tokens a caption; on a CPU with
    fewer steps.

    Args:
        device: The device of the worker.
    """
    config = small_config("sample", device, NUMBERS[device.type]["sample_steps"])
    # A GPU pads captions to a multiple of 16 tokens, and those of the sample have at most 14.
    inputs = config.model.inputs.replace(max_tokens=16)
    return config.replace(model=config.model.replace(inputs=inputs))


def small_config(name: str, device: torch.device, steps: int) -> Config:
    """Return a recipe of a sample for one worker.

    Args:
        name: Name of the recipe, such as `sample-vlm`.
        device: The device of the worker.
        steps: Number of steps.
    """
    config = recipes.load(name)
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    return config.with_cluster(accelerator=accelerator).replace(
        train=config.train.replace(steps=steps, log_every=LOG_EVERY)
    )


def clip_config(device: torch.device, prepared: str) -> Config:
    """Return the recipe `clip` with random weights for one worker; on a CPU with a tiny model.

    Args:
        device: The device of the worker.
        prepared: Folder of the prepared set to train on.
    """
    rows = rows_of(device)[0]
    config = recipe(
        "clip",
        device,
        steps=NUMBERS[device.type]["clip_steps"],
        checkpoint_every=0,
        # With `auto`, so few steps would run eagerly.
        compile="inductor" if device.type == "cuda" else "none",
    )
    inputs = config.model.inputs.replace(tokenizer="trained")
    return config.replace(
        model=config.model.replace(weights="none", vocab_size=VOCAB_SIZE, inputs=inputs),
        data=config.data.replace(train=prepared),
        batch=Batch(global_=rows, micro=rows),
        evaluate=config.evaluate.replace(every=0),
    )


def prepare_photos(folder: Path, num: int) -> dict[str, Any]:
    """Generate photographs with CAPTIONS (16) captions each, and prepare them with `mmray prepare`.

    A caption has more than WORDS (80) words.

    Args:
        folder: Folder in which `photos` and the set `photos-prepared` (256 pixels) are written.
        num: Number of photographs.

    Returns:
        `rows`, the number of pairs of image and caption.

    Raises:
        RuntimeError: `mmray prepare` failed.
    """
    source = synthetic_images.write_files(synthetic_images.synthetic_photos(num), folder / "photos")
    words = synthetic_images.WORDS.split()
    more = " ".join(words[number % len(words)] for number in range(WORDS))
    lines = [
        json.dumps({"image": Path(image).name, "text": f"{caption} {number} {more}"})
        for image, caption in synthetic_images.read_captions(source)
        for number in range(CAPTIONS)
    ]
    file = source / "rows.jsonl"
    file.write_text("\n".join(lines))
    command = [sys.executable, "-m", "mmray", "prepare", str(file), str(folder / "photos-prepared")]
    run_command([*command, "--image-side", "256", "--duplicates", "keep"], folder)
    return {"rows": len(lines)}


def train_command(folder: Path, name: str, config: Path) -> dict[str, Any]:
    """Run `mmray train`, and return its speed from its files.

    Args:
        folder: Storage of the run.
        name: Name of the run.
        config: The recipe file.

    Returns:
        `samples_per_s` (median of the logged steps without the first two lines of metrics.jsonl),
        `lowest`, `highest`, `first_steps_taken_s` (seconds from the command to the stage
        `training`), `elapsed_s`, `data_wait_share` (0 to 1, median), `peak_gib`, and if it was
        evaluated the metrics `recall_at_1/...` of result.json.

    Raises:
        RuntimeError: The command failed.
        AssertionError: The run was stopped or restarted.
    """
    run_flags = ["--run.storage", str(folder), "--run.name", name]
    run_command([*TRAIN, str(config), *run_flags], folder)
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
    # The command imports the package of this process, also if it is not installed.
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


def loop_alone(config: Config, steps: int, device: torch.device) -> dict[str, Any]:
    """Time mmray's loop on synthetic batches, without `mmray train`, with the settings of a run.

    Args:
        config: The config of the run.
        steps: Number of its steps; each timing takes a third of them.
        device: The device to measure.

    Returns:
        `samples_per_s` (median), `lowest` and `highest` of several timings.
    """
    rows = config.batch.global_
    assert rows is not None
    if config.train.compile == "auto":  # the run is too short to be compiled
        config = config.replace(train=config.train.replace(compile="none"))
    bench = build_bench(config, Group(device=device), rows)
    timed_steps = steps // LOOP_WINDOWS
    bench.loop_window(WARMUP_STEPS + 1)  # compiles

    def measure() -> dict[str, float]:
        seconds, _ = bench.loop_window(WARMUP_STEPS + timed_steps)
        return {"samples_per_s": rows * timed_steps / seconds}

    measured = compare({"loop": measure}, LOOP_WINDOWS, "samples_per_s", ratios={})
    return dict(measured["rows"][0])
