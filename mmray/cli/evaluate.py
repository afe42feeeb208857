"""`mmray evaluate`: scores of a run's checkpoint on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tyro.conf import Positional

from mmray.cli.args import at_least_one, parsed, write_json
from mmray.cli.console import Reporter, Screen, scores_tables
from mmray.config import Scoring


@dataclass(frozen=True)
class EvaluateCommand:
    """Recall@1/5/10 and median rank, or perplexity, of a run's newest checkpoint."""

    run: Positional[str]
    """Folder (or address, s3://...) of the run."""
    data: str | None = None
    """Prepared set or source; none: what the run held out."""
    split: str | None = None
    """Split of the set, where it has splits; none: the run's own data.eval_split, of another set `test`."""
    step: int | Literal["best"] | None = None
    """Checkpoint of this step, or the `best` of those kept; none: the newest good one."""
    json: str | None = None
    """Write the metrics to this file."""
    address: str | None = None
    """Ray address; none: RAY_ADDRESS where it is set, else this machine."""
    workers: int | None = None
    """Workers that score; none: as many as trained."""
    accelerator: Literal["auto", "gpu", "cpu"] | None = None
    """Where they score; none: as the run was told. auto: on GPUs where the cluster has them."""
    evaluate: Scoring = field(default_factory=Scoring)
    """What is scored; each setting not given is the run's."""


PROG = "mmray evaluate"


def command_of(argv: Sequence[str]) -> EvaluateCommand:
    """What was typed, over the settings of the run that it names. Raises UsageError."""
    run = parsed(EvaluateCommand, argv, PROG).run
    from mmray.storage.paths import to_path
    from mmray.train.evaluate_export import load_run_config

    own = load_run_config(to_path(run)).evaluate.scoring
    command = parsed(EvaluateCommand, argv, PROG, EvaluateCommand(run, evaluate=own))
    if command.workers is not None:
        at_least_one(command, "workers")
    return command


def evaluate(argv: Sequence[str], screen: Screen) -> int:
    """mmray evaluate RUN [--data SET] [--split NAME] [--evaluate.classes A B ...] [--json FILE]"""
    command = command_of(argv)
    from mmray.storage.paths import to_path
    from mmray.train.evaluate_export import evaluate_run

    with screen.work("evaluating"):
        metrics = evaluate_run(
            to_path(command.run),
            command.data,
            command.split,
            command.step,
            command.address,
            Reporter(screen),
            command.evaluate,
            workers=command.workers,
            accelerator=command.accelerator,
        )
    screen.console.print(*scores_tables(metrics))
    write_json(command.json, {"metrics": metrics})
    return 0
