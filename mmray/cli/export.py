"""`mmray export`: write the model of a run, or of pretrained weights, to a folder for mmray.load or
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmray import api
from mmray.cli.args import command, flag_values
from mmray.config import Config
from mmray.config.model import AnyModel
from mmray.console.reporter import ConsoleReporter, relative_paths
from mmray.errors import UsageError
from mmray.storage.paths import AnyPath


def export(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Write the model of a run, or pretrained weights, to a folder for mmray.load or transformers.

    Args:
        argv: arguments after the command, such as `["runs/clip", "exported/clip"]`.
        console: receives messages and progress.
    """
    if weights := flag_values("--weights", argv):
        from mmray.training.evaluate_export import pretrained_config

        config = pretrained_config(weights[-1])
        arguments = export_weights.parse(argv, out="", model=config.model)
        if not arguments["out"]:
            raise UsageError("mmray export --weights FILE OUT: the folder OUT is missing")
        return export_weights.run(console, config, **arguments) or 0
    return export_run(argv, console)


@command(api.export)
def export_run(console: ConsoleReporter, **arguments: Any) -> None:
    """Export a run, and print how to load it."""
    _print_exported(api.export(**arguments, reporter=console), console)


@command(api.export, "export")
def export_weights(
    console: ConsoleReporter,
    run: Config,
    *,
    weights: str,
    out: api.OutPath,
    model: AnyModel,
    **arguments: Any,
) -> None:
    """Export pretrained weights with changed settings, and print how to load them."""
    changed = run.replace(model=model)
    _print_exported(api.export(changed, out, **arguments, reporter=console), console)


def _print_exported(out: AnyPath, console: ConsoleReporter) -> None:
    """Print the folder, and how to load the model from Python."""
    from mmray.models.export.vlm import read_spec

    folder = relative_paths(str(out))
    console.log(folder, "exported")
    call = 'model.embed_texts(["a red circle"])'
    if read_spec(out) is not None:
        call = 'model.answer([{"role": "user", "content": "..."}])'
    console.log(f'import mmray; model = mmray.load("{folder}"); {call}', "next")
