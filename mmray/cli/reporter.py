"""Tells the screen what a run does: the command line's Listener."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mmray.cli.console import Screen, language_note, training_figures


class Reporter:
    """Tells the screen what a run does; implements mmray.train.board.Listener."""

    def __init__(self, screen: Screen):
        self.screen = screen
        self._first: tuple[float, int] | None = None

    def note(self, text: str, label: str = "") -> None:
        self.screen.note(short(text), label)

    def phase(self, title: str) -> None:
        self._first = None  # the steps after it have a pace of their own: what a restart took is in none of them
        self.screen.phase(title)

    def preparing(self, progress: Any) -> None:
        if progress.total_rows:  # unknown while the source is being scanned
            figures = f"{progress.bad_rows:,} set aside"
            self.screen.show(progress.done_rows, progress.total_rows, figures, f"{progress.stage} rows")

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        if "evaluate/recall_at_1/image_to_text" in metrics:
            self.note(evaluation_line(metrics), "evaluated")
        elif "evaluate/perplexity" in metrics:
            scores = {name.removeprefix("evaluate/"): value for name, value in metrics.items()}
            self.note(f"step {metrics['step']:,}: {language_note(scores)}", "evaluated")
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
