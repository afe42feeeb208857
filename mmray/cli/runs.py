"""`mmray runs`: the runs and sweeps of a folder, and which are running."""

from __future__ import annotations

from typing import Annotated, Any

from tyro.conf import Positional, arg

from mmray.cli.args import JsonList, command, show_rows
from mmray.console.reporter import ConsoleReporter


@command()
def runs(
    console: ConsoleReporter,
    *,
    folder: Positional[Annotated[str, arg(metavar="[FOLDER]")]] = "runs",
    json: JsonList = None,
) -> None:
    """List the runs and sweeps of a folder, the last active first.

    A run is `running` if a process renews its lease; `unfinished` if it was killed. The best score
    is the highest mean recall@1, or the lowest loss of a vision-language model; of a sweep, the
    recommended trial's value of its goal.

    Args:
        folder: folder or address of the runs, as in run.storage; of the trials of a sweep:
            NAME/trials.
    """
    from mmray.report.listing import list_runs
    from mmray.storage.paths import to_path

    columns = {
        "name": ("name", ""),
        "state": ("state", ""),
        "steps": ("steps", ">"),
        "loss": ("loss", ".3f"),
        "last": ("last", ".3f"),
        "best": ("best", ""),
        "age": ("active", ">"),
    }
    rows = list_runs(to_path(folder))
    show_rows(rows, "runs", json, console, columns, _texts, f"no runs in {folder}")


def _texts(row: dict[str, Any]) -> dict[str, str | None]:
    """Return the cells that are not numbers: steps, best score and time since the last activity."""
    from mmray.report.summary import format_duration

    if row["kind"] == "sweep":
        steps = f"{row['trials']} trials"
    else:
        steps = row["steps"] and f"{row['steps']:,}"
    best = None
    if row["best"] is not None:
        best = f"{row['metric'].removesuffix('/mean')} {row['best']:,.3f}"
        if row.get("best_trial"):
            best += f" ({row['best_trial']})"
        elif row.get("best_step") is not None:
            best += f" (step {row['best_step']:,})"
    return {"best": best, "steps": steps, "age": f"{format_duration(row['age_s'])} ago"}
