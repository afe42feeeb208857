"""`mmray tune`: search batch shapes or other settings; the best trial becomes a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tyro.conf import UseAppendAction

from mmray.cli.args import flag_values, load_recipe, parse_args, split_args
from mmray.cli.console import Reporter, Terminal, relative_paths
from mmray.config import Config, to_yaml
from mmray.errors import INTERRUPTED, TrainingError

STATUS_STYLES = {
    "finished": "green",
    "running": "cyan",
    "out_of_memory": "yellow",
    "failed": "red",
    "stopped": "yellow",
    "infeasible": "dim",
    "waiting": "dim",
}
SHAPE_KEYS = ("batch.micro", "batch.accumulation", "batch.global", "cluster.workers")  # shown in the batch columns
VALUE_WIDTH = 16
CAPTION = (
    "batch: micro x accumulation x workers; * best trial of its global batch; samples/s: mean (range over time); "
    "p50/p95: step time; GiB: peak of a worker"
)
MISSING = "·"

Row = dict[str, Any]


class SweepReporter(Reporter):
    """Shows a sweep as a live table (terminal) or one line per trial (log); implements SweepListener."""

    def __init__(self, terminal: Terminal, goal: str):
        super().__init__(terminal)
        self.goal = goal
        self._stack = ExitStack()
        self._live: Live | None = None

    def __enter__(self) -> SweepReporter:
        self._stack.enter_context(self.terminal.progress("starting Ray"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def trials(self, rows: list[Row]) -> None:
        if not self.terminal.console.is_terminal:
            return
        if self._live is None:  # close the bar: rich allows one live display
            self._stack.close()
            live_display = Live(console=self.terminal.console, transient=True, auto_refresh=False)
            self._live = self._stack.enter_context(live_display)
        self._live.update(trials_table(rows, self.goal), refresh=True)

    def ended(self, row: Row) -> None:
        if not self.terminal.console.is_terminal:
            self.log(trial_line(row), row["trial"])
        elif row["status"] in ("failed", "out_of_memory") and row["error"]:
            self.log(row["error"], row["trial"])


def trials_table(rows: list[Row], goal: str, ranking: Row | None = None) -> Table:
    """Return the table of trials, 80 columns wide; a star marks the best per global batch, bold the best overall."""
    searched = [key for key in rows[0]["settings"] if key not in SHAPE_KEYS]
    winners, best = (set(ranking["per_global"].values()), ranking["best"]) if ranking else (set(), None)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption=CAPTION, caption_justify="left")
    table.add_column("trial", no_wrap=True)
    for key in searched:
        table.add_column(key.rpartition(".")[2], no_wrap=True, max_width=VALUE_WIDTH)
    for name in ("batch", "global", "samples/s", "p50/p95 ms", "GiB", "loss", *(("R@1",) if goal == "recall" else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for row in rows:
        shape = "x".join(str(row[key]) for key in ("micro", "accumulation", "workers"))
        p50_s, p95_s = row["step_p50_s"], row["step_p95_s"]
        table.add_row(
            row["trial"] + ("*" if row["trial"] in winners else ""),
            *(str(row["settings"].get(key)) for key in searched),
            *((shape, str(row["global"])) if row["global"] else (MISSING, MISSING)),
            _format_rate(row),
            MISSING if p50_s is None or p95_s is None else f"{1000 * p50_s:,.0f}/{1000 * p95_s:,.0f}",
            _format(row["peak_gib"], ".2f"),
            _format(row["loss"], ".3f"),
            *((_format(row["recall_at_1"], ".3f"),) if goal == "recall" else ()),
            Text(row.get("activity") or row["status"].replace("_", " "), style=STATUS_STYLES[row["status"]]),
            style="bold" if row["trial"] == best else None,
        )
    return table


def _format_rate(row: Row) -> str:
    """Format samples/s with the range over logging windows."""
    low, high = row["samples_per_s_min"], row["samples_per_s_max"]
    return _format(row["samples_per_s"], ",.0f") + ("" if low is None else f" ({low:,.0f}-{high:,.0f})")


def _format(value: float | None, style: str) -> str:
    return MISSING if value is None else format(value, style)


def trial_line(row: Row) -> str:
    """Format a trial for a log."""
    settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
    took = f" in {row['elapsed_s']:.0f} s" if row["elapsed_s"] is not None else ""
    parts = [
        f"{settings}: {row['status'].replace('_', ' ')}{took}",
        f"{_format_rate(row)} samples/s" if row["samples_per_s"] is not None else "",
        f"loss {row['loss']:.3f}" if row["loss"] is not None else "",
        f"{row['peak_gib']:.2f} GiB" if row["peak_gib"] is not None else "",
        relative_paths(row["error"] or ""),
    ]
    return "  ".join(part for part in parts if part)


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

    recipe = load_recipe(name, rest)
    searched = [text.partition("=")[0].replace("-", "_") for text in flag_values("--space", rest)]
    default, description = TuneCommand(trials.reset_searched(recipe, searched)), DESCRIPTION.strip().format(name=name)
    command = parse_args(TuneCommand, rest, f"mmray tune {name}", default, description)
    base = trials.restore_length(command.settings, recipe)
    if print_config:
        print(to_yaml(base), end="")
        return 0
    space = search_space.parse_space(command.space, command.samples, base.train.seed)
    trials.build_trials(base, space)  # report invalid values before Ray and torch are imported
    from mmray.tune.search import Sweep, search

    terminal.note(f"mmray {version('mmray')}, sweep of recipe {base.recipe}")
    with SweepReporter(terminal, command.goal) as reporter:
        sweep = Sweep(base, command.settings, space, command.goal, command.concurrency)
        outcome = search(sweep, reporter)
    return _print_outcome(outcome, terminal)


def _print_outcome(outcome: Any, terminal: Terminal) -> int:
    summary, recommendation, rows = outcome.summary, outcome.summary["recommendation"], outcome.rows
    stopped = summary["status"] == "stopped"
    measured = sum(row["status"] == "finished" for row in rows)
    errors = {row["trial"]: f"{row['status'].replace('_', ' ')}: {row['error']}" for row in rows if row["error"]}
    terminal.table(trials_table(rows, summary["goal"], recommendation))
    if recommendation is None and not stopped:
        reasons = [f"  {trial} {relative_paths(error)}" for trial, error in errors.items()]
        raise TrainingError(
            f"no trial could be ranked; each run is in {relative_paths(str(outcome.path))}/trials:\n"
            + ("\n".join(reasons) or f"  no trial reported a finite {summary['goal']}")
        )
    for trial, error in errors.items():
        terminal.note(relative_paths(error), trial)
    took = f"{measured} of {len(rows)} trials measured in {summary['elapsed_s']:.0f} s"
    terminal.note(took + "; run the same command to resume" * stopped, summary["status"])
    if recommendation is not None:
        terminal.note(recommendation["why"], "best")
        terminal.note(f"mmray train {relative_paths(str(outcome.path / 'best.yaml'))}", "next")
    return 0 if summary["status"] == "finished" else INTERRUPTED
