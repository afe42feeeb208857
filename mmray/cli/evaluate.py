"""`mmray evaluate`: scores of a run's checkpoint on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from mmray.cli.console import Screen, class_notes, language_note, recall_table
from mmray.cli.parse import parsed, write_json
from mmray.cli.reporter import Reporter


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


def evaluate(argv: Sequence[str], screen: Screen) -> int:
    """mmray evaluate RUN [--data SET] [--split NAME] [--json FILE]"""
    command = parsed(EvaluateCommand, argv, "mmray evaluate")
    from mmray.data.remote import folder_at
    from mmray.train.scoring import score_run

    with screen.work("evaluating"):
        metrics = score_run(
            folder_at(command.run), command.data, command.split, command.step, command.address, Reporter(screen)
        )
    if "perplexity" in metrics:
        screen.note(language_note(metrics), "language")
    else:
        screen.console.print(recall_table(metrics))
    for line in class_notes(metrics):
        screen.note(line, "classes")
    loss = f"loss {metrics['loss']:.4f} over " if "loss" in metrics else ""
    screen.note(f"{loss}{metrics['rows']:,.0f} rows", "held out")
    write_json(command.json, {"metrics": metrics})
    return 0
