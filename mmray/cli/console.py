"""What a person sees while mmray works: a live bar in a terminal, plain lines in a log.

Part of the command line; nothing below it prints.
"""

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

from mmray.report.scores import other_scores

LINE_EVERY_S = 5.0  # in a log; a terminal is drawn over in place
LOG_WIDTH = 200
RECALLS = (1, 5, 10)


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}")


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields.get("figures", ""), style="cyan")


class Screen:
    """Prints notes and progress; `note` for a line that stays, `show` for a measure of the work under way."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._task: Any = None
        self._printed_s = 0.0

    def note(self, text: str, label: str = "") -> None:
        self.console.print(Text.assemble((f"{label:<10} ", "bold"), text) if label else Text(text))

    def table(self, table: Table) -> None:
        """A table; in a log as wide as it is, for nobody there can widen the window."""
        self.console.print(table, width=None if self.console.is_terminal else LOG_WIDTH)

    def error(self, text: str) -> None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), text))

    @contextmanager
    def work(self, title: str) -> Iterator[None]:
        """A bar titled so while the block runs (in a terminal)."""
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
        with Progress(*columns, console=self.console, transient=True) as live:
            self._live, self._task = live, live.add_task(title, total=None, figures="", start=False)
            try:
                yield
            finally:
                self._live = None

    @contextmanager
    def live(self) -> Iterator[Callable[[RenderableType], None]]:
        """A function that draws in place of what it drew before, while the block runs; in a log it draws nothing."""
        if not self.console.is_terminal:
            yield lambda _: None
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as drawing:
            yield lambda what: drawing.update(what, refresh=True)

    def phase(self, title: str) -> None:
        """What begins now, before there is anything to count."""
        if self._live is not None:
            self._live.remove_task(self._task)  # a total once known cannot be made unknown again
            self._task = self._live.add_task(title, total=None, figures="", start=False)
        elif not self.console.is_terminal:
            self.note(title)

    def show(self, done: float, total: float, figures: str, word: str) -> None:
        """Move the bar to done of total; in a log, a line each few seconds and the last."""
        if self._live is not None:
            self._live.start_task(self._task)
            self._live.update(self._task, completed=done, total=total, figures=figures, description=word)
            return
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._printed_s >= LINE_EVERY_S or done >= total):
            self._printed_s = now
            self.console.print(f"{word} {done:,.0f}/{total:,.0f}  {figures}")


def training_figures(metrics: dict[str, Any], seconds_left: float | None) -> str:
    """One line of a step's metrics; what was not measured is left out."""
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
    """Recall and median rank both ways."""
    table = Table("", *(f"R@{k}" for k in RECALLS), "median rank", title_justify="left", show_edge=False)
    for way in ("image_to_text", "text_to_image"):
        recalls = [f"{metrics[f'recall_at_{k}/{way}']:.3f}" for k in RECALLS]
        table.add_row(way.replace("_", " "), *recalls, f"{metrics[f'median_rank/{way}']:g}")
    return table


def language_note(metrics: dict[str, Any]) -> str:
    """A line about a model that writes."""
    return (
        f"perplexity {metrics['perplexity']:.3f}, {metrics['token_accuracy']:.1%} of {metrics['tokens']:,.0f} tokens "
        "guessed" + (f"; BLEU-4 {metrics['bleu_4']:.3f}, CIDEr {metrics['cider']:.3f}" if "cider" in metrics else "")
    )


def scores_tables(metrics: dict[str, Any]) -> list[Table]:
    """All that an evaluation found: retrieval, where the model gives embeddings, and every other figure by its name."""
    others = Table(show_edge=False, show_header=False)
    others.add_column(justify="right", min_width=len("image to text"))  # under that of the recall
    for name, value in other_scores(metrics):
        others.add_row(name, value)
    return [recall_table(metrics), others] if "recall_at_1/image_to_text" in metrics else [others]


def rows_table(rows: list[dict[str, Any]]) -> Table:
    """Rows of figures under the names that they have in the JSON file; a row may lack some, and a dash is no figure."""
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
    """Show a run on the screen; implements mmray.train.monitor.ProgressReporter."""

    def __init__(self, screen: Screen):
        self.screen = screen
        self._first: tuple[float, int] | None = None

    def log(self, text: str, label: str = "") -> None:
        self.screen.note(short(text), label)

    def status(self, title: str) -> None:
        self._first = None  # the steps after it have a pace of their own: what a restart took is in none of them
        self.screen.phase(title)

    def prepare_progress(self, progress: Any) -> None:
        if progress.total_rows:  # unknown while the source is being scanned
            figures = f"{progress.bad_rows:,} set aside"
            self.screen.show(progress.done_rows, progress.total_rows, figures, f"{progress.stage} rows")

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        if "evaluate/recall_at_1/image_to_text" in metrics:
            self.log(evaluation_line(metrics), "evaluated")
        elif "evaluate/perplexity" in metrics:
            scores = {name.removeprefix("evaluate/"): value for name, value in metrics.items()}
            self.log(f"step {metrics['step']:,}: {language_note(scores)}", "evaluated")
        done = metrics["step"]
        self.screen.show(done, total_steps, training_figures(metrics, self._seconds_left(done, total_steps)), "step")

    def _seconds_left(self, done: int, total: int) -> float | None:
        """From the pace since the first line of an attempt: its first steps, which warm up, are left out."""
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


def short(text: str) -> str:
    """Paths below the working directory as they would be typed."""
    return text.replace(f"{Path.cwd()}/", "")
