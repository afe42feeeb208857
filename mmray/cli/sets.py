"""Commands that write or show a prepared set: `mmray prepare`, `score`, `select` and `show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tyro.conf import OmitArgPrefixes

from mmray import api
from mmray.cli.args import command
from mmray.config import Objective, Prepare
from mmray.console.reporter import ConsoleReporter, shell_path
from mmray.console.tables import text_table

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

    from mmray.data.messages import split_rejected
    from mmray.data.store.prepared_set import PreparedSet
    from mmray.storage.paths import to_path

    command = f"--data.train {shell_path(folder)}"
    (row,) = PreparedSet(to_path(folder), manifest).read_without_references(np.zeros(1, np.int64))
    kinds = " ".join(kinds for counts in manifest.media_kinds.values() for kinds in counts)
    if row.messages and split_rejected(row.messages):
        scored = f"mmray score {shell_path(folder)} --weights DIR"
        return f"{scored} && mmray train vlm --model.weights DIR {command} --objective.kind dpo"
    if row.messages:
        return f"mmray train vlm {command}" + " --model.inputs.frames 16" * ("video" in kinds)
    if not kinds:
        return f"mmray train {command}"
    is_sound = "image" not in kinds and "video" not in kinds
    flags = " --model.inputs.frames 0 --objective.kind audio_text" if is_sound else ""
    return f"mmray train sample-av {command}{flags}"


@command(api.score)
def score(console: ConsoleReporter, **arguments: Any) -> None:
    manifest = api.score(**arguments, reporter=console)
    newest = list(manifest.columns)[-1]
    train = "mmray train"
    name = newest.removesuffix("_embedding")
    use = f"--data.where '{name} > 0.25'"
    reference = newest.removesuffix("_rejected")
    if reference != newest:
        train = f"mmray train vlm --model.weights {shell_path(str(arguments['weights']))}"
        use = "--objective.kind dpo" + f" --objective.reference {reference}" * (
            reference != Objective().reference
        )
    console.log(f"{train} --data.train {shell_path(arguments['data'])} {use}", "next")


@command(api.select)
def select(console: ConsoleReporter, **arguments: Any) -> None:
    api.select(**arguments, reporter=console)
    console.log(f"mmray train --data.train {shell_path(arguments['out'])}", "next")


MAX_LINES = 8  # rows in the terminal; the page has all


@command(api.show)
def show(console: ConsoleReporter, **arguments: Any) -> None:
    record = api.show(**arguments, reporter=console)
    console.print(text_table(record.table[:MAX_LINES]))
