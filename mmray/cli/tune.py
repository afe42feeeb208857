"""`mmray tune`: search batch shapes or other settings; the best trial becomes a recipe."""

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

from mmray.cli.args import parse, recipe_for, split_args
from mmray.cli.console import Reporter, Terminal, relative_paths
from mmray.config import Config, to_yaml
from mmray.errors import INTERRUPTED, TrainingError

STYLES = {
    "finished": "green",
    "running": "cyan",
    "out_of_memory": "yellow",
    "failed": "red",
    "stopped": "yellow",
    "infeasible": "dim",
    "waiting": "dim",
}
SHAPE = ("batch.micro", "batch.accumulation", "batch.global", "cluster.workers")  # shown in the batch columns
VALUE_WIDTH = 16
CAPTION = "batch: micro x accumulation x workers; * best trial of its global batch"
MISSING = "·"

Row = dict[str, Any]


class SweepReporter(Reporter):
    """Shows a sweep as a live table (terminal) or one line per trial (log); implements SweepListener."""

    def __init__(self, terminal: Terminal, goal: str):
        super().__init__(terminal)
        self.goal = goal
        self._stack = ExitStack()
        self._draw: Any = None

    def __enter__(self) -> SweepReporter:
        self._stack.enter_context(self.terminal.progress("starting Ray"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def trials(self, rows: list[Row]) -> None:
        if self._draw is None:  # close the bar: rich allows one live display
            self._stack.close()
            self._draw = self._stack.enter_context(self.terminal.live_display())
        self._draw(trials_table(rows, self.goal))

    def ended(self, row: Row) -> None:
        if not self.terminal.console.is_terminal:
            self.log(trial_line(row), row["trial"])
        elif row["status"] in ("failed", "out_of_memory") and row["error"]:
            self.log(row["error"], row["trial"])


def trials_table(rows: list[Row], goal: str, found: Row | None = None) -> Table:
    """Return the table of trials, 80 columns wide; a star marks the best per global batch, bold the best overall."""
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
    """Format batch, samples/s, step times, memory and loss of a trial; a dot is a missing value."""
    shape = "x".join(str(row[key]) for key in ("micro", "accumulation", "workers"))
    times = [row[key] for key in ("step_p50_s", "step_p95_s")]
    return [
        *((shape, str(row["global"])) if row["global"] else (MISSING, MISSING)),
        rate(row),
        MISSING if None in times else "/".join(f"{1000 * time_s:,.0f}" for time_s in times),
        _figure(row["peak_gib"], ".2f"),
        _figure(row["loss"], ".3f"),
        *((_figure(row["recall_at_1"], ".3f"),) if goal == "recall" else ()),
    ]


def rate(row: Row) -> str:
    """Format samples/s with the range over logging windows."""
    low, high = row["samples_per_s_min"], row["samples_per_s_max"]
    spread = "" if low is None else f" ({low:,.0f}-{high:,.0f})"
    return _figure(row["samples_per_s"], ",.0f") + spread


def _figure(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def failures(rows: list[Row]) -> list[tuple[str, str]]:
    """Return (trial, error) of trials that failed or were infeasible."""
    return [
        (row["trial"], f"{row['status'].replace('_', ' ')}: {relative_paths(row['error'])}")
        for row in rows
        if row["error"]
    ]


def trial_line(row: Row) -> str:
    """Format a trial for a log."""
    settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
    took = f" in {row['elapsed_s']:.0f} s" if row["elapsed_s"] is not None else ""
    parts = [f"{settings}: {row['status'].replace('_', ' ')}{took}"]
    if row["samples_per_s"] is not None:
        parts.append(f"{rate(row)} samples/s")
    parts += [f"loss {row['loss']:.3f}"] if row["loss"] is not None else []
    parts += [f"{row['peak_gib']:.2f} GiB"] if row["peak_gib"] is not None else []
    parts += [relative_paths(row["error"])] if row["error"] else []
    return "  ".join(parts)


DESCRIPTION = """
Train short runs of the recipe `{name}` over a grid of settings and write the best one as a recipe file.

    mmray tune {name} --space batch.micro=8,16,32 --space batch.accumulation=1,2

All trials train the same number of samples: --train.samples N, or --train.steps N of the largest global batch
(default 40). If accumulation is searched, the global batch is micro x accumulation x workers; with
--batch.global, accumulation follows from it. --print-config prints the base settings of the trials and exits.
"""


@dataclass(frozen=True)
class TuneCommand:
    """Search batch shapes or other settings; the best trial is saved as a recipe."""

    settings: Annotated[Config, tyro.conf.arg(name="")]
    space: UseAppendAction[tuple[str, ...]] = ()
    """SETTING=V1,V2,... for any setting, repeatable for a grid; or =uniform(LOW,HIGH), =loguniform(LOW,HIGH)."""
    samples: int | None = None
    """Number of draws from the ranges; each is combined with all listed values."""
    goal: Literal["throughput", "loss", "recall", "memory"] = "throughput"
    """What to optimize: samples/s, loss, recall@1 on held-out rows, or peak memory."""
    concurrency: int | None = None
    """Trials at a time; None: one on a single machine, as many as fit on a cluster."""


def tune(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray tune [RECIPE] --space SETTING=V1,V2 [--space ...] [--goal throughput] [--section.field value ...]"""
    name, rest, print_config = split_args(argv)
    from mmray.config import search_space  # these import numpy, which parsing errors do not need
    from mmray.tune import trials

    recipe = recipe_for(name, rest)
    command = parse(
        TuneCommand,
        rest,
        f"mmray tune {name}",
        TuneCommand(trials.reset_searched(recipe, _searched_settings(rest))),
        DESCRIPTION.strip().format(name=name),
    )
    base = trials.restore_length(command.settings, recipe)
    if print_config:
        print(to_yaml(base), end="")
        return 0
    searched = search_space.parse_space(command.space, command.samples, base.train.seed)
    trials.trials_of(base, searched)  # report invalid values before Ray and torch are imported
    from mmray.tune.search import Sweep, search

    terminal.note(f"mmray {version('mmray')}, sweep of recipe {base.recipe}")
    with SweepReporter(terminal, command.goal) as reporter:
        sweep = Sweep(base, command.settings, searched, command.goal, command.concurrency)
        outcome = search(sweep, reporter)
    return _print_outcome(outcome, terminal)


def _searched_settings(words: Sequence[str]) -> list[str]:
    """Return the settings that --space names, before the flags are parsed."""
    spaces = [word.removeprefix("--space=") for word in words if word.startswith("--space=")]
    spaces += [after for word, after in pairwise(words) if word == "--space"]
    return [text.partition("=")[0].replace("-", "_") for text in spaces]


def _print_outcome(outcome: Any, terminal: Terminal) -> int:
    summary, found = outcome.summary, outcome.summary["recommendation"]
    measured = sum(row["status"] == "finished" for row in outcome.rows)
    took = f"{measured} of {len(outcome.rows)} trials measured in {summary['elapsed_s']:.0f} s"
    terminal.table(trials_table(outcome.rows, summary["goal"], found))
    if found is not None:
        for trial, why in failures(outcome.rows):
            terminal.note(why, trial)
    if summary["status"] == "stopped":
        terminal.note(f"{took}; run the same command to resume", "stopped")
    if found is None:
        if summary["status"] == "stopped":
            return INTERRUPTED
        told = "\n".join(f"  {trial} {why}" for trial, why in failures(outcome.rows))
        told = told or f"  no trial reported a finite {summary['goal']}"
        raise TrainingError(
            f"no trial could be ranked; each run is in {relative_paths(str(outcome.path))}/trials:\n{told}"
        )
    if summary["status"] == "finished":
        terminal.note(took, "finished")
    terminal.note(found["why"], "best")
    best = relative_paths(str(outcome.path / "best.yaml"))
    terminal.note(f"mmray train {best}", "next")
    return 0 if summary["status"] == "finished" else INTERRUPTED
