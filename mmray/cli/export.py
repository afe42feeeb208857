"""`mmray export`: a run's model as a folder that loads in three lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from mmray.cli.args import parsed
from mmray.cli.console import Screen


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's model as a folder that `mmray.load` opens: weights, config, tokenizer, preprocessing."""

    run: Positional[str]
    """Folder (or address, s3://...) of the run."""
    out: Positional[str]
    """Folder (or address, s3://...) to write."""
    step: int | Literal["best"] | None = None
    """Checkpoint of this step, or the `best` of those kept; none: the newest good one."""


def export(argv: Sequence[str], screen: Screen) -> int:
    """mmray export RUN OUT [--step N|best]"""
    command = parsed(ExportCommand, argv, "mmray export")
    from mmray.models.export.export import PROCESSOR
    from mmray.storage.paths import to_path
    from mmray.train.evaluate_export import export_run

    out = export_run(to_path(command.run), command.out, command.step)
    screen.note(str(out), "exported")
    call = 'model.answer(["photo.jpg"])' if (out / PROCESSOR).exists() else 'model.embed_texts(["a red circle"])'
    screen.note(f'import mmray; model = mmray.load("{out}"); {call}', "next")
    return 0
