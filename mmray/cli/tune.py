"""`mmray tune`: search batch shapes or other settings; the best trial becomes a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from mmray.report.sweep import GOALS, LEARNING_GOALS, RUNG_GOALS
from mmray.storage.paths import AnyPath
from mmray.sweep_files import BATCH_SETTINGS

if TYPE_CHECKING:
    from mmray.config.search_space import Space
    from mmray.tuning.sweep import TimeLeft

Row = dict[str, Any]
POPULATION = 8  # trials of population based training
# rows of the live table, and lines of the terminal for everything else
MIN_LIVE_ROWS, LIVE_MARGIN = 5, 12
SHORT_TITLES = {"loss": "held-out", "recall": "R@1", "time-to-quality": "s to target"}


class ConsoleSweepReporter(Reporter):
    """Prints a line per rung and ended trial, and a live table; implements
    mmray.tuning.sweep.SweepReporter.
    """

    def __init__(self, terminal: Terminal, goal: str):
        super().__init__(terminal)
        self.goal = goal

    def progress(self, row: Row, rungs: tuple[int, ...]) -> None:
        if not self.terminal.is_live or row["status"] in ("failed", "out_of_memory", "infeasible"):
            self.log(trial_line(row, rungs), row["trial"])

    def table(self, rows: Sequence[Row], rungs: tuple[int, ...], time_left: TimeLeft) -> None:
        if self.terminal.is_live:
            most = max(MIN_LIVE_ROWS, self.terminal.console.height - LIVE_MARGIN)
            self.terminal.show(
                live_table(rows, rungs, self.goal, most), Text(format_time_left(time_left))
            )


def live_table(rows: Sequence[Row], rungs: Sequence[int], goal: str, most: int) -> Table:
    """Return the table of a running sweep: running trials, then the best ones;

    `most` limits its rows.
    """
    compared = RUNG_GOALS[goal]
    sign = -1 if compared.maximize else 1

    def order(row: Row) -> tuple[bool, int, float]:
        return (
            row["status"] != "running",
            -len(row["rungs"]),
            sign * row["rungs"][-1]["value"] if row["rungs"] else 0.0,
        )

    shown = [
        row
        | {key: str(value) for key, value in row["settings"].items()}
        | {"rung": f"{len(row['rungs'])}/{len(rungs)}", "status": row["status"].replace("_", " ")}
        | {"value": row["rungs"][-1]["value"] if row["rungs"] else None}
        for row in sorted(rows, key=order)
    ]
    searched = {key: (key.rpartition(".")[2], "") for key in (rows[0]["settings"] if rows else ())}
    columns = {
        "trial": ("trial", ""),
        **searched,
        "rung": ("rung", ""),
        "value": (compared.title, ".4g"),
    }
    table = rows_table(
        shown[:most], columns | {"status": ("status", ""), "elapsed_s": ("s", ",.0f")}
    )
    if hidden := Counter(row["status"] for row in shown[most:]):
        table.caption = "and " + ", ".join(f"{count} {status}" for status, count in hidden.items())
    return table


def format_time_left(time_left: TimeLeft) -> str:
    """Format as `05:10 elapsed, about 12:00 left, budget 04:50`."""

    def clock(seconds: float) -> str:
        return str(timedelta(seconds=round(seconds))).removeprefix("0:")

    parts = [f"{clock(time_left.elapsed_s)} elapsed"]
    parts += (
        [f"about {clock(time_left.estimated_s)} left"] if time_left.estimated_s is not None else []
    )
    return ", ".join(
        parts + ([f"budget {clock(time_left.budget_s)}"] if time_left.budget_s is not None else [])
    )


def trials_table(rows: list[Row], goal: str, recommendation: Row | None) -> Table:
    """Return the table of trials; a star marks the best of each global batch."""
    winners = set(recommendation["per_global"].values()) if recommendation else set()
    # Settings of the batch are in the columns `batch` and `global`.
    searched = {
        key: (key.rpartition(".")[2], "")
        for key in rows[0]["settings"]
        if key not in BATCH_SETTINGS
    }
    columns = {
        "trial": ("trial", ""),
        **searched,
        "batch": ("batch", ""),
        "global": ("global", "d"),
    }
    columns |= {
        "samples_per_s": ("samples/s", COMPACT),
        "step_p50_s": ("p50 s", ".3f"),
        "step_p95_s": ("p95 s", ".3f"),
    }
    columns |= {"peak_gib": ("GiB", ".2f"), "loss": ("loss", ".3f")}
    columns |= {"samples": ("samples", ",d")} if goal in LEARNING_GOALS else {}
    columns |= {GOALS[goal].metric: (SHORT_TITLES[goal], ".3f")} if goal in SHORT_TITLES else {}
    shown = []
    for row in rows:
        shape = (
            "x".join(str(row[key]) for key in ("micro", "accumulation", "workers"))
            if row["global"]
            else None
        )
        values = {key: str(value) for key, value in row["settings"].items()} | {"batch": shape}
        values |= {
            "trial": row["trial"] + "*" * (row["trial"] in winners),
            "status": row["status"].replace("_", " "),
        }
        shown.append(row | values)
    return rows_table(shown, columns | {"status": ("status", "")})


def trial_line(row: Row, rungs: Sequence[int] = ()) -> str:
    """Format a trial that reached a rung or ended."""
    settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
    took = f" in {row['elapsed_s']:.0f} s" if row["elapsed_s"] is not None else ""
    reached = ""
    if len(rungs) > 1 and row["rungs"]:
        last = row["rungs"][-1]
        reached = (
            f"rung {len(row['rungs'])} of {len(rungs)}: {last['value']:.4g} after "
            f"{last['samples']:,} samples"
        )
    parts = [
        f"{settings}: {row['status'].replace('_', ' ')}{took}",
        reached,
        f"{format_compact(row['samples_per_s'])} samples/s"
        if row["samples_per_s"] is not None
        else "",
        f"loss {row['loss']:.3f}" if row["loss"] is not None and not reached else "",
        f"{row['peak_gib']:.2f} GiB" if row["peak_gib"] is not None else "",
        relative_paths(row["error"] or ""),
    ]
    return "  ".join(part for part in parts if part)


DESCRIPTION = """
Find the fastest batch shape (micro x accumulation x workers) of the recipe `{name}` from a few
measured steps on synthetic batches, and write it as a recipe file:

    mmray tune {name} --batch.global 512,1024

