"""What a lost worker costs, and what the checkpoints that make it so cheap cost: runs on this machine, one rank killed.

Each round is a whole run by the same `train` as `mmray train`. In the middle between two checkpoints one training
worker gets SIGKILL; the clock of the driver says when the next group takes its first step, and when it is past the step
of the kill.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from mmray.bench.timing import describe
from mmray.cluster.connect import ray_session
from mmray.config import Config
from mmray.config.search_space import with_settings
from mmray.data.prepare.pipeline import Progress
from mmray.errors import UsageError
from mmray.train.driver import train

WORKER_TITLE = "ray::RayTrainWorker"


@dataclass
class Watching:
    """Hears what a run tells, and ends one of its workers after step `kill_at`."""

    kill_at: int
    killed_s: float = 0.0
    steps: list[tuple[float, int]] = field(default_factory=list)  # (clock, step), as they were told
    checkpoint_s: float = 0.0  # that the training stood still for
    step_s: float = 0.0  # that steps took

    def log(self, text: str, label: str = "") -> None:
        """Nothing: the figures are in the steps."""

    def status(self, title: str) -> None:
        """Nothing, as `note`."""

    def prepare_progress(self, progress: Progress) -> None:
        """Nothing, as `note`."""

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        self.steps.append((time.monotonic(), metrics["step"]))
        self.checkpoint_s += metrics.get("time/checkpoint_s", 0.0)
        self.step_s += metrics.get("time/step_s", 0.0)
        if metrics["step"] >= self.kill_at and not self.killed_s:
            self.killed_s = time.monotonic()
            _training_workers()[-1].kill()


def bench_recovery(config: Config, steps: int, every: int, rounds: int, phase: Callable[[str], None]) -> dict[str, Any]:
    """{"machine", "ratios", "rows", "notes"}: a row a round with recovery_s, caught_up_s and wasted_steps."""
    if steps < 3 * every:
        raise UsageError(f"--steps {steps} has no room for a kill between two of its checkpoints: at least {3 * every}")
    kill_at = every + (every + 1) // 2
    with tempfile.TemporaryDirectory(prefix="mmray-bench-") as folder, ray_session(config.cluster):
        rows, watched = [], []
        for number in range(rounds):
            phase(f"round {number + 1} of {rounds}: a worker is killed after step {kill_at} of {steps}")
            settings = {
                "run.storage": folder,
                "run.name": f"round-{number + 1}",
                "train.steps": steps,
                "train.samples": None,
                "train.epochs": None,
                "train.log_every": 1,
                "train.checkpoint_every": every,
            }
            watching = Watching(kill_at)
            result = train(with_settings(config, settings), watching).result
            rows.append({"round": number + 1, **recovery(watching), "wasted_steps": result["wasted_steps"]})
            watched.append(watching)
    stood_s = sum(each.checkpoint_s for each in watched)
    share = stood_s / (stood_s + sum(each.step_s for each in watched))
    return {
        "machine": describe(torch.device("cpu")),
        "ratios": {"checkpoint_share": share},
        "rows": rows,
        "notes": [
            f"a worker lost: steps again after {_median(rows, 'recovery_s'):.1f} s, past where it was after "
            f"{_median(rows, 'caught_up_s'):.1f} s (medians), {max(row['wasted_steps'] for row in rows)} steps done "
            f"twice at most; a checkpoint every {every} steps holds the training up for {share:.2%} of its time"
        ],
    }


def recovery(watching: Watching) -> dict[str, float]:
    """Seconds from the kill to the first step of the next group, and to the first step beyond those before the kill."""
    before = max(step for at_s, step in watching.steps if at_s <= watching.killed_s)
    first, reached = None, before
    for at_s, step in watching.steps:
        if at_s <= watching.killed_s:
            continue
        if first is None and step <= reached:  # steps that were on their way count on; the next group begins behind
            first = at_s
        reached = max(reached, step) if first is None else reached
        if first is not None and step > reached:
            return {"recovery_s": first - watching.killed_s, "caught_up_s": at_s - watching.killed_s}
    raise UsageError("no worker was lost between two checkpoints: take more --steps")


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _training_workers() -> list[psutil.Process]:
    """Ray's training workers of the cluster that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [""])[0].startswith(WORKER_TITLE):
                found.append(process)
        except psutil.Error:
            continue  # it has ended
    if not found:
        raise UsageError("no training worker runs on this machine: the bench needs a Ray that it started itself")
    return found
