"""`mmray tune`: search batch shapes or other settings; the best trial becomes a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table
from rich.text import Text
from tyro.conf import UseAppendAction

from mmray.cli.args import flag_values, load_recipe, parse_args, require_positive, split_args
from mmray.cli.console import COMPACT, Reporter, Terminal, relative_paths, rows_table, shell_path
from mmray.cli.tune_shape import run_probe, split_global_list
from mmray.config import Config, to_yaml
from mmray.errors import INTERRUPTED, TrainingError, UsageError
from mmray.report.run import format_compact
from mmray.report.sweep import SweepRecord
from mmray.sweep_files import BATCH_SETTINGS, GOALS, TrialRow

if TYPE_CHECKING:
    from mmray.config.search_space import Space
    from mmray.tuning.sweep import SweepProgress

# Rows of the live table, and lines of the terminal for everything else.
MIN_LIVE_ROWS = 5
LIVE_MARGIN = 12


class ConsoleSweepReporter(Reporter):
    """Prints a line per rung and ended trial, and a live table; implements
    mmray.tuning.sweep.SweepReporter.
    """

    def __init__(self, terminal: Terminal, goal: str) -> None:
        super().__init__(terminal)
        self.goal = goal

    def progress(self, row: TrialRow, num_rungs: int) -> None:
        if not self.terminal.is_live or row.status in ("failed", "out_of_memory", "infeasible"):
            self.log(trial_line(row, num_rungs), row.trial)

    def table(self, rows: Sequence[TrialRow], num_rungs: int, progress: SweepProgress) -> None:
        if self.terminal.is_live:
            limit = max(MIN_LIVE_ROWS, self.terminal.console.height - LIVE_MARGIN)
            table = live_table(rows, num_rungs, self.goal, limit)
            self.terminal.show(table, Text(format_progress(progress)))


def live_table(rows: Sequence[TrialRow], num_rungs: int, goal: str, limit: int) -> Table:
    """Return the table of a running sweep: running trials, then the best ones, at most `limit`
    rows.
    """
    sign = -1 if GOALS[goal].maximize else 1

    def order(row: TrialRow) -> tuple[bool, int, float]:
        value = row.rungs[-1].value if row.rungs else 0.0
        return row.status != "running", -len(row.rungs), sign * value

    ordered = sorted(rows, key=order)
    shown = [
        _settings_cells(row.settings)
        | {
            "trial": row.trial,
            "rung": f"{len(row.rungs)}/{num_rungs}",
            "value": row.rungs[-1].value if row.rungs else None,
            "status": row.status.replace("_", " "),
            "elapsed_s": row.elapsed_s,
        }
        for row in ordered[:limit]
    ]
    columns = {
        "trial": ("trial", ""),
        **_settings_columns(rows),
        "rung": ("rung", ""),
        "value": (GOALS[goal].title, ".4g"),
        "status": ("status", ""),
        "elapsed_s": ("s", ",.0f"),
    }
    table = rows_table(shown, columns)
    hidden = Counter(row.status.replace("_", " ") for row in ordered[limit:])
    if hidden:
        table.caption = "and " + ", ".join(f"{count} {status}" for status, count in hidden.items())
    return table


def _settings_columns(
    rows: Sequence[TrialRow], without: Sequence[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return a column per searched setting, titled by its name without the section."""
    settings = rows[0].settings if rows else {}
    return {key: (key.rpartition(".")[2], "") for key in settings if key not in without}


def _settings_cells(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(value) for key, value in settings.items()}


def format_progress(progress: SweepProgress) -> str:
    """Format as `05:10 elapsed, about 12:00 left, 35% of the budget spent`."""

    def clock(seconds: float) -> str:
        return str(timedelta(seconds=round(seconds))).removeprefix("0:")

    parts = [f"{clock(progress.elapsed_s)} elapsed"]
    if progress.left_s is not None:
        parts.append(f"about {clock(progress.left_s)} left")
    if progress.budget_spent is not None:
        parts.append(f"{min(1.0, progress.budget_spent):.0%} of the budget spent")
    return ", ".join(parts)


