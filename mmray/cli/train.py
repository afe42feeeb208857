"""`mmray train`: train a recipe, with its settings changed by flags."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from mmray.cli.args import parse_config
from mmray.cli.console import Reporter, Terminal, scores_tables, shell_path
from mmray.config import Config, to_yaml
from mmray.errors import INTERRUPTED

if TYPE_CHECKING:
    from mmray.training.driver import RunOutcome


def train(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray train [RECIPE] [--section.field value ...] [--print-config]"""
    config, print_config = parse_config(argv, "train")
    if print_config:
        terminal.output(to_yaml(config).rstrip())
        return 0
    return INTERRUPTED if run_training(config, terminal).result["status"] == "stopped" else 0


def run_training(config: Config, terminal: Terminal) -> RunOutcome:
    """Train a config; show its progress and its outcome. Raises MmrayError."""
    terminal.note(f"mmray {version('mmray')}, recipe {config.recipe}")
    with terminal.progress("importing"):
        from mmray.training import (
            driver,  # `--help` and `--print-config` must not import Ray and torch
        )

        outcome = driver.train(config, Reporter(terminal), terminal.start_s)
    _print_outcome(outcome, terminal)
    return outcome


def _print_outcome(outcome: RunOutcome, terminal: Terminal) -> None:
    result = outcome.result
    if outcome.already_done:
        terminal.note(
            f"{outcome.path} has finished its {result['steps']:,} steps; raise --train.steps to "
            "continue",
            "done",
        )
        return
    took = f"{result['steps']:,} steps in {result['elapsed_s']:.0f} s"
    count, wasted = result["restarts"], result["wasted_steps"]
    restarts = f", {count} restart{'s' * (count > 1)} ({wasted} steps repeated)" if count else ""
    if result["status"] == "stopped":
        terminal.note(
            f"{took}; run the same command to resume from step {result['steps']:,}", "stopped"
        )
        _print_best(outcome, terminal)
        return
    peak_gib = result.get("all_processes_peak_gib")
    memory = f", at most {peak_gib:.2f} GiB of memory in all processes" if peak_gib else ""
    terminal.note(f"{took}{restarts}{memory}", "finished")
    if result["scores"]:
        terminal.console.print(*scores_tables(result["scores"]))
    _print_best(outcome, terminal)
    name = shell_path(outcome.path)
    terminal.note(
        f"mmray evaluate {name}    mmray export {name} exported/{outcome.path.name}", "next"
    )


def _print_best(outcome: RunOutcome, terminal: Terminal) -> None:
    """Print the best checkpoint and how to export it, unless it is the last one."""
    best = outcome.result["best"]
    if best is None or best["step"] == outcome.result["steps"]:
        return
    name = shell_path(outcome.path)
    best_step = f"step {best['step']:,} with {best['metric']} {best['score']:.3f}"
    terminal.note(
        f"{best_step}: mmray export {name} exported/{outcome.path.name} --step best", "best"
    )
