"""Gain of distillation: held-out recall@1 of a small student with and without a teacher, by seed.

Run `python -m tests.benchmarks.distillation FOLDER [SOURCE]`. The teacher is recipe `sample`: 64
pixels, and all rows of the set. The students have a tenth of its weights, images of 32 pixels, and
the first 768 rows. About twenty minutes of CPU time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmray

SEEDS = range(10)
KINDS = {
    "contrastive": "contrastive",
    "affinity": "contrastive + distillation",
    "affinity4": "contrastive + 4 * distillation",
}
STUDENT_STEPS = 400
STUDENT_ROWS = 768
RECALL = ("recall_at_1/image_to_text", "recall_at_1/text_to_image")
STUDENT: dict[str, Any] = {
    "inputs": {"image_side": 32},
    "image": {"name": "convnet", "width": 8, "depth": 3},
    "text": {"width": 32, "depth": 1, "heads": 4},
    "embed_dim": 128,
}


def main(folder: Path, source: str) -> None:
    """Train a teacher, store its embeddings, train the students, and print the table."""
    common: dict[str, Any] = {
        "data": {"train": source, "cache": str(folder / "prepared")},
        "evaluate": {"every": 0},
    }
    storage = str(folder / "runs")
    teacher = mmray.train(
        "sample",
        **common,
        run={"storage": storage, "name": "teacher"},
    )
    prepared = json.loads((teacher.path / "data.json").read_text())["train"]
    mmray.score(prepared, teacher, embeddings=True)
    common["data"] = common["data"] | {"train": prepared, "limit": STUDENT_ROWS}
    results: dict[str, list[list[float]]] = {kind: [] for kind in KINDS.values()}
    for seed in SEEDS:
        for name, kind in KINDS.items():
            run = mmray.train(
                "sample",
                **common,
                model=STUDENT,
                objective={"kind": kind},
                run={"storage": storage, "name": f"{name}-{seed}"},
                train={"steps": STUDENT_STEPS, "seed": seed},
            )
            results[kind].append([100 * run.metrics[metric] for metric in RECALL])
    print(f"teacher: {', '.join(f'{100 * teacher.metrics[name]:.1f}' for name in RECALL)} %")
    print("| objective | " + " | ".join(RECALL) + " |\n|---|---|---|")
    for kind, rows in results.items():
        pairs = zip(zip(*rows, strict=True), zip(*results["contrastive"], strict=True), strict=True)
        cells = [format_cell(with_teacher, without) for with_teacher, without in pairs]
        print(f"| `{kind}` | {' | '.join(cells)} |")


def format_cell(values: Sequence[float], without: Sequence[float]) -> str:
    """Format the mean over the seeds, and the mean of the gain with its standard error."""
    mean = f"{statistics.mean(values):.1f} %"
    gains = [value - base for value, base in zip(values, without, strict=True)]
    if not any(gains):
        return mean
    error = statistics.stdev(gains) / len(gains) ** 0.5
    higher = sum(gain > 0 for gain in gains)
    return f"{mean} ({statistics.mean(gains):+.1f} +- {error:.1f}, higher in {higher} seeds)"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "sample")
