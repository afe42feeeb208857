"""`mmray tune --goal throughput`: measure, predict and print the batch shapes of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from rich.table import Table

from mmray.cli.console import COMPACT, Reporter, Terminal, relative_paths, rows_table, shell_path
from mmray.config import Config
from mmray.config.search_space import Space
from mmray.errors import TrainingError
from mmray.storage.paths import AnyPath

Row = dict[str, Any]


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
    from mmray.tuning.shape_probe import plan_probes, probe_shapes

    plan_probes(base, space)  # report invalid settings before Ray and torch are imported
    terminal.note(f"mmray {version('mmray')}, batch shapes of recipe {base.recipe}")
    with terminal.progress("starting"):
        path, summary, rows = probe_shapes(base, space, Reporter(terminal))
    for probe, fitted in zip(summary["probes"], summary["fits"], strict=True):
        settings = " ".join(f"{name}={value}" for name, value in probe["settings"].items())
        if settings:
            terminal.note(settings, "settings")
        terminal.console.print(micro_table(probe["samples"]))
        terminal.note(fitted["text"], "fit")
    terminal.console.print(shapes_table(rows, summary["recommendation"]))
    if summary["recommendation"] is None:
        raise TrainingError(
            "no shape could be measured:\n"
            + "\n".join(f"  {row['trial']} {row['error']}" for row in rows)
        )
    terminal.note(summary["recommendation"]["why"], "best")
    terminal.note(f"mmray train {shell_path(path / 'best.yaml')}", "next")
    return path


def micro_table(samples: Sequence[Row]) -> Table:
    """Return the table of one worker's steps without accumulation: the least time and memory of
    each size.
    """
    rows = []
    for micro in sorted({sample["micro"] for sample in samples}):
        visits = [
            sample for sample in samples if (sample["micro"], sample["accumulation"]) == (micro, 1)
        ]
        row = {
            name: min(sample[name] for sample in visits) for name in ("micro", "step_s", "peak_gib")
        }
        rows.append(row | {"samples_per_s": micro / row["step_s"]})
    columns = {"micro": ("rows of a micro-batch", "d"), "step_s": ("step s", ".4f")}
    return rows_table(
        rows,
        columns | {"samples_per_s": ("samples/s of a worker", COMPACT), "peak_gib": ("GiB", ".2f")},
    )


def shapes_table(rows: Sequence[Row], recommendation: Row | None) -> Table:
    """Return the table of shapes; a star marks the best of each global batch."""
    winners = (
        set(recommendation["per_global"].values()) | {recommendation["best"]}
        if recommendation
        else set()
    )
    searched = {name: (name.rpartition(".")[2], "") for name in rows[0]["settings"]}
    shown = []
    for row in rows:
        measured = row["samples_per_s"] if row["status"] == "finished" else None
        shape = "x".join(str(row[name]) for name in ("micro", "accumulation", "workers")) + "*" * (
            row["trial"] in winners
        )
        details = relative_paths(
            row["error"] or row["status"].replace("_", " ").replace("finished", "measured")
        )
        values = {name: str(value) for name, value in row["settings"].items()}
        shown.append(row | values | {"shape": shape, "measured": measured, "details": details})
    columns = {
        **searched,
        "global": ("global", "d"),
        "shape": ("micro x accumulation x workers", ""),
    }
    columns |= {
        "predicted_samples_per_s": ("predicted samples/s", COMPACT),
        "measured": ("measured", COMPACT),
    }
    columns |= {"step_p50_s": ("step s", ".3f"), "peak_gib": ("GiB", ".2f"), "details": ("", "")}
    return rows_table(shown, columns)
