"""`mmray tune`: the best batch shape, or the best of any settings, as a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import UseAppendAction

from mmray.cli.args import parsed, recipe_for, split_run
from mmray.cli.console import Screen
from mmray.cli.reporter import short
from mmray.cli.sweep_reporter import SweepReporter, reasons, trials_table
from mmray.config import Config, to_yaml
from mmray.errors import INTERRUPTED, TrainingError

DESCRIPTION = """
Short runs of the recipe `{name}` over a grid of settings; the best comes out as a recipe file.

    mmray tune {name} --space batch.micro=8,16,32 --space batch.accumulation=1,2

Each trial is a run of the same number of samples: --train.samples N, or --train.steps N of the largest global batch
(40 without either). Where accumulation is searched, the global batch is micro x accumulation x workers; with
--batch.global given, accumulation follows from it. --print-config prints the settings that the trials vary, and ends.
"""


@dataclass(frozen=True)
class TuneCommand:
    """What is searched, then the settings of a run."""

    settings: Annotated[Config, tyro.conf.arg(name="")]
    space: UseAppendAction[tuple[str, ...]] = ()
    """SETTING=V1,V2,... (any setting, repeated for several: a grid), or =uniform(LOW,HIGH), =loguniform(LOW,HIGH)."""
    samples: int | None = None
    """Draws from ranges; each is crossed with the listed values."""
    goal: Literal["throughput", "loss", "recall", "memory"] = "throughput"
    """What is best: most samples/s, lowest loss, highest recall@1 of the held-out rows, least memory."""
    concurrency: int | None = None
    """Trials at a time; none: one on a lone machine (they would slow each other), as many as fit on a cluster."""


def tune(argv: Sequence[str], screen: Screen) -> int:
    """mmray tune [RECIPE] --space SETTING=V1,V2 [--space ...] [--goal throughput] [--section.field value ...]"""
    name, rest, print_config = split_run(argv)
    from mmray.config import search_space  # late: the config and its errors need neither, and they import numpy
    from mmray.tune import trials as plan

    recipe = recipe_for(name, rest)
    command = parsed(
        TuneCommand,
        rest,
        f"mmray tune {name}",
        TuneCommand(plan.opened(recipe, _searched(rest))),
        DESCRIPTION.strip().format(name=name),
    )
    base = plan.closed(command.settings, recipe)
    if print_config:
        print(to_yaml(base), end="")
        return 0
    searched = search_space.parse(command.space, command.samples, base.train.seed)
    plan.trials_of(base, searched)  # what cannot be meant is said before Ray and torch are imported
    from mmray.tune.search import Sweep, search

    screen.note(f"mmray {version('mmray')}, sweep of recipe {base.recipe}")
    with SweepReporter(screen, command.goal) as reporter:
        sweep = Sweep(base, command.settings, searched, command.goal, command.concurrency)
        outcome = search(sweep, reporter)
    return _say_outcome(outcome, screen)


def _searched(words: Sequence[str]) -> list[str]:
    """Settings named by --space, before the words are parsed."""
    spaces = [word.removeprefix("--space=") for word in words if word.startswith("--space=")]
    spaces += [after for word, after in pairwise(words) if word == "--space"]
    return [text.partition("=")[0].replace("-", "_") for text in spaces]


def _say_outcome(outcome: Any, screen: Screen) -> int:
    summary, found = outcome.summary, outcome.summary["recommendation"]
    measured = sum(row["status"] == "finished" for row in outcome.rows)
    took = f"{measured} of {len(outcome.rows)} trials measured in {summary['elapsed_s']:.0f} s"
    screen.table(trials_table(outcome.rows, summary["goal"], found))
    if found is not None:
        for trial, why in reasons(outcome.rows):
            screen.note(why, trial)
    if summary["status"] == "stopped":
        screen.note(f"{took}; the same command goes on with the rest", "stopped")
    if found is None:
        if summary["status"] == "stopped":
            return INTERRUPTED
        told = "\n".join(f"  {trial} {why}" for trial, why in reasons(outcome.rows))
        told = told or f"  none has a finite figure for --goal {summary['goal']}"
        raise TrainingError(f"no trial could be ranked; each run is in {short(str(outcome.path))}/trials:\n{told}")
    if summary["status"] == "finished":
        screen.note(took, "finished")
    screen.note(found["why"], "best")
    best = short(str(outcome.path / "best.yaml"))
    screen.note(f"mmray train {best}", "next")
    return 0 if summary["status"] == "finished" else INTERRUPTED
