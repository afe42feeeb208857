"""`mmray train`: a recipe and flags to a trained run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from mmray.cli.args import parse_run
from mmray.cli.console import Reporter, Screen, scores_tables, short
from mmray.config import to_yaml
from mmray.errors import INTERRUPTED


def train(argv: Sequence[str], screen: Screen) -> int:
    """mmray train [RECIPE] [--section.field value ...] [--print-config]"""
    config, print_config = parse_run(argv, "train")
    if print_config:
        print(to_yaml(config), end="")
        return 0
    from mmray.train import driver  # late: `--help` and `--print-config` must not import Ray and torch

    screen.note(f"mmray {version('mmray')}, recipe {config.recipe}")
    with screen.work("starting Ray"):
        outcome = driver.train(config, Reporter(screen))
    return _say_outcome(outcome, screen)


def _say_outcome(outcome: Any, screen: Screen) -> int:
    result = outcome.result
    if outcome.already_done:
        screen.note(f"{outcome.path} has finished its {result['steps']:,} steps; more with --train.steps", "done")
        return 0
    took = f"{result['steps']:,} steps in {result['elapsed_s']:.0f} s"
    restarts = (
        f", {result['restarts']} restarts, {result['wasted_steps']} steps done twice" if result["restarts"] else ""
    )
    if result["status"] == "stopped":
        screen.note(f"{took}; the same command goes on from step {result['steps']:,}", "stopped")
        _say_best(outcome, screen)
        return INTERRUPTED
    screen.note(f"{took}{restarts}", "finished")
    if result["scores"]:
        screen.console.print(*scores_tables(result["scores"]))
    _say_best(outcome, screen)
    name = short(str(outcome.path))
    screen.note(f"mmray evaluate {name}    mmray export {name} exported/{outcome.path.name}", "next")
    return 0


def _say_best(outcome: Any, screen: Screen) -> None:
    """Which checkpoint scored best and how it is taken, where that is not the last."""
    best = outcome.result["best"]
    if best is None or best["step"] == outcome.result["steps"]:
        return
    name = short(str(outcome.path))
    told = f"step {best['step']:,} with {best['metric']} {best['score']:.3f}, kept beside the newest"
    screen.note(f"{told}: mmray export {name} exported/{outcome.path.name} --step best", "best")
