"""`mmray bench`: benchmarks of the loader, the training step and the parallel strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from rich.table import Table
from tyro.conf import Positional

from mmray.cli.args import parse, require_positive, write_json
from mmray.cli.console import Terminal, rows_table
from mmray.config import recipes
from mmray.errors import UsageError, suggest

COLUMNS = {
    "samples_per_s": ("samples/s", ",.0f"),
    "step_p50_s": ("p50 s", ".3f"),
    "step_p95_s": ("p95 s", ".3f"),
    "communication_share": ("comm", ".0%"),
    "idle_share_0": ("idle 0", ".0%"),
    "idle_share_1": ("idle 1", ".0%"),
    "peak_gib": ("GiB", ".2f"),
    "loss": ("loss", ".4f"),
    "loss_vs_ddp": ("vs ddp", "+.3%"),
}


@dataclass(frozen=True)
class StrategiesCommand:
    """Compare every parallel strategy and precision that this machine supports, on one model and global batch."""

    recipe: Positional[str] = "sample"
    """Recipe whose model and batch are used."""
    steps: int = 10
    """Timed steps, after 3 warm-up steps."""
    only: tuple[str, ...] = ()
    """Run only these strategies, by their names in the table."""
    json: str | None = None
    """Write machine, ratios and rows to this file as JSON."""


def strategies(argv: Sequence[str], terminal: Terminal) -> None:
    """compare DDP, FSDP, two-device branches and precisions"""
    command = parse(StrategiesCommand, argv, "mmray bench strategies")
    require_positive(command, "steps")
    from mmray.bench.strategies import bench_strategies

    result = bench_strategies(recipes.load(command.recipe), command.steps, command.only, terminal.status)
    machine = result["machine"]
    terminal.note(f"{machine['device']}, {machine['cpu']}, {machine['cores']} cores", "machine")
    terminal.note(result["batch"])
    terminal.console.print(_table(result["rows"]))
    terminal.note(
        "share of the time in collectives; idle: of the two devices of branches; loss after the last step", "comm"
    )
    for row in result["rows"]:
        if row["error"]:
            terminal.note(row["error"], row["strategy"])
    for note in result["notes"]:
        terminal.note(note)
    write_json(command.json, result)


def _table(rows: list[dict[str, Any]]) -> Table:
    """Return the table without borders, to fit 80 columns; a dash is a missing value."""
    table = Table("strategy", box=None, pad_edge=False, padding=(0, 1))
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right")
    for row in rows:
        figures = ["-" if row[name] is None else format(row[name], style) for name, (_, style) in COLUMNS.items()]
        table.add_row(row["strategy"], *figures)
    return table


@dataclass(frozen=True)
class StepCommand:
    """Compare the training loop with a bare PyTorch loop; with --space, measure time and memory of batch shapes.

    Uses synthetic batches and no Ray.
    """

    recipe: Positional[str] = "sample"
    """Recipe whose model and batch are used."""
    space: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """A setting and its values, such as batch.micro=8,16,32; repeat it to measure all combinations."""
    pairs: int = 10
    """Pairs of windows in ABBA order (without --space)."""
    window_s: float = 3.0
    """Approximate seconds per window."""
    json: str | None = None
    """Write machine, ratios and rows to this file as JSON."""


@dataclass(frozen=True)
class LoaderCommand:
    """Compare the stream with PyTorch DataLoaders over the same images (224 pixels, global batch 256, 2 consumers)."""

    data: str | None = None
    """A prepared set or a raw source; default: synthetic photographs of 500 x 375 pixels, 110 KB."""
    images: int = 512
    """Number of images."""
    rounds: int = 2
    """Windows per arm, in ABBA order."""
    window_s: float = 3.0
    """Seconds per window."""
    workers: int = 0
    """Stream actors, and DataLoader workers over both consumers; 0: one per core."""
    block_mb: float = 24.0
    """Size of a stream block in MB."""
    gpu_rate: float | None = None
    """Images/s that a device consumes; prints how many CPU workers feed it."""
    json: str | None = None
    """Write machine, ratios and rows to this file as JSON."""


def bench(argv: Sequence[str], terminal: Terminal) -> int:
    """mmray bench step|loader|strategies [--space batch.micro=8,16,32] [--json FILE]"""
    what, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if what in ("-h", "--help"):
        for name, run in BENCHES.items():
            terminal.note(f"mmray bench {name}: {run.__doc__} (--help for its options)")
        return 0
    if what not in BENCHES:
        raise UsageError(f"unknown benchmark `{what}`; {suggest(what, BENCHES)}")
    BENCHES[what](rest, terminal)
    return 0


def _step(argv: Sequence[str], terminal: Terminal) -> None:
    """compare the training loop with a bare one, or measure batch shapes"""
    command = parse(StepCommand, argv, "mmray bench step")
    require_positive(command, "pairs")
    config = recipes.load(command.recipe)
    if command.space:
        from mmray.bench.step import bench_shapes

        result = bench_shapes(config, command.space, command.window_s, terminal.status)
        _print_result(result, shapes_table(result["rows"]), terminal, command.json)
        return
    from mmray.bench.step import bench_step

    total_s = 2 * command.pairs * command.window_s
    terminal.status(f"{command.pairs} pairs of windows of {command.window_s:g} s, about {total_s:.0f} s in total")
    result = bench_step(config, command.pairs, command.window_s)
    terminal.note(result["batch"])
    _print_result(result, rows_table(result["rows"]), terminal, command.json)


def _loader(argv: Sequence[str], terminal: Terminal) -> None:
    """compare the stream with PyTorch DataLoaders and report the bottleneck"""
    command = parse(LoaderCommand, argv, "mmray bench loader")
    require_positive(command, "images", "rounds")
    from mmray.bench.loader import LoaderSettings, bench_loader

    given = {name: value for name, value in vars(command).items() if name != "json"}
    with terminal.progress("measuring"):
        result = bench_loader(LoaderSettings(**given), terminal.status)
    _print_result(result, rows_table(result["rows"]), terminal, command.json)


def shapes_table(rows: list[dict[str, Any]]) -> Table:
    """Return the table of batch shapes; rows that were not measured have a reason."""
    other = [name for name in rows[0]["settings"] if not name.startswith("batch.")]
    table = Table(
        "micro x accumulation x workers", *other, "samples/s", "p50 ms", "p95 ms", "peak GiB", show_edge=False
    )
    for row in rows:
        cut = f"{row['micro']} x {row['accumulation']} x {row['workers']} = {row['global']}"
        if row["status"] == "infeasible":
            cut = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
        figures = [row["status"].replace("_", " "), "", "", ""]
        if row["status"] == "measured":
            reserved = f" ({row['peak_reserved_gib']:.2f} reserved)" if row["peak_reserved_gib"] else ""
            figures = [
                f"{row['samples_per_s']:,.1f}",
                f"{row['step_p50_s'] * 1e3:,.1f}",
                f"{row['step_p95_s'] * 1e3:,.1f}",
            ]
            figures.append(f"{row['peak_gib']:.2f}{reserved}")
        table.add_row(cut, *(str(row["settings"][name]) for name in other), *figures)
        if row["reason"]:
            table.add_row(f"  {row['reason']}")
    return table


def _print_result(result: dict[str, Any], table: Table, terminal: Terminal, json: str | None) -> None:
    """Print table, ratios and notes; write them as JSON if a file is given."""
    machine = result["machine"]
    terminal.note(f"{machine['device']}, {machine['cpu']}, {machine['cores']} cores", "machine")
    terminal.console.print(table)
    for name, ratio in result["ratios"].items():
        spread = result.get("spread", {}).get(name)
        of = f" (median of {spread['pairs']} pairs, {spread['min']:.3f} to {spread['max']:.3f})" if spread else ""
        terminal.note(f"{ratio:.3f}{of}", name)
    for note in result.get("notes", ()):
        terminal.note(note)
    write_json(json, result)


BENCHES: dict[str, Callable[[Sequence[str], Terminal], None]] = {
    "step": _step,
    "loader": _loader,
    "strategies": strategies,
}
