"""`mmray tune` without `--space`: find and print the fastest batch shape of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from rich.table import Table

from mmray.cli.console import COMPACT, Reporter, Terminal, relative_paths, rows_table, shell_path
from mmray.config import Config
from mmray.config.search_space import Space
from mmray.errors import TrainingError
from mmray.storage.paths import AnyPath
from mmray.sweep_files import TrialRow


def split_global_list(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (other words, values) with `--batch.global N1,N2` removed; a single number stays a
    setting.
    """
    rest, values = list(words), list[str]()
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        end = index + 1 if value else index + 2
        value = value or "".join(words[index + 1 : end])
        if name == "--batch.global" and "," in value:
            rest, values = [*words[:index], *words[end:]], [f"batch.global={value}"]
    return rest, values


def run_probe(base: Config, space: Space | None, terminal: Terminal) -> AnyPath:
    """Measure the shapes; show progress and results, and return the folder. Raises MmrayError."""
    from mmray.tuning.shape_probe import plan_task, probe_shapes

    plan_task(base, space)  # report invalid settings before Ray and torch are imported
    terminal.note(f"mmray {version('mmray')}, batch shapes of recipe {base.recipe}")
    with terminal.progress("starting"):
        path, summary, rows = probe_shapes(base, space, Reporter(terminal))
    recommendation = summary["recommendation"]
    winners = set(recommendation["per_global"].values()) if recommendation else set[str]()
    terminal.console.print(shapes_table(rows, winners))
    if recommendation is None:
        reasons = "\n".join(f"  {row.trial} {row.error}" for row in rows)
        raise TrainingError(f"no shape could be measured:\n{reasons}")
    terminal.note(recommendation["why"], "best")
    terminal.note(f"mmray train {shell_path(path / 'best.yaml')}", "next")
    return path


def shapes_table(rows: Sequence[TrialRow], winners: set[str]) -> Table:
    """Return the table of measured shapes; a star marks the best of each global batch."""
    shown = []
    for row in rows:
        details = relative_paths(row.error or "")
        shape = row.shape + "*" * (row.trial in winners)
        shown.append(row.to_json() | {"shape": shape, "details": details})
    columns = {
        "global": ("global", "d"),
        "shape": ("micro x accumulation x workers", ""),
        "samples_per_s": ("samples/s", COMPACT),
        "step_p50_s": ("step s", ".3f"),
        "peak_gib": ("GiB", ".2f"),
        "details": ("", ""),
    }
    return rows_table(shown, columns)
