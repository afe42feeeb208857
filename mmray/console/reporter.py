"""Show the progress of a run: a live bar in terminals and notebooks, lines in a log."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from mmray.console.sweep import trial_line
from mmray.engine.metrics.table import METRICS
from mmray.evaluation import main_scores
from mmray.machine import torchrun_rank
from mmray.report.run import format_compact, scores_by_set
from mmray.storage.paths import AnyPath
from mmray.sweep_files import TrialRow

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import PrepareProgress

LOG_INTERVAL_S = 5.0  # time between two progress lines of a log
LOG_WIDTH = 200


class ConsoleReporter:
    """Print messages and tables, and show the progress of the current work.

    It has the methods that a run (`RunReporter`) and a sweep (`SweepReporter`) call. A terminal,
    and Jupyter with ipywidgets, show a live bar. Anything else, such as a file, gets a line every
    few seconds, so that a log shows progress too. Under torchrun only the process of rank 0 shows
    anything.

    `log(text, label)` prints a message, `status(title)` starts a progress bar, and `step(metrics,
    total_steps)` shows a line of metrics.

    Args:
        console: where to print; None: standard output.
        start_s: time.monotonic() when the command started, from which a log counts its seconds;
            None: now.
    """

    def __init__(self, console: Console | None = None, start_s: float | None = None):
        self.start_s = time.monotonic() if start_s is None else start_s
        self.console = console or Console(
            highlight=False, soft_wrap=True, quiet=torchrun_rank() > 0
        )
        is_notebook = self.console.is_jupyter
        if is_notebook:
            # rich needs ipywidgets to redraw a bar in Jupyter.
            self.is_live = find_spec("ipywidgets") is not None
        else:
            # rich draws no bar with TERM=dumb.
            self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
            if console is None and not self.console.is_terminal:
                self.console.width = LOG_WIDTH  # tables in a log cannot be resized later
        self._display: Progress | None = None
        self._task = TaskID(0)  # if there is a display
        self._printed_s = 0.0
        self._first_step: tuple[float, int] | None = None  # (seconds, step) of the first line

    def log(self, text: str, label: str = "") -> None:
        """Print a message; paths below the working directory are shortened."""
        text = relative_paths(text)
        labeled = Text.assemble((f"{label:<10} ", "bold"), text) if label else Text(text)
        self.console.print(labeled)

    def print(self, *renderables: RenderableType) -> None:
        """Print tables or texts."""
        self.console.print(*renderables)

    def print_raw(self, text: str) -> None:
        """Print data without markup and line wrapping, such as YAML that another program reads."""
        self.console.out(text, highlight=False)

    def print_error(self, text: str) -> None:
        """Print a message to standard error, after `error: `."""
        errors = Console(stderr=True, highlight=False, soft_wrap=True, quiet=self.console.quiet)
        errors.print(Text.assemble(("error: ", "bold red"), text))

    @contextmanager
    def show_progress(self, title: str) -> Iterator[None]:
        """Return a context manager that shows a progress bar with its seconds while its block runs.

        Without a terminal it prints the title as a line of a log instead.

        Args:
            title: the first activity, such as `importing`; `status` replaces it.
        """
        if not self.is_live:
            self.status(title)
            yield
            return
        columns = [
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            # The only column that wraps in a narrow terminal.
            TextColumn("{task.fields[details]}", style="cyan", table_column=Column()),
            TimeElapsedColumn(),
        ]
        with Progress(*columns, console=self.console, transient=True) as display:
            self._display = display
            self._start_bar(title)
            try:
                yield
            finally:
                self._display = None

    def status(self, title: str) -> None:
        """Start a new activity: a new bar, or a line of a log with the seconds of the command so
        far.

        Args:
            title: the activity, such as `starting Ray`.
        """
        self._first_step = None  # restart the rate, because a restart's downtime does not count
        if self._display is not None:
            self._display.remove_task(self._task)  # rich cannot reset a known total
            self._start_bar(title)
        else:
            self.phase(title)

    def phase(self, title: str) -> None:
        """Show an activity that interrupts the current one, such as an evaluation; keep the bar."""
        if self._display is not None:
            self._display.update(self._task, description=title)
        elif not self.is_live:
            self.log(title, f"{time.monotonic() - self.start_s:.1f} s")

    def set_progress(self, done: float, total: float, details: str, label: str) -> None:
        """Set the progress of the bar, or print a line of a log every 5 seconds and at the end.

        Args:
            done: finished units, such as rows or steps.
            total: all units; 0: unknown.
            details: text after the numbers, such as `loss 1.23`.
            label: text before the numbers, which names the unit, such as `step`.
        """
        count = f"{done:,.0f}/{total:,.0f}" if total else f"{done:,.0f}"
        if self._display is not None:
            if not total and self._display.tasks[0].total:  # the total of the previous data set
                self._display.remove_task(self._task)
                self._start_bar(label)
            self._display.update(
                self._task,
                completed=done,
                total=total or None,
                count=count,
                details=details,
                description=label,
            )
            return
        now = time.monotonic()
        if not done:
            # A stage starts. It may end before its first line is due.
            self._printed_s = now
        elif not self.is_live and (now - self._printed_s >= LOG_INTERVAL_S or done >= total > 0):
            self._printed_s = now
            self.console.print(f"{label} {count}  {details}".rstrip())

    def prepare_progress(self, progress: PrepareProgress) -> None:
        """Show how many rows (or prompts) a stage of `prepare`, or an evaluation, has processed."""
        details = f"{progress.bad_rows:,} quarantined" if progress.bad_rows else ""
        if progress.is_estimate:
            details += " (total estimated)"
        label = f"{progress.stage} {progress.unit}"
        self.set_progress(progress.done_rows, progress.total_rows, details, label)

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        """Show the metrics of a training step.

        Args:
            metrics: a line of metrics.jsonl: `step`, and floats such as `train/loss` and
                `throughput/samples_per_s`. After an evaluation it also has names with the prefix
                `evaluate/`, which are logged unless this is the last step.
            total_steps: number of steps of the run.
        """
        if metrics["step"] < total_steps:  # the table of the outcome has the last evaluation
            self._log_evaluation(metrics)
        left_s = self._seconds_left(metrics["step"], total_steps)
        parts = [
            info.console.format(value=metrics[name], compact=format_compact(metrics[name]))
            for name, info in METRICS.items()
            if info.console and metrics.get(name) is not None
        ]
        if left_s:
            parts.append(f"{left_s:.0f} s left")
        self.set_progress(metrics["step"], total_steps, "  ".join(parts), "step")

    def trial(self, row: TrialRow, num_rungs: int) -> None:
        """Print a line about a trial of a sweep that reached a rung or ended."""
        self.log(trial_line(row, num_rungs), row.trial)

    def _start_bar(self, title: str) -> None:
        assert self._display is not None
        self._task = self._display.add_task(title, total=None, count="", details="")

    def _log_evaluation(self, metrics: dict[str, Any]) -> None:
        scores = {
            name.removeprefix("evaluate/"): value
            for name, value in metrics.items()
            if name.startswith("evaluate/")
        }
        for name, of_set in scores_by_set(scores).items():
            texts = [f"{title} {text}" for title, text in main_scores(of_set)]
            if texts:
                prefix = f"{name}: " if name else ""
                self.log(f"step {metrics['step']:,}: {prefix}{', '.join(texts)}", "evaluation")

    def _seconds_left(self, done: int, total: int) -> float | None:
        """Estimate the remaining time from the rate since the first line, without warm-up."""
        now = time.monotonic()
        if self._first_step is None or done <= self._first_step[1]:
            self._first_step = (now, done)
            return None
        start_s, first = self._first_step
        return (total - done) * (now - start_s) / (done - first)


def relative_paths(text: str) -> str:
    """Return the text with paths below the working directory made relative.

    In the working directory `/home/me`, `saved in /home/me/runs/clip` becomes `saved in runs/clip`.
    """
    try:
        folder = re.escape(f"{Path.cwd()}/")
    except FileNotFoundError:  # deleted meanwhile, such as the folder of a job
        return text
    return re.sub(rf"(?<![\w.~:/-]){folder}", "", text)  # not inside a longer path or URI


def shell_path(path: AnyPath | str) -> str:
    """Return a path to copy into a command: quoted, and relative below the working directory."""
    return shlex.quote(relative_paths(str(path)))
