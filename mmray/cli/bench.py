"""`mmray bench`: benchmarks of the loader and the training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.table import Table
from tyro.conf import Positional, arg

from mmray.bench.results import title_of
from mmray.cli.args import parse_args, require_positive, write_json
from mmray.config import recipes
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import COMPACT, rows_table
from mmray.errors import UsageError, suggest


@dataclass(frozen=True)
class StepCommand:
    """Compare the training loop with two PyTorch loops written by hand, on synthetic batches and
    without Ray.

    `bare` has the settings of the recipe, `best` those that are fastest on this device, with the
    whole batch at once.
    """

    recipe: Positional[Annotated[str, arg(metavar="[RECIPE]")]] = "sample"
    """Recipe whose model and batch are used."""
    pairs: int = 10
    """Rounds of timed windows, one per loop, in alternating order (A B C C B A)."""
    window_s: float = 3.0
    """Approximate seconds per window."""
    json: str | None = None
    """Write machine, ratios and rows to this file as JSON."""


@dataclass(frozen=True)
class LoaderCommand:
    """Compare the stream with PyTorch DataLoaders over the same images (224 pixels, global batch
    256, 2 consumers).
    """

    data: str | None = None
    """Prepared set or raw source; default: synthetic photographs (500 x 375 pixels, 110 KB)."""
    images: int = 512
    """Number of images."""
    rounds: int = 2
    """Windows per loader, in ABBA order."""
    window_s: float = 3.0
    """Seconds per window."""
    workers: int = 0
    """Decode actors of the stream, and DataLoader workers over both consumers; 0: one per core."""
    gpu_rate: float | None = None
    """Images/s that a device consumes; prints how many decode actors feed it."""
    json: str | None = None
    """Write machine, ratios and rows to this file as JSON."""


def bench(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Run a benchmark of the training step or the loader, and print its rates.

    Args:
        argv: `step` or `loader`, and its arguments.
        console: receives messages, progress and the table.

    Returns:
        Exit status 0.

    Raises:
        UsageError: the benchmark is unknown or an argument is invalid.
    """
    what, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if what in ("-h", "--help"):
        for name, (_, run) in BENCHES.items():
            console.log(f"mmray bench {name}: {run.__doc__} (--help for its options)")
        return 0
    if what not in BENCHES:
        raise UsageError(f"unknown benchmark `{what}`; {suggest(what, BENCHES)}")
    command_type, run = BENCHES[what]
    command = parse_args(command_type, rest, f"mmray bench {what}")
    require_positive(command, "pairs", "images", "rounds", "window_s", "gpu_rate")
    with console.show_progress("measuring"):
        result = run(command, console)
    print_result(result, console)
    write_json(command.json, result)
    return 0


def print_result(result: dict[str, Any], console: ConsoleReporter) -> None:
    """Print the machine, rows, ratios and notes of a benchmark."""
    machine = result["machine"]
    console.log(f"{machine['device']}, {machine['cpu']}, {machine['cores']} cores", "machine")
    if "batch" in result:
        console.log(result["batch"])
    console.print(_table(result["rows"]))
    for name, spread in result.get("spread", {}).items():
        of = f"median of {spread['pairs']} pairs, {spread['min']:.3f} to {spread['max']:.3f}"
        console.log(f"{result['ratios'][name]:.3f} ({of})", name)
    for note in result.get("notes", ()):
        console.log(note)


def _table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of rows, with columns from their keys."""
    values = {name: value for row in rows for name, value in row.items()}
    columns = {}
    for name, value in values.items():
        number = ".4f" if name == "loss" else COMPACT
        style = "" if isinstance(value, str) else number
        columns[name] = (title_of(name), style)
    return rows_table(rows, columns)


def _step(command: StepCommand, console: ConsoleReporter) -> dict[str, Any]:
    """compare the training loop with two written by hand"""
    from mmray.bench.step import bench_step

    total_s = 4 * command.pairs * command.window_s
    console.status(
        f"{command.pairs} rounds of 3 or 4 windows of {command.window_s:g} s, at most "
        f"{total_s:.0f} s"
    )
    return bench_step(recipes.load(command.recipe), command.pairs, command.window_s)


def _loader(command: LoaderCommand, console: ConsoleReporter) -> dict[str, Any]:
    """compare the stream with PyTorch DataLoaders"""
    from mmray.bench.loader import bench_loader

    arguments = {name: value for name, value in vars(command).items() if name != "json"}
    return bench_loader(console.status, **arguments)


BENCHES: dict[str, tuple[type[Any], Callable[[Any, ConsoleReporter], dict[str, Any]]]] = {
    "step": (StepCommand, _step),
    "loader": (LoaderCommand, _loader),
}
