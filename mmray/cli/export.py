"""`mmray export`: write a run's model to a folder for mmray.load or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from mmray.cli.args import parse_args
from mmray.cli.console import Terminal


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's model to a folder for `mmray.load`: weights, config, tokenizer, preprocessing."""

    run: Positional[str]
    """Folder (or address, s3://...) of the run."""
    out: Positional[str]
    """Folder (or address, s3://...) to write."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best`; None: the newest valid one."""


def export(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray export RUN OUT [--step N|best]"""
    command = parse_args(ExportCommand, argv, "mmray export")
    from mmray.models.export.export import PROCESSOR
    from mmray.storage.paths import to_path
    from mmray.train.evaluate_export import export_run

    out = export_run(to_path(command.run), command.out, command.step)
    terminal.note(str(out), "exported")
    call = 'model.answer(["photo.jpg"])' if (out / PROCESSOR).exists() else 'model.embed_texts(["a red circle"])'
    terminal.note(f'import mmray; model = mmray.load("{out}"); {call}', "next")
    return 0
