"""`mmray tune`: the best batch shape, or the best of any settings, as a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.table import Table
from rich.text import Text
from tyro.conf import UseAppendAction

from mmray.cli.args import parsed, recipe_for, split_run
from mmray.cli.console import Reporter, Screen, short
from mmray.config import Config, to_yaml
from mmray.errors import INTERRUPTED, TrainingError

# Tells the screen what a sweep does: a live table in a terminal, a line for each trial in a log.
STYLES = {
    "finished": "green",
    "running": "cyan",
    "out_of_memory": "yellow",
    "failed": "red",
    "stopped": "yellow",
    "infeasible": "dim",
    "waiting": "dim",
}
SHAPE = ("batch.micro", "batch.accumulation", "batch.global", "cluster.workers")  # they have columns of their own
VALUE_WIDTH = 16
CAPTION = "batch: micro x accumulation x workers; * the best of its global batch"
NOTHING = "·"

Row = dict[str, Any]


class SweepReporter(Reporter):
    """Implements mmray.tune.sweep_state.SweepListener; a bar while Ray starts and data is prepared, then the table."""

    def __init__(self, screen: Screen, goal: str):
        super().__init__(screen)
        self.goal = goal
        self._stack = ExitStack()
        self._draw: Any = None

    def __enter__(self) -> SweepReporter:
        self._stack.enter_context(self.screen.work("starting Ray"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def trials(self, rows: list[Row]) -> None:
        if self._draw is None:  # the bar makes room: a terminal has one live drawing at a time
            self._stack.close()
            self._draw = self._stack.enter_context(self.screen.live())
        self._draw(trials_table(rows, self.goal))

    def ended(self, row: Row) -> None:
        if not self.screen.console.is_terminal:
            self.log(trial_line(row), row["trial"])
        elif row["status"] in ("failed", "out_of_memory") and row["error"]:
            self.log(row["error"], row["trial"])


def trials_table(rows: list[Row], goal: str, found: Row | None = None) -> Table:
    """All trials, narrow enough for 80 columns; the best of each global batch has a star, the best of all is bold."""
    searched = [key for key in rows[0]["settings"] if key not in SHAPE]
    winners = set(found["per_global"].values()) if found else set()
    best = found["best"] if found else None
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption=CAPTION, caption_justify="left")
    table.add_column("trial", no_wrap=True)
    for key in searched:
        table.add_column(key.rpartition(".")[2], no_wrap=True, max_width=VALUE_WIDTH)
    for name in ("batch", "global", "samples/s", "p50/p95 ms", "GiB", "loss", *(("R@1",) if goal == "recall" else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for row in rows:
        table.add_row(
            row["trial"] + ("*" if row["trial"] in winners else ""),
            *(str(row["settings"].get(key)) for key in searched),
            *figures(row, goal),
            Text(row.get("doing") or row["status"].replace("_", " "), style=STYLES[row["status"]]),
            style="bold" if row["trial"] == best else None,
        )
    return table


def figures(row: Row, goal: str) -> list[str]:
    """Batch, samples/s, step times, memory, loss of a trial as they are shown; a dot for what is not known."""
    shape = "x".join(str(row[key]) for key in ("micro", "accumulation", "workers"))
    times = [row[key] for key in ("step_p50_s", "step_p95_s")]
    return [
        *((shape, str(row["global"])) if row["global"] else (NOTHING, NOTHING)),
        rate(row),
        NOTHING if None in times else "/".join(f"{1000 * time_s:,.0f}" for time_s in times),
        _figure(row["peak_gib"], ".2f"),
        _figure(row["loss"], ".3f"),
        *((_figure(row["recall_at_1"], ".3f"),) if goal == "recall" else ()),
    ]


def rate(row: Row) -> str:
    """Samples/s, with the slowest and the fastest window."""
    low, high = row["samples_per_s_min"], row["samples_per_s_max"]
    spread = "" if low is None else f" ({low:,.0f}-{high:,.0f})"
    return _figure(row["samples_per_s"], ",.0f") + spread


def _figure(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def reasons(rows: list[Row]) -> list[tuple[str, str]]:
    """(trial, why) of those that ended badly or could not be run."""
    return [(row["trial"], f"{row['status'].replace('_', ' ')}: {short(row['error'])}") for row in rows if row["error"]]


def trial_line(row: Row) -> str:
    """One trial in a log."""
    settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
    took = f" in {row['elapsed_s']:.0f} s" if row["elapsed_s"] is not None else ""
    parts = [f"{settings}: {row['status'].replace('_', ' ')}{took}"]
    if row["samples_per_s"] is not None:
        parts.append(f"{rate(row)} samples/s")
    parts += [f"loss {row['loss']:.3f}"] if row["loss"] is not None else []
    parts += [f"{row['peak_gib']:.2f} GiB"] if row["peak_gib"] is not None else []
    parts += [short(row["error"])] if row["error"] else []
    return "  ".join(parts)


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
    searched = search_space.parse_space(command.space, command.samples, base.train.seed)
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
