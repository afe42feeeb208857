"""Console output: labeled notes, tables, and progress as a live bar (terminal, notebook) or plain
lines (log).
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from mmray.evaluation import DIRECTIONS
from mmray.report.run import format_compact, non_retrieval_metrics, recall_rows
from mmray.storage.paths import AnyPath

LOG_INTERVAL_S = 5.0  # interval of progress lines in a log
LOG_WIDTH = 200
MIN_WIDTH = 12  # of a column of text in a narrow terminal
COMPACT = "compact"  # style of a column: about three digits


class _Display(Progress):
    """A progress bar, and above it a table that changes."""

    above: tuple[RenderableType, ...] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from self.above
        yield from super().get_renderables()


class Terminal:
    """Prints notes, tables and errors, and shows the progress of the current work."""

    def __init__(self, console: Console | None = None, start_s: float | None = None):
        self.start_s = time.monotonic() if start_s is None else start_s  # of the command
        self.console = console or Console(highlight=False, soft_wrap=True)
        notebook = self.console.is_jupyter  # rich needs ipywidgets to update a bar in Jupyter
        # rich draws no bar with TERM=dumb
        animated = self.console.is_terminal and not self.console.is_dumb_terminal
        self.is_live = find_spec("ipywidgets") is not None if notebook else animated
        if console is None and not (notebook or self.console.is_terminal):
            self.console.width = LOG_WIDTH  # tables in a log cannot be resized later
        self._live: _Display | None = None
        self._task: Any = None
        self._printed_s = 0.0

    def note(self, text: str, label: str = "") -> None:
        self.console.print(Text.assemble((f"{label:<10} ", "bold"), text) if label else Text(text))

    def output(self, text: str) -> None:
        """Print data unchanged; if the reader has closed the pipe, exit silently as for notes and
        tables.
        """
        self.console.out(text, highlight=False)

    def error(self, text: str) -> None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            Text.assemble(("error: ", "bold red"), text)
        )

    @contextmanager
    def progress(self, title: str) -> Iterator[None]:
        """Show a progress bar with its seconds while the block runs, in a terminal or notebook."""
        columns = (
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            # wraps if it is narrow
            TextColumn("{task.fields[details]}", style="cyan", table_column=Column()),
            TimeElapsedColumn(),
        )
        if not self.is_live:
            self.status(title)
            yield
            return
        with _Display(*columns, console=self.console, transient=True) as live_display:
            self._live = live_display
            self._add_task(title)
            try:
                yield
            finally:
                self._live = None

    def status(self, title: str) -> None:
        """Show the current activity in the bar of `progress`, or as a line of a log with the
        command's seconds.
        """
        if self._live is not None:
            self._live.remove_task(self._task)  # rich cannot reset a known total
            self._add_task(title)
        elif not self.is_live:
            self.note(title, f"{time.monotonic() - self.start_s:.1f} s")

    def phase(self, title: str) -> None:
        """Show what interrupts the current work, such as an evaluation; its bar stays."""
        if self._live is not None:
            self._live.update(self._task, description=title)
        else:
            self.status(title)

    def show(self, *above: RenderableType) -> None:
        """Replace the renderables above the progress bar."""
        if self._live is not None:
            self._live.above = above

    def _add_task(self, title: str) -> None:
        assert self._live is not None
        self._task = self._live.add_task(title, total=None, count="", details="")

    def update(self, done: float, total: float, details: str, label: str) -> None:
        """Set the progress to done of total (0: unknown); in a log, print a line every few seconds
        and at the end.
        """
        count = f"{done:,.0f}/{total:,.0f}" if total else f"{done:,.0f}"
        if self._live is not None:
            if not total and self._live.tasks[0].total:  # of the data set before
                self.status(label)
            values: dict[str, Any] = {"count": count, "details": details, "description": label}
            self._live.update(self._task, completed=done, total=total or None, **values)
            return
        now = time.monotonic()
        if not done:  # the start of a stage, which may end before its first line
            self._printed_s = now
        elif not self.is_live and (now - self._printed_s >= LOG_INTERVAL_S or done >= total > 0):
            self._printed_s = now
            self.console.print(f"{label} {count}  {details}".rstrip())


def language_note(metrics: dict[str, Any]) -> str:
    """Format the metrics of a generative model."""
    answers = (
        (f"; BLEU-4 {metrics['bleu_4']:.3f}, CIDEr {metrics['cider']:.3f}")
        if "cider" in metrics
        else ""
    )
    correct = f"{metrics['token_accuracy']:.1%} of {metrics['tokens']:,.0f} tokens correct"
    return f"perplexity {metrics['perplexity']:.3f}, {correct}{answers}"


def scores_tables(metrics: dict[str, Any]) -> list[Table]:
    """Return the tables of an evaluation: retrieval if the model has embeddings, and all other
    metrics.
    """
    others = Table(show_edge=False, show_header=False)
    # aligned with the recall table
    others.add_column(justify="right", min_width=len("image to text"))
    for name, value in non_retrieval_metrics(metrics):
        others.add_row(name, value)
    rows = recall_rows(metrics)
    return (
        [rows_table(rows, {name: (name, ">" if name else "") for name in rows[0]}), others]
        if rows
        else [others]
    )


def rows_table(rows: list[dict[str, Any]], columns: dict[str, tuple[str, str]]) -> Table:
    """Return the table of rows with a title and a format (or COMPACT) per column; a dash is a
    missing value.

    Texts that are too long for the terminal continue on further lines, because names are needed in
    full.
    """

    def text(value: Any, style: str) -> str:
        return (
            "-"
            if value is None
            else format_compact(value)
            if style == COMPACT
            else format(value, style)
        )

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    cells = [[text(row.get(name), style) for row in rows] for name, (_, style) in columns.items()]
    for (title, style), column in zip(columns.values(), cells, strict=True):
        least = min(MIN_WIDTH, max(map(len, (title, *column))))
        justify: Literal["left", "right"] = "right" if style else "left"
        table.add_column(
            title, justify=justify, no_wrap=bool(style), overflow="fold", min_width=least
        )
    for row_cells in zip(*cells, strict=True):
        table.add_row(*row_cells)
    return table


class Reporter:
    """Shows a run on the console; implements mmray.training.monitor.RunReporter."""

    def __init__(self, terminal: Terminal):
        self.terminal = terminal
        self._first: tuple[float, int] | None = None

    def log(self, text: str, label: str = "") -> None:
        self.terminal.note(relative_paths(text), label)

    def status(self, title: str) -> None:
        self._first = None  # restart the rate: the downtime of a restart does not count
        self.terminal.status(title)

    def phase(self, title: str) -> None:
        self.terminal.phase(title)

    def prepare_progress(self, progress: Any) -> None:
        details = f"{progress.bad_rows:,} quarantined" if progress.bad_rows else ""
        details += " (total estimated)" if progress.is_estimate else ""
        self.terminal.update(
            progress.done_rows, progress.total_rows, details, f"{progress.stage} rows"
        )

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        if metrics["step"] < total_steps:  # the table of the outcome has the last evaluation
            self._log_evaluation(metrics)
        left_s = self._seconds_left(metrics["step"], total_steps)
        formats = {
            "train/loss": "loss {:.3f}",
            "throughput/samples_per_s": "{} samples/s",
            "time/data_wait_share": "data wait {:.0%}",
            "memory/peak_gib": "worker peak {:.2f} GiB",
            "memory/all_processes_peak_gib": "all processes {:.2f} GiB",
        }
        values = {name: metrics[name] for name in formats if metrics.get(name) is not None}
        if rate := values.get("throughput/samples_per_s"):
            values["throughput/samples_per_s"] = format_compact(rate)
        parts = [formats[name].format(value) for name, value in values.items()]
        parts += [f"{left_s:.0f} s left"] if left_s else []
        self.terminal.update(metrics["step"], total_steps, "  ".join(parts), "step")

    def _log_evaluation(self, metrics: dict[str, Any]) -> None:
        if "evaluate/recall_at_1/image_to_text" in metrics:
            recalls = ", ".join(
                f"{each.replace('_', ' ')} {metrics[f'evaluate/recall_at_1/{each}']:.3f}"
                for each in DIRECTIONS
            )
            self.log(f"step {metrics['step']:,}: recall@1 {recalls}", "evaluation")
        elif "evaluate/perplexity" in metrics:
            scores = {name.removeprefix("evaluate/"): value for name, value in metrics.items()}
            self.log(f"step {metrics['step']:,}: {language_note(scores)}", "evaluation")

    def _seconds_left(self, done: int, total: int) -> float | None:
        """Estimate the remaining time from the rate since the first logged line, which excludes
        warm-up.
        """
        now = time.monotonic()
        if self._first is None or done <= self._first[1]:
            self._first = (now, done)
            return None
        start_s, first = self._first
        return (total - done) * (now - start_s) / (done - first)


def relative_paths(text: str) -> str:
    """Return the text with paths below the working directory made relative."""
    try:
        folder = re.escape(f"{Path.cwd()}/")
    except FileNotFoundError:  # deleted meanwhile, such as the folder of a job
        return text
    return re.sub(rf"(?<![\w.~:/-]){folder}", "", text)  # not inside a longer path or URI


def shell_path(path: AnyPath | str) -> str:
    """Return a path for a command that the user may copy: relative, and quoted if it has spaces."""
    return shlex.quote(relative_paths(str(path)))
