"""Console output: labelled notes, tables, and progress as a live bar (terminal) or plain lines (log)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from mmray.report.run import non_retrieval_metrics

LINE_EVERY_S = 5.0  # interval of progress lines in a log
LOG_WIDTH = 200
RECALLS = (1, 5, 10)


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}")


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields.get("figures", ""), style="cyan")


class Terminal:
    """Prints notes, tables and errors, and shows the progress of the current work."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._task: Any = None
        self._printed_s = 0.0

    def note(self, text: str, label: str = "") -> None:
        self.console.print(Text.assemble((f"{label:<10} ", "bold"), text) if label else Text(text))

    def table(self, table: Table) -> None:
        """Print a table; in a log at full width, because it cannot be resized later."""
        self.console.print(table, width=None if self.console.is_terminal else LOG_WIDTH)

    def error(self, text: str) -> None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), text))

    @contextmanager
    def progress(self, title: str) -> Iterator[None]:
        """Show a progress bar while the block runs, in a terminal."""
        columns = (
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            _Count(),
            _Figures(),
        )
        if not self.console.is_terminal:
            yield
            return
        with Progress(*columns, console=self.console, transient=True) as live_display:
            self._live, self._task = live_display, live_display.add_task(title, total=None, figures="", start=False)
            try:
                yield
            finally:
                self._live = None

    @contextmanager
    def live_display(self) -> Iterator[Callable[[RenderableType], None]]:
        """Yield a function that redraws a table in place while the block runs; in a log it does nothing."""
        if not self.console.is_terminal:
            yield lambda _: None
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as drawing:
            yield lambda what: drawing.update(what, refresh=True)

    def status(self, title: str) -> None:
        """Show the current activity while the number of items is unknown."""
        if self._live is not None:
            self._live.remove_task(self._task)  # rich cannot reset a known total
            self._task = self._live.add_task(title, total=None, figures="", start=False)
        elif not self.console.is_terminal:
            self.note(title)

    def update(self, done: float, total: float, figures: str, word: str) -> None:
        """Set the progress to done of total; in a log, print a line every few seconds and at the end."""
        if self._live is not None:
            self._live.start_task(self._task)
            self._live.update(self._task, completed=done, total=total, figures=figures, description=word)
            return
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._printed_s >= LINE_EVERY_S or done >= total):
            self._printed_s = now
            self.console.print(f"{word} {done:,.0f}/{total:,.0f}  {figures}")


def training_figures(metrics: dict[str, Any], seconds_left: float | None) -> str:
    """Format the measured metrics of a step."""
    wait = metrics.get("time/data_wait_share")
    parts = [
        f"loss {metrics['train/loss']:.3f}",
        f"{metrics['throughput/samples_per_s']:,.0f} samples/s" if "throughput/samples_per_s" in metrics else "",
        f"data wait {wait:.0%}" if wait is not None else "",
        f"{metrics['memory/peak_gib']:.2f} GiB" if "memory/peak_gib" in metrics else "",
        f"{seconds_left:.0f} s left" if seconds_left is not None else "",
    ]
    return "  ".join(part for part in parts if part)


def recall_table(metrics: dict[str, Any]) -> Table:
    """Format recall and median rank in both directions."""
    table = Table("", *(f"R@{k}" for k in RECALLS), "median rank", title_justify="left", show_edge=False)
    for way in ("image_to_text", "text_to_image"):
        recalls = [f"{metrics[f'recall_at_{k}/{way}']:.3f}" for k in RECALLS]
        table.add_row(way.replace("_", " "), *recalls, f"{metrics[f'median_rank/{way}']:g}")
    return table


def language_note(metrics: dict[str, Any]) -> str:
    """Format the metrics of a generative model."""
    return (
        f"perplexity {metrics['perplexity']:.3f}, {metrics['token_accuracy']:.1%} of {metrics['tokens']:,.0f} tokens "
        "correct" + (f"; BLEU-4 {metrics['bleu_4']:.3f}, CIDEr {metrics['cider']:.3f}" if "cider" in metrics else "")
    )


def scores_tables(metrics: dict[str, Any]) -> list[Table]:
    """Return the tables of an evaluation: retrieval if the model has embeddings, and all other metrics."""
    others = Table(show_edge=False, show_header=False)
    others.add_column(justify="right", min_width=len("image to text"))  # aligned with the recall table
    for name, value in non_retrieval_metrics(metrics):
        others.add_row(name, value)
    return [recall_table(metrics), others] if "recall_at_1/image_to_text" in metrics else [others]


def rows_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with the JSON names as columns; a dash is a missing value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(name.replace("_", " ") for name in names), show_edge=False)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


class Reporter:
    """Shows a run on the console; implements mmray.train.monitor.ProgressReporter."""

    def __init__(self, terminal: Terminal):
        self.terminal = terminal
        self._first: tuple[float, int] | None = None

    def log(self, text: str, label: str = "") -> None:
        self.terminal.note(relative_paths(text), label)

    def status(self, title: str) -> None:
        self._first = None  # restart the rate: the downtime of a restart does not count
        self.terminal.status(title)

    def prepare_progress(self, progress: Any) -> None:
        if progress.total_rows:  # unknown during the scan of the source
            figures = f"{progress.bad_rows:,} quarantined"
            self.terminal.update(progress.done_rows, progress.total_rows, figures, f"{progress.stage} rows")

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        if "evaluate/recall_at_1/image_to_text" in metrics:
            self.log(evaluation_line(metrics), "evaluation")
        elif "evaluate/perplexity" in metrics:
            scores = {name.removeprefix("evaluate/"): value for name, value in metrics.items()}
            self.log(f"step {metrics['step']:,}: {language_note(scores)}", "evaluation")
        done = metrics["step"]
        self.terminal.update(
            done, total_steps, training_figures(metrics, self._seconds_left(done, total_steps)), "step"
        )

    def _seconds_left(self, done: int, total: int) -> float | None:
        """Estimate the remaining time from the rate since the first logged line, which excludes warm-up."""
        now = time.monotonic()
        if self._first is None or done <= self._first[1]:
            self._first = (now, done)
            return None
        began_s, first = self._first
        return (total - done) * (now - began_s) / (done - first)


def evaluation_line(metrics: dict[str, Any]) -> str:
    ways = ("image_to_text", "text_to_image")
    recalls = ", ".join(f"{way.replace('_', ' ')} {metrics[f'evaluate/recall_at_1/{way}']:.3f}" for way in ways)
    return f"step {metrics['step']:,}: recall@1 {recalls}"


def relative_paths(text: str) -> str:
    """Return the text with paths below the working directory made relative."""
    return text.replace(f"{Path.cwd()}/", "")
