"""`mmray train`: train a recipe, with its settings changed by flags."""

from __future__ import annotations

from functools import partial
from typing import Any

from mmray import api
from mmray.cli.args import command
from mmray.cli.lines import RecipeSettings, read_recipe
from mmray.config import Config, recipes, to_yaml
from mmray.console.reporter import ConsoleReporter, shell_path
from mmray.console.tables import scores_tables
from mmray.errors import INTERRUPTED
from mmray.version import VERSION

DESCRIPTION = (
    "Train the recipe `{name}`; the defaults below are the recipe's values. Recipes: "
    f"{', '.join(recipes.RECIPES)}, or a YAML file. --print-config prints the settings and exits."
)


@command(read=partial(read_recipe, description=DESCRIPTION))
def train(
    console: ConsoleReporter, recipe: Config, settings: RecipeSettings, print_config: bool
) -> int:
    """Train a recipe with some settings changed, or resume its run, and print the scores.

    With --print-config it prints the settings as YAML instead.
    """
    if print_config:
        console.print_raw(to_yaml(settings).rstrip())
        return 0
    console.log(f"mmray {VERSION}, recipe {settings.recipe}")
    run = api.train(settings, reporter=console, start_s=console.start_s)
    result = run.result
    if result["status"] == "finished" and result["scores"]:
        console.print(*scores_tables(result["scores"]))
    _print_next_commands(run, result, console)
    return INTERRUPTED if result["status"] == "stopped" else 0


def _print_next_commands(run: api.Run, result: dict[str, Any], console: ConsoleReporter) -> None:
    """Print how to export the best checkpoint, unless it is the last one, and how to continue."""
    name = shell_path(run.path)
    exported = f"mmray export {name} {shell_path(f'exported/{run.path.name}')}"
    best = result["best"]
    if best is not None and best["step"] != result["steps"]:
        score = f"step {best['step']:,} with {best['metric']} {best['score']:.3f}"
        console.log(f"{score}: {exported} --step best", "best")
    if result["status"] == "finished":
        if result["scores"]:
            console.log(f"mmray evaluate {name}", "next")
        console.log(exported, "next")