def trials_table(rows: Sequence[TrialRow], goal: str, best: str | None) -> Table:
    """Return the table of trials; a star marks the best one."""
    columns = {
        "trial": ("trial", ""),
        # The batch has columns of its own.
        **_settings_columns(rows, without=BATCH_SETTINGS),
        "batch": ("batch", ""),
        "global_rows": ("global", "d"),
        "samples_per_s": ("samples/s", COMPACT),
        "step_p50_s": ("step s", ".3f"),
        "peak_gib": ("GiB", ".2f"),
        "samples": ("samples", ",d"),
        "value": (GOALS[goal].title, ".3f"),
        "status": ("status", ""),
    }
    shown = [
        _settings_cells(row.settings)
        | {
            "trial": row.trial + ("*" if row.trial == best else ""),
            "batch": row.shape if row.global_rows else None,
            "global_rows": row.global_rows,
            "samples_per_s": row.samples_per_s,
            "step_p50_s": row.step_p50_s,
            "peak_gib": row.peak_gib,
            "samples": row.samples,
            "value": row.value(goal),
            "status": row.status.replace("_", " "),
        }
        for row in rows
    ]
    return rows_table(shown, columns)


def trial_line(row: TrialRow, num_rungs: int) -> str:
    """Format a trial that reached a rung or ended."""
    settings = " ".join(f"{key}={value}" for key, value in row.settings.items())
    parts = [f"{settings}: {row.status.replace('_', ' ')} in {row.elapsed_s:.0f} s"]
    if row.rungs:
        last = row.rungs[-1]
        rung = f"rung {len(row.rungs)} of {num_rungs}"
        parts.append(f"{rung}: {last.value:.4g} after {last.samples:,} samples")
    if row.samples_per_s is not None:
        parts.append(f"{format_compact(row.samples_per_s)} samples/s")
    if row.peak_gib is not None:
        parts.append(f"{row.peak_gib:.2f} GiB")
    if row.error:
        parts.append(relative_paths(row.error))
    return "  ".join(parts)


DESCRIPTION = """
Find the fastest batch shape (micro x accumulation x workers) of the recipe `{name}` from a few
measured steps on synthetic batches, and write it as a recipe file:

    mmray tune {name} --batch.global 512,1024

With --space or another --goal: compare the listed settings in trials, and write the best one.

    mmray tune {name} --space batch.micro=8,16,32 --space batch.accumulation=1,2
    mmray tune {name} --goal loss --budget 2h
    mmray tune {name} --goal recall --space "optimizer.lr=loguniform(1e-5,1e-3)" \\
      --space batch.global=256,512,1024

For loss and recall, trials are compared by the held-out metric at rungs: the better quarter of them
continues with four times the samples. A full trial has --train.samples N, default: the length of
the recipe. For throughput it has --train.steps N of the largest global batch (default 40). If
accumulation is searched, the global batch is micro x accumulation x workers; otherwise accumulation
follows from --batch.global. --print-config prints the base settings of the trials and exits.
"""


@dataclass(frozen=True)
class TuneCommand:
    """Search learning rate, batch or any other settings; the best trial is saved as a recipe."""

    settings: Annotated[Config, tyro.conf.arg(name="")]
    space: UseAppendAction[tuple[str, ...]] = ()
    """SETTING=V1,V2,..., repeatable; or =uniform(LOW,HIGH), =loguniform(LOW,HIGH).

    Default for the goals loss and recall: the learning rate.
    """
    samples: int | None = None
    """Configurations to sample;

    None: 32 if there is a range, otherwise all combinations of the lists.
    """
    goal: Literal["throughput", "loss", "recall"] = "throughput"
    """What to optimize: samples/s, held-out loss, or recall@1."""
    search: Literal["random", "optuna"] = "random"
    """How configurations are suggested: at random, or by Optuna's TPE (extra `optuna`)."""
    scheduler: Literal["halving", "asha"] = "halving"
    """When trials end early: successive halving, or Ray Tune's ASHA."""
    budget: str | None = None
    """Time or GPU-hours after which running trials stop: 2h, 30m, 40gpu-hours.

    A repeated command continues.
    """
    concurrency: int | None = None
    """Trials at a time; None: one on a single machine, as many as fit on a cluster."""


