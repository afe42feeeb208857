"""CPU time of the training process a row, with a model that is nearly free: what the data costs
beside the training.

    python -m tests.benchmarks.data_path --side 224 [--ray]

Prints CPU microseconds a row in the training process (all of its threads), the part of them before
the forward (to receive, check and batch the rows of the step), and rows a second. The first third
of the steps is not measured, nor the last step, in which the checkpoint is saved.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmray.config import Batch, Cluster, Config, Data, Evaluate, Inputs, Run, Train
from mmray.config.model import CustomModel
from mmray.training import driver
from tests.made import make_set, noisy, row

ROWS = 512  # of the set, and twice the rows of a step
WIDTH = 8
RESULT = Path(tempfile.gettempdir()) / "mmray-data-path.json"


class NearlyFree(nn.Module):
    """Reads WIDTH pixels and one token of each row."""

    def __init__(self, spec: Any, vocab_size: int) -> None:
        super().__init__()
        self.image = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(vocab_size, WIDTH)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10)))

    def embed_image(self, image: Tensor) -> Tensor:
        return F.normalize(self.image(image[:, 0, 0, :WIDTH].float() / 255), dim=-1)

    def embed_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return F.normalize(self.words(input_ids[:, 0]), dim=-1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        CpuTime.forward_start_s = time.process_time()
        return {
            "image_embed": self.embed_image(batch["image"]),
            "text_embed": self.embed_text(batch["input_ids"], batch["attention_mask"]),
            "logit_scale": self.log_scale.exp(),
        }


class CpuTime:
    """Callback that writes the CPU time of this process before the forward and after each step.

    The last step, the only one that is logged, is left out.
    """

    forward_start_s = 0.0  # set by the model

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []

    def on_step(self, step: int, metrics: Any) -> None:
        if metrics is None:
            self.steps.append((self.forward_start_s, time.process_time(), time.perf_counter()))
        else:
            RESULT.write_text(json.dumps(self.steps))


class Quiet:
    """A reporter that prints notes only."""

    def log(self, text: str, label: str = "") -> None:
        print(f"  {label}: {text}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rows", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--workers", type=int, default=1, help="data processes")
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_set(Path(folder) / "set", [row(number, noisy(number)) for number in range(ROWS)])
        config = Config(
            model=CustomModel(
                kind="tests.benchmarks.data_path:NearlyFree",
                inputs=Inputs(image_side=options.side, fit="squash", max_tokens=32),
            ),
            data=Data(train=str(Path(folder) / "set"), workers=options.workers),
            batch=Batch(micro=options.rows, global_=options.rows),
            train=Train(
                steps=options.steps,
                log_every=options.steps,
                checkpoint_every=0,
                callbacks=("tests.benchmarks.data_path:CpuTime",),
            ),
            evaluate=Evaluate(every=0),
            cluster=Cluster(workers=1, cpus_per_worker=1, wait_for_nodes=options.ray),
            run=Run(name="run", storage=folder),
        )
        driver.train(config, Quiet())
    steps = json.loads(RESULT.read_text())
    steps = steps[len(steps) // 3 :]
    rows = (len(steps) - 1) * options.rows
    cpu_us = (steps[-1][1] - steps[0][1]) / rows * 1e6
    before_forward_s = sum(
        forward_start_s - previous_end_s
        for (_, previous_end_s, _), (forward_start_s, _, _) in pairwise(steps)
    )
    rate = rows / (steps[-1][2] - steps[0][2])
    where = "Ray" if options.ray else "local"
    print(
        f"{where}, {options.side} pixels: {cpu_us:.1f} us of CPU a row, "
        f"{before_forward_s / rows * 1e6:.1f} of them before the forward, {rate:,.0f} rows/s"
    )


if __name__ == "__main__":
    main()
