"""`mmray evaluate`: metrics of a run's checkpoint on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tyro.conf import Positional

from mmray.cli.args import parse_args, require_positive, write_json
from mmray.cli.console import Reporter, Terminal, scores_tables
from mmray.config import EvalSettings


@dataclass(frozen=True)
class EvaluateCommand:
    """Evaluate a run's newest checkpoint: recall@1/5/10 and median rank, or perplexity."""

    run: Positional[str]
    """Folder (or address, s3://...) of the run."""
    data: str | None = None
    """Prepared set or raw source; None: the run's held-out rows."""
    split: str | None = None
    """Split of the set, if it has splits; None: the run's data.eval_split, or `test` for another set."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best`; None: the newest valid one."""
    json: str | None = None
    """Write the metrics to this JSON file."""
    address: str | None = None
    """Ray address; None: RAY_ADDRESS if set, otherwise this machine."""
    workers: int | None = None
    """Number of workers; None: as many as in training."""
    accelerator: Literal["auto", "gpu", "cpu"] | None = None
    """Device of the workers; None: as in training; auto: GPUs if the cluster has any."""
    evaluate: EvalSettings = field(default_factory=EvalSettings)
    """Metrics to compute; the default of each setting is the run's value."""


def parse_evaluate(argv: Sequence[str]) -> EvaluateCommand:
    """Parse the command line, with the run's own settings as defaults. Raises UsageError."""
    run = parse_args(EvaluateCommand, argv, "mmray evaluate").run
    from mmray.storage.paths import to_path
    from mmray.train.evaluate_export import load_run_config

    own = load_run_config(to_path(run)).evaluate.without_interval
    command = parse_args(EvaluateCommand, argv, "mmray evaluate", EvaluateCommand(run, evaluate=own))
    require_positive(command, "workers")
    return command


def evaluate(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray evaluate RUN [--data SET] [--split NAME] [--evaluate.classes A B ...] [--json FILE]"""
    command = parse_evaluate(argv)
    from mmray.storage.paths import to_path
    from mmray.train.evaluate_export import evaluate_run

    with terminal.progress("evaluating"):
        metrics = evaluate_run(
            to_path(command.run),
            command.data,
            command.split,
            command.step,
            command.address,
            Reporter(terminal),
            command.evaluate,
            workers=command.workers,
            accelerator=command.accelerator,
        )
    terminal.console.print(*scores_tables(metrics))
    write_json(command.json, {"metrics": metrics})
    return 0