def tune(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray tune [RECIPE] [--goal throughput] [--space SETTING=V1,V2 ...] [--section.field value
    ...]
    """
    name, rest, print_config = split_args(argv)
    rest, listed = split_global_list(rest)
    from mmray.config import search_space  # these import numpy, which parsing errors do not need
    from mmray.tuning import trials

    recipe = load_recipe(name, rest)
    given = (*flag_values("--space", rest), *listed)
    searched = [text.partition("=")[0].replace("-", "_") for text in given]
    default = TuneCommand(trials.clear_length_and_derived_batch(recipe, searched))
    command = parse_args(
        TuneCommand, rest, f"mmray tune {name}", default, DESCRIPTION.strip().format(name=name)
    )
    require_positive(command, "samples", "concurrency")
    base = trials.restore_length(command.settings, recipe)
    if print_config:
        terminal.output(to_yaml(base).rstrip())
        return 0
    given = (*command.space, *listed)
    if trials.is_shape_probe(command.goal, searched):
        check_no_trials(command)
        space = search_space.parse_space(given, seed=base.train.seed) if given else None
        run_probe(base, space, terminal)
        return 0
    if not given:
        given = tuple(f"{key}={text}" for key, text in trials.default_axes(base).items())
    space = search_space.parse_space(given, command.samples, base.train.seed)
    sweep = run_sweep(command, base, space, recipe.batch.global_, terminal)
    return print_outcome(sweep, terminal)


def check_no_trials(command: TuneCommand) -> None:
    """Raise UsageError for options of trials, which the batch-shape probe does not run."""
    unused = [
        name
        for name in ("samples", "search", "scheduler", "budget", "concurrency")
        if getattr(command, name) != getattr(TuneCommand, name)
    ]
    if unused:
        options = ", ".join(f"--{name}" for name in unused)
        raise UsageError(
            f"{options}: no effect on --goal throughput without --space, which runs no trials; "
            "list what to measure, as in --space batch.micro=8,16,32, or use --goal loss"
        )


def run_sweep(
    command: TuneCommand, base: Config, space: Space, recipe_rows: int | None, terminal: Terminal
) -> SweepRecord:
    """Search the space and show the progress. Raises MmrayError.

    Args:
        base: The recipe with its own length; `command.settings` has the length of a trial.
        recipe_rows: See `SweepRequest`.
    """
    from mmray.tuning import trials
    from mmray.tuning.request import Budget, SweepRequest

    # Report invalid values before Ray and torch are imported.
    trials.corner_trials(base, space, command.goal)
    request = SweepRequest(
        base=base,
        length=command.settings.train,
        space=space,
        goal=command.goal,
        recipe_rows=recipe_rows,
        concurrency=command.concurrency,
        searcher=command.search,
        scheduler=command.scheduler,
        budget=Budget.parse(command.budget),
    )
    from mmray.tuning.search import search

    terminal.note(f"mmray {version('mmray')}, sweep of recipe {base.recipe}")
    with terminal.progress("starting Ray"):
        return search(request, ConsoleSweepReporter(terminal, command.goal))


def print_outcome(sweep: SweepRecord, terminal: Terminal) -> int:
    """Print the trials and the recommendation; return the exit code.

    Raises:
        TrainingError: No trial could be ranked, and the sweep was not stopped.
    """
    stopped = sweep.status in ("stopped", "budget")
    errors = {
        row.trial: f"{row.status.replace('_', ' ')}: {relative_paths(row.error)}"
        for row in sweep.trials
        if row.error
    }
    goal = sweep.summary["goal"]
    best = sweep.recommendation
    if sweep.trials:
        terminal.console.print(trials_table(sweep.trials, goal, best.best if best else None))
    if best is None and not stopped:
        reasons = [f"  {trial} {error}" for trial, error in errors.items()]
        raise TrainingError(
            "no trial could be ranked; each run is in "
            f"{relative_paths(str(sweep.folder))}/trials:\n"
            + ("\n".join(reasons) or f"  no trial reported a finite {goal}")
        )
    for trial, error in errors.items():
        terminal.note(error, trial)
    measured = sum(bool(row.rungs) for row in sweep.trials)
    elapsed_s = sweep.summary["elapsed_s"]
    took = f"{measured} of {len(sweep.trials)} trials measured in {elapsed_s:.0f} s"
    if stopped:
        took += "; run the same command to resume"
    terminal.note(took, sweep.status)
    if best is not None:
        terminal.note(best.why, "best")
        terminal.note(f"mmray train {shell_path(sweep.folder / 'best.yaml')}", "next")
    return INTERRUPTED if sweep.status == "stopped" else 0
