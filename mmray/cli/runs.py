"""Commands of the models of runs: `mmray evaluate`, `export`, `report` and `runs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from tyro.conf import Positional, arg

from mmray import api
from mmray.cli.args import JsonFile, JsonList, RunPath, command, show_rows, write_json
from mmray.cli.lines import Line, flag_names, read_weights
from mmray.config import Config, EvalSettings
from mmray.config.model import AnyModel
from mmray.console.reporter import ConsoleReporter, relative_paths
from mmray.console.tables import scores_tables
from mmray.errors import UsageError, require_positive
from mmray.storage.paths import AnyPath

SETTINGS_HELP = (
    "Metrics to compute; the default of each setting is the run's value, of `limit` only for the "
    "run's held-out rows."
)
Settings = Annotated[EvalSettings, arg(help=SETTINGS_HELP)]
DEFAULTS = EvalSettings()


def read_line(words: Sequence[str]) -> Line:
    """Read a line, with the names of its flags."""
    line = read_weights(words)
    return replace(line, given=line.given | {"flags": flag_names(words)})


@command(api.evaluate, read_line)
def evaluate(
    console: ConsoleReporter,
    run: api.ModelPath,
    weights: str,
    model: AnyModel | None,
    flags: set[str],
    evaluate: Settings = DEFAULTS,
    json: JsonFile = None,
    **arguments: Any,
) -> None:
    """Evaluate a checkpoint of a run, or pretrained weights; print the metrics."""
    require_positive(workers=arguments["workers"])
    if isinstance(run, Config):
        if arguments["data"] is None:
            raise UsageError(
                "--weights needs --data: a prepared set or a raw source to evaluate on"
            )
        run = run.replace(model=model)
    changed = {name: value for name, value in dict(evaluate).items() if f"evaluate.{name}" in flags}
    metrics = api.evaluate(run, **arguments, reporter=console, **changed)
    console.print(*scores_tables(metrics))
    write_json(json, {"metrics": metrics})


@command(api.export, read_weights)
def export(
    console: ConsoleReporter,
    run: api.ModelPath,
    weights: str,
    out: api.OutPath,
    model: AnyModel | None,
    **arguments: Any,
) -> None:
    """Write the model of a run, or pretrained weights, to a folder for mmray.load or
    transformers.
    """
    if not out:
        raise UsageError("mmray export --weights FILE OUT: the folder OUT is missing")
    if isinstance(run, Config):
        run = run.replace(model=model)
    _print_exported(api.export(run, out, **arguments, reporter=console), console)


def _print_exported(out: AnyPath, console: ConsoleReporter) -> None:
    """Print the folder, and how to load the model from Python."""
    from mmray.models.export.vlm import read_spec

    folder = relative_paths(str(out))
    console.log(folder, "exported")
    call = 'model.embed_texts(["a red circle"])'
    if read_spec(out) is not None:
        call = 'model.answer([{"role": "user", "content": "..."}])'
    console.log(f'import mmray; model = mmray.load("{folder}"); {call}', "next")


@command()
def report(console: ConsoleReporter, *, run: RunPath, out: str | None = None) -> None:
    """Write a self-contained HTML page about a run or a sweep, finished or not.

    Args:
        run: folder (or address, s3://...) of the run, or folder of the sweep.
        out: file to write; None: report.html in the folder.
    """
    from mmray.report.write import write_report  # importing Plotly takes a second
    from mmray.storage.paths import to_path

    page = write_report(to_path(run), None if out is None else to_path(out))
    console.log(f"{page} ({page.stat().st_size / 1e6:.1f} MB; self-contained)", "report")


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
