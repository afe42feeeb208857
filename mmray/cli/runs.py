"""`mmray runs`: the runs and sweeps of a folder, and which are running."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from mmray.cli.args import parse_args, write_json
from mmray.console.reporter import ConsoleReporter
from mmray.console.tables import rows_table


@dataclass(frozen=True)
class RunsCommand:
    """List the runs and sweeps of a folder, the last active first.

    A run is `running` if a process renews its lease; `unfinished` if it was killed. The best score
    is the highest mean recall@1, or the lowest loss of a generative model; of a sweep, the
    recommended trial's value of its goal.
    """

    folder: Positional[Annotated[str, arg(metavar="[FOLDER]")]] = "runs"
    """Folder (or address, s3://...) of the runs, as in run.storage; for the trials of a sweep,
    runs/NAME/trials.
    """
    json: str | None = None
    """Write the list to this JSON file; `-`: print it instead of the table."""


def runs(argv: Sequence[str], console: ConsoleReporter) -> int:
    """mmray runs [FOLDER] [--json FILE]"""
    command = parse_args(RunsCommand, argv, "mmray runs")
    from mmray.report.listing import list_runs
    from mmray.storage.paths import to_path

    rows = list_runs(to_path(command.folder))
    if command.json == "-":
        console.print_raw(json.dumps({"runs": rows}, indent=2))
        return 0
    write_json(command.json, {"runs": rows})
    if not rows:
        console.log(f"no runs in {command.folder}")
        return 0
    columns = {
        "name": ("name", ""),
        "state": ("state", ""),
        "steps": ("steps", ">"),
        "loss": ("loss", ".3f"),
    }
    columns |= {"last": ("last", ".3f"), "best": ("best", ""), "age": ("active", ">")}
    console.print(rows_table([row | _texts(row) for row in rows], columns))
    return 0


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the cells that are not numbers."""
    from mmray.report.summary import format_duration

    where = row.get("best_trial") or (
        None if row.get("best_step") is None else f"step {row['best_step']:,}"
    )
    score = (
        None
        if row["best"] is None
        else (f"{row['metric'].removesuffix('/mean')} {row['best']:,.3f}")
    )
    steps = (
        (f"{row['trials']} trials")
        if row["kind"] == "sweep"
        else row["steps"] and f"{row['steps']:,}"
    )
    age = f"{format_duration(row['age_s'])} ago"
    return {
        "best": score and (f"{score} ({where})" if where else score),
        "steps": steps,
        "age": age,
    }
