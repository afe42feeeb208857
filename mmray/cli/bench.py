"""`mmray bench`: benchmarks of the loader and the training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from rich.table import Table
from tyro.conf import Positional, arg

from mmray.bench.results import title_of
from mmray.cli.args import JsonFile, command, first_sentence, write_json
from mmray.config import recipes
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import COMPACT, rows_table
from mmray.errors import UsageError, require_positive, suggest


def bench(argv: Sequence[str], console: ConsoleReporter) -> int:
    """Run a benchmark of the training step or the loader, and print its rates."""
    what, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if what in ("-h", "--help"):
        for name, each in BENCHES.items():
            console.log(f"mmray bench {name}: {first_sentence(each)} (--help for its options)")
        return 0
    if what not in BENCHES:
        raise UsageError(f"unknown benchmark `{what}`; {suggest(what, BENCHES)}")
    return BENCHES[what](rest, console)


def print_result(
    result: dict[str, Any], console: ConsoleReporter, json_file: str | None = None
) -> None:
    """Print the machine, rows, ratios and notes of a benchmark, and write them to a file."""
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
    write_json(json_file, result)


def _table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of rows, with columns from their keys."""
    values = {name: value for row in rows for name, value in row.items()}
    columns = {}
    for name, value in values.items():
        number = ".4f" if name == "loss" else COMPACT
        style = "" if isinstance(value, str) else number
        columns[name] = (title_of(name), style)
    return rows_table(rows, columns)


@command(name="bench step")
def step(
    console: ConsoleReporter,
    *,
    recipe: Positional[Annotated[str, arg(metavar="[RECIPE]")]] = "sample",
    pairs: int = 10,
    window_s: float = 3.0,
    json: JsonFile = None,
) -> None:
    """Compare the training loop with two PyTorch loops written by hand, on synthetic batches and
    without Ray.

    `bare` has the settings of the recipe, `best` those that are fastest on this device, with the
    whole batch at once.

    Args:
        recipe: recipe whose model and batch are used.
        pairs: rounds of timed windows, one per loop, in alternating order (A B C C B A).
        window_s: approximate seconds per window.
    """
    require_positive(pairs=pairs, window_s=window_s)
    with console.show_progress("measuring"):
        config = recipes.load(recipe)
        if config.model.generates_text:
            from mmray.bench.conversations import bench_conversations as measure
        else:
            from mmray.bench.step import bench_step as measure

        total_s = 4 * pairs * window_s
        console.status(
            f"{pairs} rounds of 3 or 4 windows of {window_s:g} s, at most {total_s:.0f} s"
        )
        result = measure(config, pairs, window_s)
    print_result(result, console, json)


@command(name="bench loader")
def loader(
    console: ConsoleReporter,
    *,
    data: str | None = None,
    images: int = 512,
    rounds: int = 2,
    window_s: float = 3.0,
    workers: int = 0,
    gpu_rate: float | None = None,
    json: JsonFile = None,
) -> None:
    """Compare the stream with PyTorch DataLoaders over the same images (224 pixels, global batch
    256, 2 consumers).

    Args:
        data: prepared set or raw source; default: synthetic photographs (500 x 375 pixels, 110 KB).
        images: number of images.
        rounds: windows per loader, in ABBA order.
        window_s: seconds per window.
        workers: decode actors of the stream, and DataLoader workers over both consumers; 0: one per
            core.
        gpu_rate: images/s that a device consumes; prints how many decode actors feed it.
    """
    require_positive(images=images, rounds=rounds, window_s=window_s, gpu_rate=gpu_rate)
    with console.show_progress("measuring"):
        from mmray.bench.loader import bench_loader

        result = bench_loader(console.status, data, images, rounds, window_s, workers, gpu_rate)
    print_result(result, console, json)


BENCHES = {"step": step, "loader": loader}
