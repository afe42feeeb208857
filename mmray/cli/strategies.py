"""`mmray bench strategies`: ways to lay a model on this machine's devices, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from tyro.conf import Positional

from mmray.cli.args import at_least_one, parsed, write_json
from mmray.cli.console import Screen
from mmray.config import recipes

COLUMNS = {
    "samples_per_s": ("samples/s", ",.0f"),
    "step_p50_s": ("p50 s", ".3f"),
    "step_p95_s": ("p95 s", ".3f"),
    "communication_share": ("sent", ".0%"),
    "idle_share_0": ("idle", ".0%"),
    "idle_share_1": ("idle", ".0%"),
    "peak_gib": ("GiB", ".2f"),
    "loss": ("loss", ".4f"),
    "loss_vs_ddp": ("vs ddp", "+.3%"),
}


@dataclass(frozen=True)
class StrategiesCommand:
    """The same model, data and global batch through every strategy that this machine allows, in fresh processes."""

    recipe: Positional[str] = "sample"
    """The recipe whose model and batch are used."""
    steps: int = 10
    """Steps timed, after three to warm up."""
    only: tuple[str, ...] = ()
    """Names of some strategies, as the table has them, quoted."""
    json: str | None = None
    """Write machine, ratios and rows to this file."""


def strategies(argv: Sequence[str], screen: Screen) -> None:
    """every way to lay the model on this machine's devices, side by side"""
    command = parsed(StrategiesCommand, argv, "mmray bench strategies")
    at_least_one(command, "steps")
    from mmray.bench.strategies import bench_strategies

    result = bench_strategies(recipes.load(command.recipe), command.steps, command.only, screen.phase)
    machine = result["machine"]
    screen.note(f"{machine['device']}, {machine['cpu']}, {machine['cores']} cores", "machine")
    screen.note(result["batch"])
    screen.console.print(_table(result["rows"]))
    screen.note(
        "share of the time in which ranks sent; idle: of the branches' two devices; loss after the last step", "sent"
    )
    for row in result["rows"]:
        if row["error"]:
            screen.note(row["error"], row["strategy"])
    for note in result["notes"]:
        screen.note(note)
    write_json(command.json, result)


def _table(rows: list[dict[str, Any]]) -> Table:
    """A line each, with no borders, to fit 80 columns; what was not measured is a dash."""
    table = Table("strategy", box=None, pad_edge=False, padding=(0, 1))
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right")
    for row in rows:
        told = ["-" if row[name] is None else format(row[name], style) for name, (_, style) in COLUMNS.items()]
        table.add_row(row["strategy"], *told)
    return table
