"""`mmray export`: write the model of a run, or of pretrained weights, to a folder for mmray.load or
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mmray.cli.args import OutPath, RunPath, flag_values, parse_args
from mmray.cli.console import Terminal, relative_paths
from mmray.config.model import AnyModel, TwoTower
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.storage.paths import AnyPath


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's model to a folder for `mmray.load`: weights, config, tokenizer, preprocessing.

    `--weights FILE` instead of RUN exports pretrained weights.
    """

    run: RunPath
    """Folder (or address, s3://...) of the run."""
    out: OutPath
    """Folder (or address, s3://...) to write."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best`; None: the newest valid one."""


@dataclass(frozen=True, kw_only=True)
class ExportWeightsCommand:
    """Write pretrained weights to a folder for `mmray.load`; the defaults of `--model` are those of
    the weights.
    """

    out: OutPath
    """Folder (or address, s3://...) to write."""
    weights: str
    """Folder saved by transformers, a hub name, or an open_clip checkpoint."""
    model: AnyModel = field(default_factory=TwoTower)


def export(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray export RUN OUT [--step N|best], or mmray export --weights FILE OUT [--model.SETTING
    VALUE ...]
    """
    if weights := flag_values("--weights", argv):
        _print_exported(_export_weights(weights[-1], argv, terminal), terminal)
    else:
        run_export(parse_args(ExportCommand, argv, "mmray export"), terminal)
    return 0


def run_export(command: ExportCommand, terminal: Terminal) -> AnyPath:
    """Export a run's model and return the folder. Raises MmrayError."""
    from mmray.storage.paths import to_path
    from mmray.training.evaluate_export import export_run

    with terminal.progress("exporting"):
        out = export_run(to_path(command.run), command.out, command.step)
    _print_exported(out, terminal)
    return out


def _print_exported(out: AnyPath, terminal: Terminal) -> None:
    from mmray.models.export.export import PROCESSOR

    folder = relative_paths(str(out))
    terminal.note(folder, "exported")
    call = (
        'model.answer(["photo.jpg"])'
        if (out / PROCESSOR).exists()
        else 'model.embed_texts(["a red circle"])'
    )
    terminal.note(f'import mmray; model = mmray.load("{folder}"); {call}', "next")


def _export_weights(weights: str, argv: Sequence[str], terminal: Terminal) -> AnyPath:
    from mmray.training.evaluate_export import export_pretrained, pretrained_config

    config = pretrained_config(weights)
    own = ExportWeightsCommand(out="", weights=weights, model=config.model)
    command = parse_args(ExportWeightsCommand, argv, "mmray export", own)
    if not command.out:
        raise UsageError("mmray export --weights FILE OUT: the folder OUT is missing")
    with terminal.progress("exporting"):
        return export_pretrained(config.replace(model=command.model), command.out, terminal.note)
