"""Training speed of a vision-language model compared with TRL: the table in mmray/bench/README.md.

Run `PYTHONPATH=FOLDER python -m tests.benchmarks.compare_trl`, where FOLDER has TRL
(`pip install --target FOLDER --no-deps trl==1.16.0 accelerate datasets multiprocess dill xxhash`).
Both train the same Qwen3-VL of 3 million parameters from equal weights on equal rows in equal
order: 0 to 3 images of 32 to 256 pixels, texts of different lengths, 32 rows a step, on the CPUs of
this machine, each with a process that reads and encodes rows. So the losses of their first steps
are equal. TRL pads and processes whole batches in its collator; its micro-batches are those of the
fastest of several sizes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image

GLOBAL_ROWS = 32
NUM_ROWS = 256
STEPS = 8
WARMUP_STEPS = 2
ROUNDS = 2
TRL_MICRO = (8, 32)
MAX_TOKENS = 1024
WORDS = "circle square triangle cross red green blue yellow purple zero one two three shape color"


def write_rows(folder: Path) -> Path:
    """Write images and rows of different lengths; return the JSON lines."""
    draw = random.Random(0)
    lines = []
    for number in range(NUM_ROWS):
        names = []
        for index in range(draw.choices((0, 1, 2, 3), (2, 5, 2, 1))[0]):
            width, height = (draw.randrange(32, 257) for _ in range(2))
            pixels = np.random.default_rng([number, index]).integers(0, 256, (8, 8, 3), np.uint8)
            names.append(f"{number}-{index}.png")
            Image.fromarray(pixels).resize((width, height)).save(folder / names[-1])
        asked, answered = (
            " ".join(
                draw.choices(WORDS.split(), k=min(300, int(draw.lognormvariate(3.4, 0.9)) + 1))
            )
            for _ in range(2)
        )
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        lines.append(json.dumps({"id": str(number), "images": names, "messages": turns}))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def write_model(folder: Path) -> Path:
    """Write the model of `sample-vlm` with wider layers and its initial weights."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    from mmray.data.vlm.sample import generate_model

    model = generate_model(folder)
    values = json.loads((model / "config.json").read_text())
    values["text_config"] |= {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "max_position_embeddings": 2 * MAX_TOKENS,
    }
    values["text_config"]["num_attention_heads"] = 12
    values["text_config"]["num_key_value_heads"] = 6
    values["vision_config"]["out_hidden_size"] = 192
    values["vision_config"]["num_position_embeddings"] = 256
    (model / "config.json").write_text(json.dumps(values))
    processor = json.loads((model / "processor_config.json").read_text())
    processor["image_processor"]["size"]["longest_edge"] = 256 * 256
    (model / "processor_config.json").write_text(json.dumps(processor))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model)
    AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    return model


class Timer:
    """Writes the seconds of the timed steps and the first loss to the file TIMES.

    A callback of mmray, in its training process, whose children read and encode rows.
    """

    def __init__(self) -> None:
        self.start = (0.0, 0.0)  # seconds, and CPU seconds of this process and its children
        self.loss = 0.0

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        if step == 1:
            self.loss = float(metrics["train/loss"])
        if step == WARMUP_STEPS:
            self.start = time.perf_counter(), cpu_s()
        if step == STEPS:
            result = {
                "seconds": time.perf_counter() - self.start[0],
                "cpu_s": cpu_s() - self.start[1],
                "loss": self.loss,
            }
            Path(os.environ["TIMES"]).write_text(json.dumps(result))


def cpu_s() -> float:
    """CPU seconds of this process and of its children."""
    own = psutil.Process()
    times = [each.cpu_times() for each in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def train_mmray(model: str, rows: str) -> None:
    """Train with batches of at most 2,048 packed tokens."""
    import mmray
    from mmray.config import recipes

    config = recipes.sample_vlm()
    with tempfile.TemporaryDirectory() as folder:
        config = config.replace(
            model=config.model.replace(
                weights=model, inputs=config.model.inputs.replace(max_tokens=MAX_TOKENS)
            ),
            data=config.data.replace(train=rows, cache=f"{folder}/cache", shuffle=False),
            batch=config.batch.replace(tokens=2048, micro=None, global_=GLOBAL_ROWS),
            train=config.train.replace(
                steps=STEPS,
                log_every=1,
                checkpoint_every=0,
                callbacks=(f"{__package__}.compare_trl:Timer",),
            ),
            optimizer=config.optimizer.replace(lr=1e-4, warmup_steps=0),
            run=config.run.replace(storage=folder),
        )
        mmray.train(config)


def train_trl(model: str, rows: str, micro: int) -> None:
    """Train with SFTTrainer on padded micro-batches of some rows."""
    import datasets
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    timer = Timer()

    class OnStep(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            # Logged after the step; the timer needs only the first loss.
            if state.global_step in (1, STEPS) and logs and "loss" in logs:
                timer.on_step(state.global_step, {"train/loss": logs["loss"]})
            elif state.global_step == WARMUP_STEPS:
                timer.on_step(WARMUP_STEPS, {})

    class InOrder(SFTTrainer):
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
            args=SFTConfig(
                output_dir=out,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=GLOBAL_ROWS // micro,
                dataloader_num_workers=1,
                max_length=None,
                assistant_only_loss=True,
                max_steps=STEPS,
                learning_rate=1e-4,
                lr_scheduler_type="cosine",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            callbacks=[OnStep()],
        )
        trainer.train()


def measure(arm: str, model: Path, rows: Path, folder: Path) -> dict[str, float]:
    """Train in a new process; return the loss of the first step and samples/s."""
    times = folder / f"{arm}.json"
    times.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"{__package__}.compare_trl", arm, str(model), str(rows)]
    done = subprocess.run(
        command, env=os.environ | {"TIMES": str(times)}, capture_output=True, text=True
    )
    assert times.exists(), done.stderr[-3000:]
    result = json.loads(times.read_text())
    samples = GLOBAL_ROWS * (STEPS - WARMUP_STEPS)
    result["samples_per_s"] = samples / result["seconds"]
    result["samples_per_cpu_s"] = samples / result["cpu_s"]
    return result


def main() -> None:
    arms = ["mmray", *(f"trl-{micro}" for micro in TRL_MICRO)]
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        rows = write_rows(folder / "rows")
        model = write_model(folder / "model")
        for number in range(ROUNDS):
            for arm in arms if number % 2 == 0 else reversed(arms):
                results[arm].append(measure(arm, model, rows, folder))
    packages = ("torch", "transformers", "trl")
    print(", ".join(f"{name} {version(name)}" for name in packages))
    print("| | samples/s | samples a CPU second | mmray : it | by CPU time | loss of step 1 |")
    print("|---|---|---|---|---|---|")
    rates = {
        arm: [
            median(each[name] for each in runs) for name in ("samples_per_s", "samples_per_cpu_s")
        ]
        for arm, runs in results.items()
    }
    for arm, (rate, cpu_rate) in rates.items():
        own_rate, own_cpu_rate = rates["mmray"]
        print(
            f"| {arm} | {rate:.1f} | {cpu_rate:.1f} | {own_rate / rate:.2f} | "
            f"{own_cpu_rate / cpu_rate:.2f} | {results[arm][0]['loss']:.4f} |"
        )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "mmray":
        train_mmray(*sys.argv[2:])
    else:
        train_trl(sys.argv[2], sys.argv[3], int(sys.argv[1].removeprefix("trl-")))
