"""`mmray score`: a column of scores of the rows of a prepared set by a model."""

from __future__ import annotations

from typing import Any

from mmray import api
from mmray.cli.args import command
from mmray.config import Objective
from mmray.console.reporter import ConsoleReporter, shell_path


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
