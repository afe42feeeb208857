"""Training speed of a vision-language model compared with TRL: the table in mmray/bench/README.md.

Run `PYTHONPATH=FOLDER python -m tests.benchmarks.compare_trl`, where FOLDER has TRL
(`pip install --target FOLDER --no-deps trl==1.16.0 accelerate datasets multiprocess dill xxhash`).
Both train the same Qwen3-VL of 3 million parameters from equal weights on equal rows in equal
order: 0 to 3 images of 32 to 256 pixels, texts of different lengths, 32 rows a step, on the CPUs of
this machine, each with one thread and a process that reads and encodes rows. So the losses of their
first steps are equal. TRL pads and processes whole batches in its collator; its micro-batches are
those of the fastest of several sizes. `--device cuda` compares a Qwen3-VL of 1.7 billion random
parameters on a GPU, in bf16.

`--objective dpo` trains on chosen and rejected answers. mmray reads the log-probabilities of the
reference from the set, which it scores once before (not in the times of steps; printed); TRL
computes them in each step, because it refuses to compute them before for rows with images.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image


@dataclass(frozen=True)
class Work:
    """What is trained on a device: rows, steps and sizes of the model."""

    text: dict[str, Any]
    vision: dict[str, Any]
    words: float  # mean of the logarithm of the number of words of a turn
    max_words: int
    image_sides: tuple[int, int]  # pixels
    max_tokens: int  # of a row
    packed_tokens: int  # of mmray's micro-batch
    global_rows: int
    num_rows: int
    steps: int
    warmup_steps: int
    trl_micro: tuple[int, ...]
    loaders: int  # processes that read rows


WORK = {
    "cpu": Work(
        text={
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
        },
        vision={"out_hidden_size": 192, "num_position_embeddings": 256},
        words=3.4,
        max_words=300,
        image_sides=(32, 256),
        max_tokens=1024,
        packed_tokens=2048,
        global_rows=32,
        num_rows=256,
        steps=8,
        warmup_steps=2,
        trl_micro=(8, 32),
        loaders=1,
    ),
    "cuda": Work(  # the sizes of Qwen3-VL-2B
        text={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "initializer_range": 0.02,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        vision={
            "depth": 24,
            "initializer_range": 0.02,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        words=4.4,
        max_words=700,
        image_sides=(256, 768),
        max_tokens=4096,
        packed_tokens=16384,
        global_rows=64,
        num_rows=1024,
        steps=11,
        warmup_steps=3,
        trl_micro=(8, 16),
        loaders=12,
    ),
}
SFT = "language_modelling"
LR = {SFT: 1e-4, "dpo": 1e-6}
WORDS = "circle square triangle cross red green blue yellow purple zero one two three shape color"


def write_rows(folder: Path, work: Work, objective: str) -> Path:
    """Write images and rows of different lengths; return the JSON lines."""
    draw = random.Random(0)
    lines = []

    def text() -> str:
        num_words = min(work.max_words, int(draw.lognormvariate(work.words, 0.9)) + 1)
        return " ".join(draw.choices(WORDS.split(), k=num_words))

    for number in range(work.num_rows):
        names = []
        for index in range(draw.choices((0, 1, 2, 3), (2, 5, 2, 1))[0]):
            low, high = work.image_sides
            width, height = (draw.randrange(low, high + 1) for _ in range(2))
            pixels = np.random.default_rng([number, index]).integers(0, 256, (8, 8, 3), np.uint8)
            names.append(f"{number}-{index}.png")
            Image.fromarray(pixels).resize((width, height)).save(folder / names[-1])
        asked = [{"role": "user", "content": text()}]
        answered = [{"role": "assistant", "content": text()}]
        columns: dict[str, Any] = {"messages": asked + answered}
        if objective == "dpo":
            rejected = [{"role": "assistant", "content": text()}]
            columns = {"prompt": asked, "chosen": answered, "rejected": rejected}
        lines.append(json.dumps({"id": str(number), "images": names} | columns))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def write_model(folder: Path, work: Work, device: str) -> Path:
    """Write the model of `sample-vlm` with wider layers and its initial weights."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    from mmray.data.vlm.sample import generate_model

    model = generate_model(folder)
    values = json.loads((model / "config.json").read_text())
    values["text_config"] |= work.text | {"max_position_embeddings": 2 * work.max_tokens}
    values["vision_config"] |= work.vision
    (model / "config.json").write_text(json.dumps(values))
    processor = json.loads((model / "processor_config.json").read_text())
    processor["image_processor"]["size"]["longest_edge"] = work.image_sides[1] ** 2
    (model / "processor_config.json").write_text(json.dumps(processor))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model)
    with torch.device(device):
        net = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    print(f"{sum(weight.numel() for weight in net.parameters()):,} parameters", flush=True)
    net.save_pretrained(model)
    return model


