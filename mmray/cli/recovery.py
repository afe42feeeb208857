"""`mmray bench recovery`: what a lost worker costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from tyro.conf import Positional

from mmray.cli.args import at_least_one, parsed, write_json
from mmray.cli.console import Screen
from mmray.config import recipes
from mmray.config.search_space import with_settings


@dataclass(frozen=True)
class RecoveryCommand:
    """Whole runs on this machine, one training worker of each killed: how long until it goes on, what is done twice."""

    recipe: Positional[str] = "sample"
    """The recipe that is trained."""
    workers: int = 2
    """Training workers."""
    steps: int = 60
    """Steps of each run."""
    every: int = 20
    """Steps between two checkpoints; the kill comes in the middle."""
    rounds: int = 3
    """Runs."""
    json: str | None = None
    """Write machine, ratios and rows to this file."""


def recovery(argv: Sequence[str], screen: Screen) -> None:
    """a worker killed in mid-run: time until it goes on, steps done twice, what checkpoints cost"""
    command = parsed(RecoveryCommand, argv, "mmray bench recovery")
    at_least_one(command, "rounds", "every")
    from mmray.bench.recovery import bench_recovery

    config = with_settings(recipes.load(command.recipe), {"cluster.workers": command.workers})
    with screen.work("measuring"):
        result = bench_recovery(config, command.steps, command.every, command.rounds, screen.phase)
    machine = result["machine"]
    screen.note(f"{machine['device']}, {machine['cpu']}, {machine['cores']} cores", "machine")
    table = Table("round", "steps again after s", "past the kill after s", "steps done twice", show_edge=False)
    for row in result["rows"]:
        table.add_row(
            str(row["round"]), f"{row['recovery_s']:.1f}", f"{row['caught_up_s']:.1f}", str(row["wasted_steps"])
        )
    screen.console.print(table)
    for note in result["notes"]:
        screen.note(note)
    write_json(command.json, result)