With --space or another --goal: compare the listed settings in trials, and write the best one.

    mmray tune {name} --space batch.micro=8,16,32 --space batch.accumulation=1,2
    mmray tune {name} --goal loss --budget 2h
    mmray tune {name} --goal recall --space "optimizer.lr=loguniform(1e-5,1e-3)" \\
      --space batch.global=256,512,1024

Goals that depend on learning compare held-out metrics at rungs: the better quarter of the trials
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

    Learning goals: default the rate.
    """
    samples: int | None = None
    """Configurations to sample;

    None: 32 if there is a range (8 for pbt), otherwise all combinations of the lists.
    """
    goal: Literal["throughput", "loss", "recall", "time-to-quality", "memory"] = "throughput"
    """What to optimize: samples/s, held-out loss or recall@1, seconds to the recipe's loss, or peak
    memory.
    """
    search: Literal["random", "optuna"] = "random"
    """How configurations are suggested: at random, or by Optuna's TPE (extra `optuna`)."""
    scheduler: Literal["halving", "asha", "pbt"] = "halving"
    """When trials end early: successive halving, Ray Tune's ASHA, or population based training
    (changes the rate).
    """
    budget: str | None = None
    """Time or GPU-hours after which running trials stop: 2h, 30m, 40gpu-hours.

    A repeated command continues.
    """
    concurrency: int | None = None
    """Trials at a time; None: one on a single machine, as many as fit on a cluster."""

    @property
    def num_samples(self) -> int | None:
        return self.samples or (POPULATION if self.scheduler == "pbt" else None)


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
    default_axes = trials.default_axes(base, command.goal).items()
    given = given or tuple(f"{key}={text}" for key, text in default_axes)
    space = search_space.parse_space(given, command.num_samples, base.train.seed)
    return run_sweep(command, base, space, recipe.batch.global_, terminal)[1]


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
) -> tuple[AnyPath, int]:
    """Search the space; show progress and results, and return the sweep's folder and exit code.
    Raises MmrayError.

    recipe_rows: see `Sweep`.
    """
    from mmray.tuning import trials
    from mmray.tuning.sweep import Budget, Sweep

    trials.corner_trials(base, space)  # report invalid values before Ray and torch are imported
    budget = Budget.parse(command.budget)
    from mmray.tuning.search import search

    terminal.note(f"mmray {version('mmray')}, sweep of recipe {base.recipe}")
    with terminal.progress("starting Ray"):
        reporter = ConsoleSweepReporter(terminal, command.goal)
        options = (
            command.goal,
            command.concurrency,
            command.search,
            command.scheduler,
            budget,
            recipe_rows,
        )
        folder, summary, rows = search(Sweep(base, command.settings, space, *options), reporter)
    return folder.path, _print_outcome(folder.path, summary, rows, terminal)


def _print_outcome(path: AnyPath, summary: Row, rows: list[Row], terminal: Terminal) -> int:
    recommendation, stopped = summary["recommendation"], summary["status"] in ("stopped", "budget")
    measured = sum(row["status"] == "finished" or bool(row["rungs"]) for row in rows)
    errors = {
        row["trial"]: f"{row['status'].replace('_', ' ')}: {row['error']}"
        for row in rows
        if row["error"]
    }
    if rows:
        terminal.console.print(trials_table(rows, summary["goal"], recommendation))
    if recommendation is None and not stopped:
        reasons = [f"  {trial} {relative_paths(error)}" for trial, error in errors.items()]
        raise TrainingError(
            f"no trial could be ranked; each run is in {relative_paths(str(path))}/trials:\n"
            + ("\n".join(reasons) or f"  no trial reported a finite {summary['goal']}")
        )
    for trial, error in errors.items():
        terminal.note(relative_paths(error), trial)
    took = f"{measured} of {len(rows)} trials measured in {summary['elapsed_s']:.0f} s"
    terminal.note(took + "; run the same command to resume" * stopped, summary["status"])
    if saved := summary.get("saved_gpu_hours"):
        unit = "GPU-hours" if summary.get("device") == "gpu" else "worker-hours"
        terminal.note(
            f"{summary['gpu_hours']:.2g} {unit}, {saved:.2g} saved by ending trials early", "cost"
        )
    if recommendation is not None:
        terminal.note(recommendation["why"], "best")
        if cooldown := recommendation.get("cooldown"):
            terminal.note(
                f"{cooldown['value']:.4g} after a cooldown, at {cooldown['samples']:,} samples",
                "cooldown",
            )
        terminal.note(f"mmray train {shell_path(path / 'best.yaml')}", "next")
    return INTERRUPTED if summary["status"] == "stopped" else 0
