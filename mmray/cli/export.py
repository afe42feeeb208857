"""`mmray export`: write the model of a run, or of pretrained weights, to a folder for mmray.load or
transformers.
"""

from __future__ import annotations

from typing import Any

from mmray import api
from mmray.cli.args import command
from mmray.cli.lines import read_weights
from mmray.config import Config
from mmray.config.model import AnyModel
from mmray.console.reporter import ConsoleReporter, relative_paths
from mmray.errors import UsageError
from mmray.storage.paths import AnyPath


@command(api.export, read_weights)
def export(
    console: ConsoleReporter,
    run: api.ModelPath,
    weights: str,
    out: api.OutPath,
    model: AnyModel | None,
    **arguments: Any,
) -> None:
    """Write the model of a run, or pretrained weights, to a folder for mmray.load or
    transformers.
    """
    if not out:
        raise UsageError("mmray export --weights FILE OUT: the folder OUT is missing")
    if isinstance(run, Config):
        run = run.replace(model=model)
    _print_exported(api.export(run, out, **arguments, reporter=console), console)


def _print_exported(out: AnyPath, console: ConsoleReporter) -> None:
    """Print the folder, and how to load the model from Python."""
    from mmray.models.export.vlm import read_spec

    folder = relative_paths(str(out))
    console.log(folder, "exported")
    call = 'model.embed_texts(["a red circle"])'
    if read_spec(out) is not None:
        call = 'model.answer([{"role": "user", "content": "..."}])'
    console.log(f'import mmray; model = mmray.load("{folder}"); {call}', "next")
