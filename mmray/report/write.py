"""Write the pages about runs, sweeps and prepared sets, with Plotly's JavaScript inside, so that
they work offline.
"""

from __future__ import annotations

import base64
import gzip
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import median

import jinja2
import yaml
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from mmray.data.store.prepared_set import PreparedSet
from mmray.engine.metrics.table import EVALUATE
from mmray.errors import UsageError
from mmray.evaluation import main_scores
from mmray.report import summary
from mmray.report.figures import run_figures, set_figures, sweep_figures
from mmray.report.prepared import CLIP_S, SetRecord
from mmray.report.run import (
    RunRecord,
    format_number,
    non_retrieval_metrics,
    recall_rows,
    scores_by_set,
)
from mmray.report.sweep import SweepRecord, trial_columns
from mmray.storage.paths import AnyPath, check_kept, to_path, write_atomic
from mmray.sweep_files import SWEEP

REPORT = "report.html"
SET_PAGE = "show.html"
TEMPLATES = Path(__file__).with_name("templates")


def write_report(folder: AnyPath, out: AnyPath | None = None) -> AnyPath:
    """Write the report of a run or a sweep."""
    folder = to_path(folder)
    out = to_path(out or folder / REPORT)
    check_kept("--out", out)
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {problem}; give the folder of a run (runs/NAME) or of a sweep")
    if (folder / SWEEP).exists():
        return _write_sweep(SweepRecord.read(folder), out)
    if (folder / "config.yaml").exists():
        return _write_run(RunRecord(folder), out)
    raise UsageError(f"{folder} is neither a run (it has no config.yaml) nor a sweep (no {SWEEP})")


def _write_sweep(sweep: SweepRecord, out: AnyPath) -> AnyPath:
    return _write(
        "sweep.html",
        out,
        title=sweep.folder.name,
        sweep=sweep,
        columns=trial_columns(sweep.trials),
        figures=sweep_figures(sweep),
    )


def _write_run(run: RunRecord, out: AnyPath) -> AnyPath:
    try:
        settings = summary.settings_table(run.config)
    except yaml.YAMLError as error:
        raise UsageError(f"{run.folder / 'config.yaml'} is not valid YAML: {error}") from None
    scores = run.newest(EVALUATE)
    return _write(
        "run.html",
        out,
        title=run.folder.name,
        run=run,
        parts=run_figures(run),
        scores=scores,
        sets=scores_by_set(scores),
        recall=recall_rows(scores),
        limit=summary.find_limit(run),
        quarantine=summary.quarantine_summary(run.folder),
        changed=[setting for setting in settings if setting["value"] != setting["recipe"]],
        settings=settings,
    )


def write_set_page(
    prepared: PreparedSet,
    out: AnyPath | None = None,
    num_rows: int = 24,
    seed: int = 0,
    tokenizer_json: str | None = None,
    roots: Sequence[str] = (),
) -> SetRecord:
    """Write a page about a prepared set: a sample of its rows, histograms, and quarantined rows.

    Args:
        out: The HTML file; default: `show.html` in the folder of the set.
        tokenizer_json: None: tokens are not counted.
        roots: Folders whose images may be read if the set refers to them.

    Raises:
        UsageError: The file cannot be written.
        DataError: A shard is damaged, or lacks columns such as scores.
        OSError: The set cannot be read.
    """
    out = to_path(out or prepared.folder / SET_PAGE)
    record = SetRecord.read(prepared, num_rows, seed, tokenizer_json, roots)
    page = _write(
        "set.html",
        out,
        command="mmray show",
        title=prepared.folder.name,
        record=record,
        seed=seed,
        clip_s=CLIP_S,
        figures=set_figures(record.statistics),
    )
    return replace(record, page=page)


def _write(template: str, out: AnyPath, command: str = "mmray report", **values: object) -> AnyPath:
    """Write a page from a template and return its file. Raises UsageError if it cannot be
    written.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": summary.format_duration,
        "main_scores": main_scores,
        "median": median,
        "non_retrieval": non_retrieval_metrics,
        "number": format_number,
        "set_names": summary.dataset_names,
    }
    for kind in ("css", "js"):
        values[kind] = Markup((TEMPLATES / f"page.{kind}").read_text(encoding="utf-8"))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    plotly = _compressed_plotly()
    page = environment.get_template(template).render(
        **values, command=command, now=now, plotly=plotly
    )
    try:
        write_atomic(out, page)
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}; choose another --out"
        ) from error
    return out


@lru_cache(maxsize=1)
def _compressed_plotly() -> str:
    """Plotly's JavaScript (4.8 MB) as base64 of gzip, which the browser decompresses."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def write_report_safely(folder: AnyPath, note: Callable[[str, str], None]) -> None:
    """Write report.html at the end of a run or sweep; log an error instead of raising it.

    Args:
        folder: The folder of the run or the sweep.
        note: Called with (line, label): the path of the page or the error, and the word to print
            before it, `report`.
    """
    try:
        note(str(write_report(folder)), "report")
    except Exception as error:  # noqa: BLE001 - a report failure must not fail a finished run
        note(
            f"not written ({type(error).__name__}: {error}); try `mmray report "
            f"{shlex.quote(str(folder))}`",
            "report",
        )
