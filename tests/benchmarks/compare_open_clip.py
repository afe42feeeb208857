"""Train one CLIP on the same rows with open_clip and with mmray, and compare rate, start, memory
and gradients.

    python -m venv VENV && VENV/bin/pip install -e . open_clip_torch==3.3.0
    VENV/bin/python tests/benchmarks/compare_open_clip.py [--data FILE.jsonl] [--json RESULT.json]
        [--device cuda] [--open-clip FOLDER]

`--open-clip` takes a checkout of open_clip's repository in place of the installed release.
mmray/bench/README.md describes how each figure is measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import psutil
import torch
from open_clip_train import params, train
from torch import Tensor

from mmray import objectives
from mmray.bench import results, synthetic_images
from mmray.cli.train import train as train_command
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients
from mmray.machine import cores
from mmray.models.build import build
from mmray.version import VERSION

WARMUP_STEPS = 5  # not in the rate
POLL_S, MEMORY_EVERY_S = 0.05, 0.5
GENERATED_ROWS = 1024
GRADIENT_ROWS, MICRO_BATCHES = 32, 4
VOCAB_SIZE = 49408
MODELS = {  # by device: open_clip's config without the vocabulary, ViT-B/32 on a GPU
    "cpu": {
        "embed_dim": 256,
        "vision_cfg": {"image_size": 112, "patch_size": 16, "layers": 4, "width": 256},
        "text_cfg": {"layers": 4, "width": 256, "heads": 4},
    },
    "cuda": {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 224, "patch_size": 32, "layers": 12, "width": 768},
        "text_cfg": {"layers": 12, "width": 512, "heads": 8},
    },
}
PRECISIONS = {"cpu": ("fp32", "fp32"), "cuda": ("amp_bf16", "bf16")}  # of open_clip and of mmray
BATCH = {"cpu": 128, "cuda": 1024}
OPENAI = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
WEIGHTS = "open_clip_pytorch_model.bin"  # a name that `local-dir:` looks for
# relative to the largest; the biases of attention keys have none, because softmax cancels them
NO_GRADIENT = 1e-12


def create_model(folder: Path, device: str, context_length: int) -> int:
    """Write open_clip's config and random weights, with which both start; return the number of
    parameters.
    """
    model = MODELS[device]
    text = {"context_length": context_length, "vocab_size": VOCAB_SIZE, **model["text_cfg"]}
    config = {"model_cfg": model | {"text_cfg": text}, "preprocess_cfg": OPENAI}
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    net = open_clip.create_model(f"local-dir:{folder}")
    torch.save(net.state_dict(), folder / WEIGHTS)
    return sum(weight.numel() for weight in net.parameters())


def image_side(device: str) -> int:
    return int(MODELS[device]["vision_cfg"]["image_size"])


def read_rows(file: Path) -> list[tuple[str, str]]:
    """(image path, caption) of each row of JSON lines or CSV."""
    with file.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines) if file.suffix == ".csv" else map(json.loads, lines)
        return [(str(file.parent.resolve() / row["image"]), row["text"]) for row in rows]


def open_clip_command(args: argparse.Namespace, work: Path, name: str) -> list[str]:
    flags = f"""--model local-dir:{work / "model"} --train-data {work / "rows.tsv"}
        --dataset-type csv --epochs 1 --batch-size {args.batch} --workers {args.loaders}
        --device {args.device} --precision {PRECISIONS[args.device][0]}
        --aug-cfg scale=(0.9,1.0) --lr 5e-4 --warmup 10 --wd 0.2
        --grad-clip-norm 1 --log-every-n-steps 1 --logs {work} --name {name}"""
    return [sys.executable, "-m", "open_clip_train.main", *flags.split()]


def mmray_command(args: argparse.Namespace, work: Path, name: str) -> list[str]:
    run = f"--data.train {work / 'prepared'} --run.storage {work} --run.name {name}"
    return [sys.executable, "-m", "mmray", "train", *train_flags(args, work), *run.split()]


def train_flags(args: argparse.Namespace, work: Path) -> list[str]:
    """Recipe and settings of `mmray train` that equal those of `open_clip_command`."""
    tokenizer = Path(open_clip.__file__).with_name("bpe_simple_vocab_16e6.txt.gz")
    device = args.device
    backend = "inductor" if device == "cuda" else "none"
    return f"""clip --model.weights {work / "model" / WEIGHTS} --model.inputs.tokenizer {tokenizer}
        --model.inputs.image-side {image_side(device)}
        --model.inputs.max-tokens {args.context_length} --train.compile {backend}
        --augment.crop-scale 0.9 1 --batch.micro {args.batch} --batch.global {args.batch}
        --train.steps {args.steps} --train.precision {PRECISIONS[device][1]} --train.log-every 1
        --train.checkpoint-every 0 --optimizer.lr 5e-4 --optimizer.warmup-steps 10
        --optimizer.weight-decay 0.2 --evaluate.every 0 --cluster.workers 1
        --cluster.accelerator {"gpu" if device == "cuda" else "cpu"}
        --cluster.cpus-per-worker {args.threads} --data.workers {args.loaders}""".split()


# Command, its own log, and the text that the log has once per step.
RUNS = {
    "open_clip": (open_clip_command, "out.log", "Train Epoch:"),
    "mmray": (mmray_command, "metrics.jsonl", '"step":'),
}


def measure(
    args: argparse.Namespace, command: list[str], log: Path, step_logged: str
) -> dict[str, float]:
    """Run a training command; watch the steps in its own log and the memory of its processes."""
    settings = {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    settings["RAY_worker_niceness"] = "0"  # not Ray's 15: other programs slow both projects alike
    step_times: list[float] = []
    peak, next_sample_s = 0, 0.0
    with tempfile.TemporaryFile("w+") as output:
        start_s = time.perf_counter()
        process = psutil.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | settings
        )
        while process.poll() is None:
            steps = log.read_text().count(step_logged) if log.exists() else 0
            now_s = time.perf_counter() - start_s
            step_times += [now_s] * (steps - len(step_times))
            # Reading the PSS of Ray's processes takes a tenth of a core: not before the first step,
            # nor in timed steps.
            if now_s >= next_sample_s and (
                0 < len(step_times) < WARMUP_STEPS or len(step_times) == args.steps
            ):
                peak, next_sample_s = max(peak, total_memory(process)), now_s + MEMORY_EVERY_S
            time.sleep(POLL_S)
        if process.returncode or len(step_times) != args.steps:
            output.seek(0)
            reason = f"{len(step_times)} of {args.steps} steps, exit code {process.returncode}"
            raise SystemExit(f"{' '.join(command)}: {reason}\n{output.read()[-4000:]}")
    return {
        "samples_per_s": (args.steps - WARMUP_STEPS)
        * args.batch
        / (step_times[-1] - step_times[WARMUP_STEPS - 1]),
        "first_step_s": step_times[0],
        "total_s": time.perf_counter() - start_s,
        "peak_gib": peak / 2**30,
        # more than the threads and a loader: other programs ran too
        "load_1min": os.getloadavg()[0],
    }


def total_memory(parent: psutil.Process) -> int:
    """PSS of a process and its descendants, Ray's included; of a shared page each has its part."""
    total = 0
    for process in (parent, *parent.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it has ended
    return total


def compare_gradients(
    args: argparse.Namespace, work: Path, captions: list[str]
) -> dict[str, dict[str, float]]:
    """Relative error |accumulated - whole| / |whole| of the temperature's gradient, and the largest
    of other weights.

    Each project is compared with itself, in float64, on random pixels and the captions.
    """
    ids = open_clip.get_tokenizer(f"local-dir:{work / 'model'}")(captions)
    side = image_side("cpu")
    image = torch.randint(
        0, 256, (len(ids), 3, side, side), dtype=torch.uint8, generator=torch.manual_seed(0)
    )
    results = {}
    both = {
        "open_clip": (open_clip_gradients, "logit_scale"),
        "mmray": (mmray_gradients, "log_scale"),
    }
    for name, (gradients, scale) in both.items():
        whole, parts = (
            gradients(args, work, image, ids, len(ids) // number) for number in (1, MICRO_BATCHES)
        )
        least = NO_GRADIENT * max(gradient.norm() for gradient in whole.values())
        known = [weight for weight, gradient in whole.items() if gradient.norm() > least]
        errors = {
            weight: float((parts[weight] - whole[weight]).norm() / whole[weight].norm())
            for weight in known
        }
        results[name] = {"whole_temperature": whole[scale].item(), "temperature": errors.pop(scale)}
        results[name] |= {"other": max(errors.values()), "other_weights": len(errors)}
    return results


class Batches(list[Any]):
    """A list with the attributes that open_clip sets on its DataLoader."""

    num_batches = num_samples = 0


def open_clip_gradients(
    args: argparse.Namespace, work: Path, image: Tensor, ids: Tensor, rows: int
) -> dict[str, Any]:
    """Gradients that open_clip's training loop leaves after a step in micro-batches of `rows`
    (--accum-freq).
    """
    net = open_clip.create_model(f"local-dir:{work / 'model'}", output_dict=True).double()
    mean, std = (torch.tensor(OPENAI[name]).view(3, 1, 1) for name in ("mean", "std"))
    loader = Batches(
        zip(((image / 255 - mean) / std).double().split(rows), ids.split(rows), strict=True)
    )
    loader.num_batches, loader.num_samples = len(loader), len(ids)
    flags = (
        f"--device cpu --precision fp32 --skip-scheduler --batch-size {rows} --accum-freq "
        f"{len(loader)}"
    )
    options = params.parse_args(flags.split())
    vars(options).update(distill=False, rank=0, world_size=1, wandb=False, distributed=False)
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    if hasattr(train, "TrainState"):  # since 4.0
        loader[:] = [{"image": pixels, "text": tokens} for pixels, tokens in loader]
        state = train.TrainState(open_clip.create_task(options, model=net), sgd)
        train.train_one_epoch(state, data, options)
    else:
        loss = open_clip.create_loss(options)
        train.train_one_epoch(net, data, loss, 0, sgd, None, None, None, options)
    return {name: weight.grad for name, weight in net.named_parameters()}


def mmray_gradients(
    args: argparse.Namespace, work: Path, image: Tensor, ids: Tensor, rows: int
) -> dict[str, Any]:
    """Gradients of mmray's training step in micro-batches of `rows`."""
    config, group = train_command.parse(train_flags(args, work))["settings"], Group()
    net = build(config.model, VOCAB_SIZE).double()
    objective = objectives.build(config.objective)
    train = config.train.model_copy(update={"precision": "fp32"})
    state = TrainState.build(train, config.optimizer, net, objective, group)
    key, mask = torch.arange(len(ids)), ids != 0
    batch = {
        "image": image,
        "input_ids": ids,
        "attention_mask": mask.long(),
        "key": key,
        "valid": mask.any(dim=1),
    }
    micro_batches = [
        {name: column[part] for name, column in batch.items()} for part in key.split(rows)
    ]
    accumulate_gradients(state, make_local_batch(micro_batches), seed_of=lambda index: index)
    return {name: weight.grad for name, weight in net.named_parameters()}


def format_table(result: dict[str, Any]) -> str:
    """Markdown: medians over rounds with their range, and what they were measured with."""

    def summary(values: list[float]) -> str:
        low, middle, high = (
            f"{value:.3g}" for value in (min(values), statistics.median(values), max(values))
        )
        return f"{middle} ({low} to {high})"

    names, rounds = ("open_clip", "mmray"), result["rounds"]
    rows = [
        ("", *(f"{name} {result['versions'][name]}" for name in names), "mmray : open_clip"),
        ("---",) * 4,
    ]
    for label, key in (
        (f"samples/s after step {WARMUP_STEPS}", "samples_per_s"),
        ("seconds from the command to the first optimizer step", "first_step_s"),
        ("seconds of the whole command", "total_s"),
        ("peak memory of all processes (PSS), GiB", "peak_gib"),
    ):
        cells = (summary([each[name][key] for each in rounds]) for name in names)
        rows.append(
            (
                label,
                *cells,
                summary([each["mmray"][key] / each["open_clip"][key] for each in rounds]),
            )
        )
    rows.append(("seconds to prepare the set, once", "", f"{result['prepare_s']:.3g}", ""))
    # measured on a CPU
    for label, key in (
        (("the temperature", "temperature"), ("all other weights, largest", "other"))
        if result["gradients"]
        else ()
    ):
        cells = (f"{result['gradients'][name][key]:.1e}" for name in names)
        rows.append(
            (
                f"relative error of the gradient of {MICRO_BATCHES} micro-batches: {label}",
                *cells,
                "",
            )
        )
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    source = (
        f"{result['date']}, {result['machine']['cpu']}, {result['settings']['threads']} "
        f"threads, {versions}"
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + (
        f"\n\n{source}, {result['rows']:,} rows"
    )


def use_checkout(source: Path) -> None:
    """Run this script again with the packages of a checkout, unless they are already used."""
    if Path(open_clip.__file__).is_relative_to(source):
        return
    if not (source / "open_clip_train").is_dir():
        raise SystemExit(f"--open-clip: no checkout of open_clip with {source / 'open_clip_train'}")
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *sys.argv]
    raise SystemExit(subprocess.call(command, env=os.environ | {"PYTHONPATH": path}))


def open_clip_version(checkout: Path | None) -> str:
    """Return the version of open_clip, of a checkout with its commit."""
    if checkout is None:
        return version("open_clip_torch")
    git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    return f"{open_clip.__version__} ({commit})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="JSON lines or CSV with columns image and text; None: generated"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each project, in ABBA order")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a run")
    parser.add_argument("--device", choices=tuple(MODELS), default="cpu", help="cuda: ViT-B/32")
    parser.add_argument(
        "--batch", type=int, help="rows per step; None: 128 on a CPU, 1024 on a GPU"
    )
    parser.add_argument(
        "--context-length", type=int, default=32, help="maximum tokens of a caption"
    )
    parser.add_argument(
        "--threads", type=int, default=cores(), help="threads of the training process"
    )
    parser.add_argument(
        "--loaders",
        type=int,
        help="processes that decode images; None: 1, on a GPU all cores but one",
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--open-clip", type=Path, help="a checkout of open_clip; None: installed")
    args = parser.parse_args()
    if args.open_clip:
        use_checkout(args.open_clip.resolve() / "src")
    args.batch = args.batch or BATCH[args.device]
    args.loaders = args.loaders or (1 if args.device == "cpu" else max(1, cores() - 1))
    with tempfile.TemporaryDirectory(prefix="compare-open-clip-") as folder:
        result = compare(args, Path(folder))
    print(format_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def compare(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run both projects; return what --json writes."""
    machine = results.describe_machine(torch.device(args.device))
    # before the runs, because it fails if a package is missing
    versions = {"open_clip": open_clip_version(args.open_clip), "mmray": VERSION}
    versions |= {name: version(name) for name in ("torch", "ray", "transformers", "timm")}
    source = args.data
    if source is None:
        photos = synthetic_images.synthetic_photos(GENERATED_ROWS)
        source = synthetic_images.write_files(photos, work / "photos") / synthetic_images.CAPTIONS
    parameters, rows = (
        create_model(work / "model", args.device, args.context_length),
        read_rows(source),
    )
    with (work / "rows.tsv").open("w", newline="", encoding="utf-8") as file:
        # one epoch of open_clip has all steps, so that none waits for a new DataLoader
        endless = cycle(rows)
        csv.writer(file, delimiter="\t").writerows(
            [("filepath", "title"), *islice(endless, args.steps * args.batch)]
        )
    start_s = time.perf_counter()
    prepare = [
        sys.executable,
        "-m",
        "mmray",
        "prepare",
        str(source),
        str(work / "prepared"),
        "--duplicates",
        "keep",
    ]
    subprocess.run(prepare, check=True, stdout=sys.stderr)
    prepare_s, rounds = time.perf_counter() - start_s, []
    for number in range(args.rounds):
        measured = {}
        for name in ("open_clip", "mmray")[:: -1 if number % 2 else 1]:
            command, log, step_logged = RUNS[name]
            run = f"{name}-{number}"
            measured[name] = measure(args, command(args, work, run), work / run / log, step_logged)
            print(f"round {number + 1}, {name}: {measured[name]}", file=sys.stderr)
        rounds.append(measured)
    captions = [caption for _, caption in islice(cycle(rows), GRADIENT_ROWS)]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "versions": versions,
        "settings": {
            name: value
            for name, value in vars(args).items()
            if name not in ("data", "json", "open_clip")
        },
        "rows": len(rows),
        "parameters": parameters,
        "prepare_s": prepare_s,
        "gradients": {} if args.device == "cuda" else compare_gradients(args, work, captions),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
