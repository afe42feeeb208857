"""`mmray tune`: search batch shapes or other settings; the best trial becomes a recipe."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, cast

from tyro.conf import UseAppendAction, arg

from mmray import api
from mmray.cli.args import command
from mmray.cli.lines import RecipeSettings, read_recipe
from mmray.config import LENGTHS, Config, to_yaml
from mmray.console.reporter import ConsoleReporter, shell_path
from mmray.console.sweep import trials_table
from mmray.errors import INTERRUPTED
from mmray.report.sweep import SweepRecord
from mmray.version import VERSION

DESCRIPTION = """\
Find the fastest batch shape (micro x accumulation x workers) of the recipe `{name}` from a few
measured steps on synthetic batches, and write it as a recipe file:

    mmray tune {name} --batch.global 1024

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
--print-config prints the base settings of the trials and exits."""
SPACE = "SETTING=V1,V2,... or =uniform(LOW,HIGH) or =loguniform(LOW,HIGH); default: the rate."


@command(api.tune, partial(read_recipe, description=DESCRIPTION, overridden=LENGTHS))
def tune(
    console: ConsoleReporter,
    recipe: Config,
    settings: RecipeSettings,
    print_config: bool,
    space: Annotated[UseAppendAction[tuple[str, ...]], arg(help=SPACE)] = (),
    **options: Any,
) -> int:
    """Find the fastest micro-batch, or compare settings in trials (short runs), and print the best
    one.
    """
    from mmray.config import search_space

    if print_config:
        base = settings.replace(train=settings.train.with_length_of(recipe.train))
        console.print_raw(to_yaml(base).rstrip())
        return 0
    sections = {section: getattr(settings, section) for section in api.Sections.__annotations__}
    console.log(f"mmray {VERSION}, tune recipe {recipe.recipe}")
    sweep = api.tune(
        recipe,
        space=search_space.parse_axes(space) or None,
        **options,
        reporter=console,
        **cast(api.Sections, sections),
    )
    _print_outcome(sweep, console)
    return INTERRUPTED if sweep.status == "stopped" else 0


def _print_outcome(sweep: SweepRecord, console: ConsoleReporter) -> None:
    """Print the table of trials or batch shapes, and the command that trains the best one."""
    best = sweep.recommendation
    if sweep.trials:
        console.print(trials_table(sweep))
    for row in sweep.trials:
        if row.error:
            console.log(f"{row.status.replace('_', ' ')}: {row.error}", row.trial)
    if best is not None:
        console.log(best.why, "best")
        console.log(f"mmray train {shell_path(sweep.folder / 'best.yaml')}", "next")
