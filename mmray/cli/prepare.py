"""`mmray prepare`: convert raw rows to a prepared set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tyro.conf import OmitArgPrefixes

from mmray import api
from mmray.cli.args import command
from mmray.config import Prepare
from mmray.console.reporter import ConsoleReporter, shell_path

if TYPE_CHECKING:
    from mmray.data.store.manifest import Manifest


DEFAULTS = Prepare()


@command(api.prepare)
def prepare(
    console: ConsoleReporter,
    *,
    settings: OmitArgPrefixes[Prepare] = DEFAULTS,
    **arguments: Any,
) -> None:
    manifest = api.prepare(**arguments, reporter=console, **dict(settings))
    console.log(_train_command(arguments["out"], manifest), "next")


def _train_command(folder: str, manifest: Manifest) -> str:
    """Return the command that trains a recipe for the kind of rows of a set."""
    # Here, because every command imports this module.
    import numpy as np

    from mmray.data.store.prepared_set import PreparedSet
    from mmray.storage.paths import to_path

    command = f"--data.train {shell_path(folder)}"
    (row,) = PreparedSet(to_path(folder), manifest).read_without_references(np.zeros(1, np.int64))
    if row.messages:
        return f"mmray train vlm {command}"
    kinds = " ".join(kinds for counts in manifest.media_kinds.values() for kinds in counts)
    if not kinds:
        return f"mmray train {command}"
    is_sound = "image" not in kinds and "video" not in kinds
    flags = " --model.inputs.frames 0 --objective.kind audio_text" if is_sound else ""
    return f"mmray train sample-av {command}{flags}"
