"""`mmray export`: write the model of a run, or of pretrained weights, to a folder for mmray.load or
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmray import api
from mmray.cli.args import OutPath, RunPath, flag_values, parse_args
from mmray.config.model import AnyModel
from mmray.config.model_kinds import TwoTower
from mmray.console.reporter import ConsoleReporter, relative_paths
from mmray.errors import UsageError
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
    interpolate: float = 1.0
    """Factor of the trained weights, 0 to 1; the weights that the run started with have 1 minus
    the factor (WiSE-FT)."""
    adapters: bool = False
    """Write only the LoRA adapters and the fully trained layers, for peft."""


@dataclass(frozen=True, kw_only=True)
class ExportWeightsCommand:
    """Write pretrained weights to a folder for `mmray.load`; the defaults of `--model` come
    from the weights.
    """

    out: OutPath
    """Folder (or address, s3://...) to write."""
    weights: str
    """Folder saved by transformers, a hub name, or an open_clip checkpoint."""
    model: AnyModel = field(default_factory=TwoTower)


def export(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Write the model of a run, or pretrained weights, to a folder for mmray.load or transformers.

    Args:
        argv: arguments after the command, such as `["runs/clip", "exported/clip"]`.
        console: receives messages and progress.

    Returns:
        Exit status 0.

    Raises:
        MmrayError: an argument is invalid or the model cannot be loaded; has the exit status.
    """
    if weights := flag_values("--weights", argv):
        out = _export_weights(weights[-1], argv, console)
    else:
        command = parse_args(ExportCommand, argv, "mmray export")
        out = api.export(
            command.run,
            command.out,
            step=command.step,
            interpolate=command.interpolate,
            adapters_only=command.adapters,
            reporter=console,
        )
    _print_exported(out, console)
    return 0


def _export_weights(weights: str, argv: Sequence[str], console: ConsoleReporter) -> AnyPath:
    from mmray.training.evaluate_export import pretrained_config

    config = pretrained_config(weights)
    default = ExportWeightsCommand(out="", weights=weights, model=config.model)
    command = parse_args(ExportWeightsCommand, argv, "mmray export", default)
    if not command.out:
        raise UsageError("mmray export --weights FILE OUT: the folder OUT is missing")
    changed = config.replace(model=command.model)
    return api.export_weights(changed, command.out, reporter=console)


def _print_exported(out: AnyPath, console: ConsoleReporter) -> None:
    """Print the folder, and how to load the model from Python."""
    from mmray.models.export.vlm import read_spec

    folder = relative_paths(str(out))
    console.log(folder, "exported")
    call = 'model.embed_texts(["a red circle"])'
    if read_spec(out) is not None:
        call = 'model.answer([{"role": "user", "content": "..."}])'
    console.log(f'import mmray; model = mmray.load("{folder}"); {call}', "next")
