"""`mmray train`: train a recipe, with its settings changed by flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmray import api
from mmray.cli.args import parse_config
from mmray.config import to_yaml
from mmray.console.reporter import ConsoleReporter, shell_path
from mmray.console.tables import scores_tables
from mmray.errors import INTERRUPTED
from mmray.version import VERSION


def train(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Train a recipe with some settings changed, or resume its run, and print the scores.

    With --print-config it prints the settings as YAML instead.
    """
    config, print_config = parse_config(argv, "train")
    if print_config:
        console.print_raw(to_yaml(config).rstrip())
        return 0
    console.log(f"mmray {VERSION}, recipe {config.recipe}")
    run = api.train(config, reporter=console, start_s=console.start_s)
    result = run.result
    if result["status"] == "finished" and result["scores"]:
        console.print(*scores_tables(result["scores"]))
    _print_next_commands(run, result, console)
    return INTERRUPTED if result["status"] == "stopped" else 0


def _print_next_commands(run: api.Run, result: dict[str, Any], console: ConsoleReporter) -> None:
    """Print how to export the best checkpoint, unless it is the last one, and how to continue."""
    name = shell_path(run.path)
    exported = f"mmray export {name} {shell_path(f'exported/{run.path.name}')}"
    best = result["best"]
    if best is not None and best["step"] != result["steps"]:
        score = f"step {best['step']:,} with {best['metric']} {best['score']:.3f}"
        console.log(f"{score}: {exported} --step best", "best")
    if result["status"] == "finished":
        if result["scores"]:
            console.log(f"mmray evaluate {name}", "next")
        console.log(exported, "next")