class Timer:
    """Writes the seconds of the timed steps and the first two losses to the file TIMES.

    A callback of mmray, in its training process, whose children read and encode rows.
    """

    def __init__(self) -> None:
        self.work = WORK[os.environ["DEVICE"]]
        self.start = (0.0, 0.0)  # seconds, and CPU seconds of this process and its children
        self.losses: list[float] = []

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        if step <= 2:
            self.losses.append(float(metrics["train/loss"]))
        if step == self.work.warmup_steps:
            synchronize()
            self.start = time.perf_counter(), cpu_s()
        if step == self.work.steps:
            synchronize()
            result = {
                "seconds": time.perf_counter() - self.start[0],
                "cpu_s": cpu_s() - self.start[1],
                "losses": self.losses,
                "peak_gib": peak_gib(),
            }
            Path(os.environ["TIMES"]).write_text(json.dumps(result))


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """The most memory of a GPU allocated in this process; 0 without one."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def cpu_s() -> float:
    """CPU seconds of this process and of its children."""
    own = psutil.Process()
    times = [each.cpu_times() for each in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def train_mmray(model: str, rows: str, backend: str) -> None:
    """Train with packed batches, compiled or not."""
    import mmray
    from mmray.config import recipes

    device = os.environ["DEVICE"]
    work = WORK[device]
    config = recipes.sample_vlm()
    with tempfile.TemporaryDirectory() as folder:
        config = config.replace(
            model=config.model.replace(
                weights=model, inputs=config.model.inputs.replace(max_tokens=work.max_tokens)
            ),
            data=config.data.replace(train=rows, cache=f"{folder}/cache", shuffle=False),
            objective=config.objective.replace(kind=os.environ["OBJECTIVE"]),
            batch=config.batch.replace(
                tokens=work.packed_tokens, micro=None, global_=work.global_rows
            ),
            cluster=config.cluster.replace(
                workers=1, cpus_per_worker=1, accelerator="gpu" if device == "cuda" else "cpu"
            ),
            train=config.train.replace(
                steps=work.steps,
                precision="bf16" if device == "cuda" else "fp32",
                compile=backend,
                log_every=1,
                checkpoint_every=0,
                callbacks=(f"{__package__}.compare_trl:Timer",),
            ),
            optimizer=config.optimizer.replace(lr=LR[os.environ["OBJECTIVE"]], warmup_steps=0),
            run=config.run.replace(storage=folder),
        )
        mmray.train(config)


def train_trl(model: str, rows: str, micro: int) -> None:
    """Train with SFTTrainer on padded micro-batches of some rows."""
    import datasets
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    is_dpo = os.environ["OBJECTIVE"] == "dpo"
    trainer_class: Any = DPOTrainer if is_dpo else SFTTrainer
    config_class: Any = DPOConfig if is_dpo else SFTConfig
    options = {} if is_dpo else {"assistant_only_loss": True}
    device = os.environ["DEVICE"]
    work = WORK[device]
    timer = Timer()

    class OnStep(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:  # logged after the step
                timer.on_step(state.global_step, {"train/loss": logs["loss"]})

    class InOrder(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    folder = Path(rows).parent
    records = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    for record in records:
        record["images"] = [
            {"path": str(folder / name), "bytes": None} for name in record["images"]
        ]
    features = {"images": datasets.List(datasets.Image())}
    data = datasets.Dataset.from_list(records).remove_columns("id")
    data = data.cast_column("images", features["images"])
    with tempfile.TemporaryDirectory() as out:
        trainer = InOrder(
            model=AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoProcessor.from_pretrained(model),
            train_dataset=data,
            args=config_class(
                output_dir=out,
                use_cpu=device == "cpu",
                bf16=device == "cuda",
                gradient_checkpointing=False,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=work.global_rows // micro,
                dataloader_num_workers=work.loaders,
                max_length=None,
                **options,
                max_steps=work.steps,
                learning_rate=LR[os.environ["OBJECTIVE"]],
                lr_scheduler_type="cosine",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            callbacks=[OnStep()],
        )
        trainer.train()


def score(model: Path, rows: Path) -> Path:
    """Prepare the rows of dpo and score them by the model in a new process; return the set."""
    data = rows.with_name("set")
    code = (
        f"import mmray; mmray.prepare({str(rows)!r}, {str(data)!r}); "
        f"mmray.score({str(data)!r}, {str(model)!r})"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"prepare and score, once for the set: {taken_s:.0f} CPU seconds", flush=True)
    return data


def measure(
    arm: str, model: Path, rows: Path, folder: Path, device: str, objective: str
) -> dict[str, Any]:
    """Train in a new process; return the losses of the first two steps and samples/s."""
    times = folder / f"{arm}.json"
    times.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"{__package__}.compare_trl", arm, str(model), str(rows)]
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    done = subprocess.run(
        command,
        env=os.environ | threads | {"TIMES": str(times), "DEVICE": device, "OBJECTIVE": objective},
        capture_output=True,
        text=True,
    )
    assert times.exists(), done.stderr[-3000:]
    result = json.loads(times.read_text())
    work = WORK[device]
    samples = work.global_rows * (work.steps - work.warmup_steps)
    result["samples_per_s"] = samples / result["seconds"]
    result["samples_per_cpu_s"] = samples / result["cpu_s"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=tuple(WORK), default="cpu")
    parser.add_argument("--objective", choices=("language_modelling", "dpo"), default=SFT)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="+", help="only these, such as mmray trl-8")
    args = parser.parse_args()
    work = WORK[args.device]
    backends = ("none", "inductor") if args.device == "cuda" else ("none",)
    arms = args.arms or [
        *(f"mmray-{backend}" for backend in backends),
        *(f"trl-{micro}" for micro in work.trl_micro),
    ]
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        rows = write_rows(folder / "rows", work, args.objective)
        model = write_model(folder / "model", work, args.device)
        sources = {"trl": rows, "mmray": rows if args.objective == SFT else score(model, rows)}
        for number in range(args.rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                start_s = time.perf_counter()
                source = sources[arm.partition("-")[0]]
                results[arm].append(
                    measure(arm, model, source, folder, args.device, args.objective)
                )
                taken_s = time.perf_counter() - start_s
                print(f"{arm}: {results[arm][-1]}, {taken_s:.0f} s", flush=True)
    packages = ("torch", "transformers", "trl")
    print(", ".join(f"{name} {version(name)}" for name in packages))
    print(
        "| | samples/s | samples a CPU second | mmray : it | by CPU time | losses of steps 1, 2 "
        "| GiB |"
    )
    print("|---|---|---|---|---|---|---|")
    rates = {
        arm: [
            median(each[name] for each in runs) for name in ("samples_per_s", "samples_per_cpu_s")
        ]
        for arm, runs in results.items()
    }
    for arm, (rate, cpu_rate) in rates.items():
        own_rate, own_cpu_rate = rates[arms[0]]
        losses = ", ".join(f"{loss:.5f}" for loss in results[arm][0]["losses"])
        print(
            f"| {arm} | {rate:.1f} | {cpu_rate:.1f} | {own_rate / rate:.2f} | "
            f"{own_cpu_rate / cpu_rate:.2f} | {losses} | {results[arm][0]['peak_gib']:.1f} |"
        )


if __name__ == "__main__":
    if "TIMES" in os.environ:  # one arm, started by `measure`
        kind, _, option = sys.argv[1].partition("-")
        if kind == "mmray":
            train_mmray(*sys.argv[2:], option)
        else:
            train_trl(*sys.argv[2:], int(option))
    else:
        main()
