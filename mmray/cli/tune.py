"""`mmray tune`: search batch shapes or other settings; the best trial becomes a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import tyro
from tyro.conf import UseAppendAction

from mmray import api
from mmray.cli.args import load_recipe, parse_args, split_args
from mmray.config import LENGTHS, Config, to_yaml
from mmray.console.reporter import ConsoleReporter, shell_path
from mmray.console.sweep import trials_table
from mmray.errors import INTERRUPTED
from mmray.report.sweep import SweepRecord
from mmray.version import VERSION

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
micro-batch and accumulation are searched, the global batch is micro x accumulation x workers;
otherwise accumulation follows from --batch.global, so search batch.micro with it.
--print-config prints the base settings of the trials and exits.
"""


@dataclass(frozen=True)
class TuneCommand:
    """Search learning rate, batch or any other settings; the best trial is saved as a recipe."""

    settings: Annotated[Config, tyro.conf.arg(name="")]
    space: UseAppendAction[tuple[str, ...]] = ()
    """SETTING=V1,V2,... or =uniform(LOW,HIGH) or =loguniform(LOW,HIGH); default: the rate."""
    samples: int | None = None
    """Configurations to sample; None: 32 if there is a range, otherwise all combinations."""
    goal: api.Goal = "throughput"
    """What to optimize: samples/s, held-out loss, or recall@1."""
    search: api.Search = "random"
    """How configurations are suggested: at random, or by Optuna's TPE (extra `optuna`)."""
    scheduler: api.Scheduler = "halving"
    """When trials end early: successive halving, or Ray Tune's ASHA."""
    budget: str | None = None
    """Time or GPU-hours after which trials stop: 2h, 30m, 40gpu-hours; a rerun continues."""
    concurrency: int | None = None
    """Trials at a time; None: one on a single machine, as many as fit on a cluster."""


def tune(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Find the fastest micro-batch, or compare settings in trials (short runs), and print the best
    one.

    Args:
        argv: arguments after the command, such as `["clip", "--goal", "loss"]`.
        console: receives messages and progress.

    Returns:
        Exit status: 0, or 130 if the sweep was stopped by the user.

    Raises:
        MmrayError: an argument is invalid or no trial could be ranked; has the exit status.
    """
    name, rest, print_config = split_args(argv)
    rest, listed = split_global_list(rest)
    from mmray.config import search_space

    recipe = load_recipe(name, rest)
    default = TuneCommand(recipe.without_overridden_length_and_batch(LENGTHS))
    description = DESCRIPTION.strip().format(name=name)
    command = parse_args(TuneCommand, rest, f"mmray tune {name}", default, description)
    if print_config:
        settings = command.settings
        base = settings.replace(train=settings.train.with_length_of(recipe.train))
        console.print_raw(to_yaml(base).rstrip())
        return 0
    options = vars(command) | {"space": search_space.parse_axes((*command.space, *listed)) or None}
    del options["settings"]
    sections = {
        section: getattr(command.settings, section) for section in api.Sections.__annotations__
    }
    console.log(f"mmray {VERSION}, tune recipe {recipe.recipe}")
    sweep = api.tune(
        recipe,
        **options,
        reporter=console,
        **cast(api.Sections, sections),
    )
    _print_outcome(sweep, console)
    return INTERRUPTED if sweep.status == "stopped" else 0


def split_global_list(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take a list `--batch.global 256,512` out of the arguments, for the search space.

    Args:
        words: arguments of the command.

    Returns:
        The other arguments, and `["batch.global=256,512"]`, a value of --space. If the flag is not
        given or has a single number, all arguments are returned with an empty list.
    """
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        end = index + 1
        if not value:
            value = "".join(words[end : end + 1])
            end += 1
        if name == "--batch.global" and "," in value:
            return [*words[:index], *words[end:]], [f"batch.global={value}"]
    return list(words), []


def _print_outcome(sweep: SweepRecord, console: ConsoleReporter) -> None:
    """Print the table of trials or batch shapes, and the command that trains the best one."""
    best = sweep.recommendation
    winners = {best.best, *best.per_global.values()} if best else set[str]()
    if sweep.trials:
        console.print(trials_table(sweep, winners))
    for row in sweep.trials:
        if row.error:
            console.log(f"{row.status.replace('_', ' ')}: {row.error}", row.trial)
    if best is not None:
        console.log(best.why, "best")
        console.log(f"mmray train {shell_path(sweep.folder / 'best.yaml')}", "next")
