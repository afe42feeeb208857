"""Progress bar in a terminal, and the estimated end of a run."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from mmray.cli.console import Reporter, Terminal

FIGURES = ("loss 1.234", "2,560 samples/s", "data wait 3%", "peak 0.45 GiB")


def line(step):
    measured = {"throughput/samples_per_s": 2560.4, "time/data_wait_share": 0.031, "memory/peak_gib": 0.45}
    return {"step": step, "train/loss": 1.2341} | measured


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is set."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("mmray.cli.console.time", SimpleNamespace(monotonic=lambda: now.s))
    return now


class FakeTerminal:
    """A terminal of 80 columns, and a run that reports to it."""

    def __init__(self):
        self._file = io.StringIO()
        console = Console(force_terminal=True, file=self._file, width=80, color_system=None, _environ={})
        self.terminal = Terminal(console)
        self.reporter = Reporter(self.terminal)

    def drawn(self):
        """The text of the latest drawing, without cursor codes."""
        self._file.truncate(self._file.seek(0))
        self.terminal._live.refresh()
        return " ".join(self._file.getvalue().split())


def test_bar_shows_metrics_and_time_left(clock):
    terminal = FakeTerminal()
    with terminal.terminal.progress("starting Ray"):
        assert "starting Ray" in terminal.drawn()
        terminal.reporter.status("starting 2 workers")
        assert "starting 2 workers" in terminal.drawn()
        terminal.reporter.step(line(310), 1350)
        first = terminal.drawn()
        assert "step" in first and "310/1,350" in first and "left" not in first  # a pace needs two lines
        clock.s = 155.0
        terminal.reporter.step(line(620), 1350)
        second = terminal.drawn()
        assert "620/1,350" in second and "━" in second
        assert all(word in second for figure in FIGURES for word in figure.split()), second
        assert "365 s left" in second  # 730 steps at two per second


RESTART = None  # a minute without steps


@pytest.mark.parametrize(
    ("steps", "pace_s", "total", "expected"),
    [
        (range(10, 101, 10), 0.5, 100, [None, *((100 - step) * 0.5 for step in range(20, 101, 10))]),
        ((510, 520, 590), 2.0, 600, [None, 160.0, 20.0]),  # resumed
        ((10, 60, RESTART, 35, 45), 2.0, 100, [None, 80.0, None, 110.0]),  # from an older checkpoint
        ((10, 60, RESTART, 65, 75), 2.0, 100, [None, 80.0, None, 50.0]),
    ],
)
def test_time_left_counts_steps_of_this_attempt(clock, steps, pace_s, total, expected):
    reporter, estimates, before = Reporter(Terminal()), [], steps[0]
    for step in steps:
        if step is RESTART:
            clock.s += 60.0
            reporter.status("starting 1 workers")
            continue
        clock.s += abs(step - before) * pace_s
        before = step
        estimates.append(reporter._seconds_left(step, total))
    assert estimates == [value if value is None else pytest.approx(value) for value in expected]
