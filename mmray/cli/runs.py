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
    is of the best checkpoint of a run that has ended, or of the recommended trial of a sweep.

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
        "score": ("score", ""),
        "best": ("best", ""),
        "age": ("active", ">"),
    }
    rows = list_runs(to_path(folder))
    show_rows(rows, "runs", json, console, columns, _texts, f"no runs in {folder}")


def _texts(row: dict[str, Any]) -> dict[str, str | None]:
    """Return the cells that are not numbers: steps, scores and time since the last activity."""
    from mmray.evaluation import main_scores
    from mmray.report.run import scores_by_set
    from mmray.report.summary import format_duration

    if row["kind"] == "sweep":
        steps = f"{row['trials']} trials"
    else:
        steps = row["steps"] and f"{row['steps']:,}"
    sets = scores_by_set(row["scores"]).values()
    shown = [pair for of_set in sets for pair in main_scores(of_set)]
    best = row["best"]
    if best is not None:
        of = best["trial"] if "trial" in best else f"step {best['step']:,}"
        best = f"{best['metric']} {best['score']:,.3f} ({of})"
    return {
        "score": " ".join(shown[0]) if shown else None,
        "best": best,
        "steps": steps,
        "age": f"{format_duration(row['age_s'])} ago",
    }
