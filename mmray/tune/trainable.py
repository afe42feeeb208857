"""One trial, in the actor that Ray Tune gives it: drives a run as `mmray train` does, and reports how it stands.

Nothing here knows Tune: `report` takes a plain dict, {"now": figures for the table} or, at last, {"ended": how}.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mmray.config import Config
from mmray.train.trainer import train
from mmray.tune.results import Ended, ended_by

Report = Callable[[dict[str, Any]], Any]

FIGURES = {
    "samples_per_s": "throughput/samples_per_s",
    "step_p50_s": "time/step_p50_s",
    "step_p95_s": "time/step_p95_s",
    "peak_gib": "memory/peak_gib",
    "loss": "train/loss",
}


def drive(config: Config, report: Report) -> None:
    """Train `config` to its end; a failure is the trial's result, and ends nothing else."""
    began_s = time.monotonic()
    try:
        train(config, _Reporting(report))
        ended = Ended("finished", None, time.monotonic() - began_s)
    except Exception as error:  # noqa: BLE001 - whatever a trial dies of is its row
        ended = ended_by(error, time.monotonic() - began_s)
    report({"ended": asdict(ended)})


class _Reporting:
    """The Listener of the run: passes on what the table shows."""

    def __init__(self, report: Report):
        self.report = report

    def note(self, text: str, label: str = "") -> None:
        """The command has said it once for all trials."""

    def preparing(self, progress: Any) -> None:
        """The data is prepared before the first trial."""

    def phase(self, title: str) -> None:
        self.report({"now": {"doing": title}})

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        figures = {name: metrics[key] for name, key in FIGURES.items() if metrics.get(key) is not None}
        self.report({"now": {"doing": f"step {metrics['step']:,}/{total_steps:,}"} | figures})
