"""Messages and tables; progress as a bar in a terminal and as lines of a log; time left."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from mmray.console.reporter import ConsoleReporter, relative_paths, shell_path
from mmray.console.tables import rows_table
from mmray.data.prepare.pipeline import PrepareProgress

FIGURES = (
    "loss 1.234",
    "2,560 samples/s",
    "data wait 3%",
    "worker peak 0.45 GiB",
)


def line(step):
    measured = {
        "throughput/samples_per_s": 2560.4,
        "time/data_wait_share": 0.031,
        "memory/peak_gib": 0.45,
    }
    return {"step": step, "train/loss": 1.2341} | measured


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is set."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("mmray.console.reporter.time", SimpleNamespace(monotonic=lambda: now.s))
    return now


class FakeTerminal:
    """A terminal of 80 columns, and a run that reports to it."""

    def __init__(self):
        self._file = io.StringIO()
        console = Console(
            force_terminal=True, file=self._file, width=80, color_system=None, _environ={}
        )
        self.reporter = ConsoleReporter(console)

    def drawn(self):
        """The text of the latest drawing, without cursor codes."""
        self._file.truncate(self._file.seek(0))
        self.reporter._display.refresh()
        return " ".join(self._file.getvalue().split())


def test_bar_shows_the_seconds_of_a_stage_and_stays_during_an_evaluation():
    terminal = FakeTerminal()
    with terminal.reporter.show_progress("importing"):
        terminal.reporter.status("building the model")
        terminal.reporter._display.tasks[0].start_time -= 75
        assert "building the model" in (drawn := terminal.drawn()) and "0:01:15" in drawn
        terminal.reporter.step(line(310), 1350)
        terminal.reporter.phase("evaluating")
        assert "evaluating" in (drawn := terminal.drawn()) and "310/1,350" in drawn


def test_terminal_without_cursor_codes_gets_lines():
    file = io.StringIO()
    reporter = ConsoleReporter(Console(force_terminal=True, file=file, _environ={"TERM": "dumb"}))
    with reporter.show_progress("importing"):
        reporter.status("first step")
    assert "first step" in file.getvalue()


class FakeLog:
    """A log, and a run that reports to it."""

    def __init__(self, start_s=0.0):
        self._file = io.StringIO()
        self.reporter = ConsoleReporter(Console(file=self._file, width=150), start_s)

    @property
    def lines(self):
        return self._file.getvalue().splitlines()


def test_log_gets_plain_lines_including_the_last():
    text = io.StringIO()
    reporter = ConsoleReporter(Console(file=text, width=100))
    with reporter.show_progress("training"):
        for step in range(1, 101):
            reporter.set_progress(step, 100, "loss 1.0", "step")
    lines = text.getvalue().splitlines()
    assert (
        lines[1] == "step 1/100  loss 1.0"
        and lines[-1] == ("step 100/100  loss 1.0")
        and len(lines) <= 4
    )


def test_messages_are_not_parsed_as_markup(capfd):
    reporter = ConsoleReporter(Console(force_terminal=False, width=100))
    reporter.log('pip install -e ".[dev]"', "next")
    reporter.print_error("layers [bold] are unknown")
    out, err = capfd.readouterr()
    assert out == 'next       pip install -e ".[dev]"\n' and err == (
        "error: layers [bold] are unknown\n"
    )


def test_log_has_a_line_per_stage_with_the_seconds_since_the_command(clock):
    clock.s = 101.5
    log = FakeLog(start_s=100.0)
    with log.reporter.show_progress("importing"):
        for clock.s, title in ((102.0, "starting 1 worker"), (109.25, "first step")):
            log.reporter.status(title)
        log.reporter.phase("evaluating")
    assert [each.split() for each in log.lines] == [
        ["1.5", "s", "importing"],
        ["2.0", "s", "starting", "1", "worker"],
        ["9.2", "s", "first", "step"],
        ["9.2", "s", "evaluating"],
    ]


def test_last_evaluation_is_shown_once(clock):
    """The table of the outcome has it."""
    log = FakeLog()
    directions = ("image_to_text", "text_to_image")
    scores = {f"evaluate/recall_at_1/{direction}": 0.25 for direction in directions}
    for step in (10, 20):
        log.reporter.step(line(step) | scores, 20)
    assert [each for each in log.lines if "recall" in each] == [
        "evaluation step 10: recall@1 image to text 25.0%, recall@1 text to image 25.0%"
    ]


def test_prepare_shows_a_growing_count_until_the_total_is_known(clock):
    terminal, log = FakeTerminal(), FakeLog()
    log.reporter.prepare_progress(PrepareProgress("scan", 0, 0))
    log.reporter.prepare_progress(PrepareProgress("scan", 512, 0))  # less than a second later
    clock.s += 10.0
    scan, pack = PrepareProgress("scan", 12_000, 0), PrepareProgress("pack", 300, 36_000, 2)
    estimate = PrepareProgress("pack", 300, 35_000, is_estimate=True)
    prompts = PrepareProgress("evaluate", 512, 80_000, unit="prompts")
    with terminal.reporter.show_progress("starting"):
        for progress, shown in (
            (scan, "scan rows"),
            (estimate, "300/35,000 (total estimated)"),
            (pack, "300/36,000"),
            (prompts, "evaluate prompts"),
        ):
            terminal.reporter.prepare_progress(progress)
            assert shown in terminal.drawn()
            clock.s += 10.0
            log.reporter.prepare_progress(progress)
        terminal.reporter.prepare_progress(scan)  # of a second set
        assert terminal.reporter._display.tasks[0].total is None
    assert [each.rstrip() for each in log.lines] == [
        "scan rows 12,000",
        "pack rows 300/35,000   (total estimated)",
        "pack rows 300/36,000  2 quarantined",
        "evaluate prompts 512/80,000",
    ]


def test_bar_shows_metrics_and_time_left(clock):
    terminal = FakeTerminal()
    with terminal.reporter.show_progress("starting Ray"):
        assert "starting Ray" in terminal.drawn()
        terminal.reporter.status("starting 2 workers")
        assert "starting 2 workers" in terminal.drawn()
        terminal.reporter.step(line(310), 1350)
        first = terminal.drawn()
        # a pace needs two lines
        assert "step" in first and "310/1,350" in first and "left" not in first
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
        (
            range(10, 101, 10),
            0.5,
            100,
            [None, *((100 - step) * 0.5 for step in range(20, 101, 10))],
        ),
        ((510, 520, 590), 2.0, 600, [None, 160.0, 20.0]),  # resumed
        # from an older checkpoint
        ((10, 60, RESTART, 35, 45), 2.0, 100, [None, 80.0, None, 110.0]),
        ((10, 60, RESTART, 65, 75), 2.0, 100, [None, 80.0, None, 50.0]),
    ],
)
def test_time_left_counts_steps_of_this_attempt(clock, steps, pace_s, total, expected):
    reporter = ConsoleReporter()
    estimates = []
    before = steps[0]
    for step in steps:
        if step is RESTART:
            clock.s += 60.0
            reporter.status("starting 1 workers")
            continue
        clock.s += abs(step - before) * pace_s
        before = step
        estimates.append(reporter._seconds_left(step, total))
    assert estimates == [value if value is None else pytest.approx(value) for value in expected]


def test_paths_stay_absolute_if_the_working_directory_was_deleted(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    assert relative_paths(f"{tmp_path}/job/run; see ({tmp_path}/job/a)") == "run; see (a)"
    (tmp_path / "job").rmdir()
    assert relative_paths(f"{tmp_path}/job/run") == f"{tmp_path}/job/run"


def test_paths_of_suggested_commands_are_quoted_if_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        shell_path(tmp_path / "runs" / "a") == "runs/a" and shell_path("my runs/a") == "'my runs/a'"
    )


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("/", "s3://bucket/runs/a and file:///tmp/b"),
        ("/tmp", "/mnt/tmp/run, /tmp-2/run, file:///tmp/run"),
    ],
)
def test_other_paths_and_uris_are_not_shortened(monkeypatch, folder, text):
    monkeypatch.chdir(folder)
    assert relative_paths(text) == text


@pytest.mark.parametrize("width", [60, 30])
def test_names_in_a_table_are_complete_in_a_narrow_terminal(width):
    name = "resnet50-bert-cc12m-lr1e-4-seed0"
    file = io.StringIO()
    columns = {"name": ("name", ""), "steps": ("steps", ">"), "note": ("", "")}
    table = rows_table([{"name": name, "steps": 300, "note": "out of memory " * 3}], columns)
    ConsoleReporter(Console(file=file, width=width, soft_wrap=True)).print(table)
    lines = file.getvalue().splitlines()
    assert "".join(line[: lines[0].index("steps")].strip() for line in lines[2:]) == name
