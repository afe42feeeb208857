"""Output and exit code of the command for each outcome of a sweep, without Ray."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mmray import cli
from mmray.cli.console import Terminal
from mmray.cli.tune import ConsoleSweepReporter, _print_outcome, live_table, trial_line
from mmray.config import from_yaml, recipes
from mmray.config.search_space import parse_space
from mmray.errors import TrainingError
from mmray.tuning.results import TrialOutcome, build_row, select_best
from mmray.tuning.sweep import TimeLeft
from mmray.tuning.trials import build_trial, corner_trials

LINES = [
    {
        "step": step,
        "rows_stop": 128 * step,
        "throughput/samples_per_s": rate,
        "time/step_s": 0.2,
        "train/loss": 2.0,
    }
    | {"time/step_p50_s": 0.19, "time/step_p95_s": 0.25, "memory/peak_gib": 0.5}
    for step, rate in ((2, 100), (4, 500), (6, 700))
]


FINISHED = TrialOutcome("finished")
OOM = TrialOutcome("out_of_memory", "CUDA out of memory")
STOPPED = TrialOutcome("stopped")


def outcome(status, *outcomes):
    """The outcome of a sweep of two trials."""
    trials = corner_trials(recipes.load("sample"), parse_space(["batch.micro=32,64"]))
    trials = [replace(trial, name=f"t00{number}") for number, trial in enumerate(trials, 1)]
    rows = [
        build_row(t, o, "memory", LINES if o.status == "finished" else [], elapsed_s=9.0)
        for t, o in zip(trials, outcomes, strict=True)
    ]
    best = select_best(rows, "memory")
    summary = {"status": status, "goal": "memory", "elapsed_s": 61.2, "recommendation": best}
    return Path("runs/sample-tune"), summary, rows


def print_outcome(sweep):
    text = io.StringIO()
    code = _print_outcome(*sweep, Terminal(Console(file=text, width=80, soft_wrap=True)))
    return code, text.getvalue()


def test_finished_sweep_prints_best_trial_and_next_command():
    code, text = print_outcome(outcome("finished", FINISHED, OOM))
    assert code == 0
    assert (
        "1 of 2 trials measured in 61 s" in text
        and ("t002       out of memory: CUDA out of memory") in text
    )
    assert "t001 has 0.50 GiB; no other trial was measured." in text
    assert "mmray train " in text and "sample-tune/best.yaml" in text


def test_stopped_sweep_exits_with_130_and_prints_best_so_far():
    code, text = print_outcome(outcome("stopped", FINISHED, STOPPED))
    assert code == 130 and "run the same command to resume" in text and "best.yaml" in text
    code, text = print_outcome(outcome("stopped", STOPPED, STOPPED))
    assert code == 130 and "best.yaml" not in text


def test_sweep_without_ranked_trial_is_an_error_with_each_reason():
    with pytest.raises(TrainingError) as raised:
        print_outcome(outcome("failed", TrialOutcome("failed", "KeyError: 'label'"), OOM))
    assert raised.value.exit_code == 3
    assert "t001 failed: KeyError: 'label'" in str(raised.value)
    assert "t002 out of memory: CUDA out of memory" in str(raised.value)
    unmeasured = outcome("finished", FINISHED, FINISHED)
    unmeasured[1].update(goal="loss", recommendation=None)
    with pytest.raises(TrainingError, match="no trial reported a finite loss"):
        print_outcome(unmeasured)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "optimizer.betas=[0.9,0.98"], "a list must end with `]`"),
        (
            ["--scheduler", "pbt", "--space", "batch.global=64,128"],
            "batch.global cannot change during a run",
        ),
        (["--scheduler", "pbt", "--search", "optuna"], "--scheduler pbt needs"),
        (
            ["--goal", "throughput", "--budget", "2h", "--search", "optuna"],
            "--search, --budget: no effect on --goal throughput without --space",
        ),
        (["--goal", "throughput", "--samples", "3"], "--samples: no effect on --goal"),
    ],
)
def test_search_that_cannot_run_is_a_usage_error(words, message, capsys, tmp_path):
    defaults = ["--goal", "loss", "--run.storage", str(tmp_path)]
    assert (
        cli.run(["tune", "sample", *defaults, *words], Terminal(Console(file=io.StringIO()))) == 2
    )
    assert message in " ".join(capsys.readouterr().err.split())


def test_recipe_that_is_not_utf8_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_bytes("recipe: sämple".encode("latin-1"))
    assert cli.run(["tune", str(tmp_path / "mine.yaml"), "--goal", "loss"], Terminal()) == 2
    assert "mine.yaml is not valid YAML in UTF-8" in " ".join(capsys.readouterr().err.split())


def test_print_config_prints_the_base_recipe(capfd):
    words = ["tune", "sample", "--space", "batch.micro=32", "--train.steps", "5", "--print-config"]
    assert cli.run(words, Terminal()) == 0
    assert from_yaml(capfd.readouterr().out, "printed") == recipes.load("sample")


def live_row(name, status, *values, **changes):
    settings, rungs = (
        {"optimizer.lr": 1e-3},
        [{"samples": 100 * 4**n, "value": each} for n, each in enumerate(values)],
    )
    return {
        "trial": name,
        "status": status,
        "settings": settings,
        "rungs": rungs,
        "elapsed_s": 61.0,
    } | changes


def test_live_table_has_running_trials_and_the_best_ones():
    rows = [
        live_row("t001", "paused", 3.0),
        live_row("t002", "pruned", 2.5, 2.0),
        live_row("t003", "paused", 1.0),
    ]
    rows += [live_row("t004", "failed"), live_row("t005", "running"), live_row("t006", "failed")]
    text = io.StringIO()
    Console(file=text, width=80).print(live_table(rows, (100, 400, 1600), "loss", 4))
    header, _, *shown, hidden = text.getvalue().splitlines()
    assert header.split() == ["trial", "lr", "rung", "held-out", "loss", "status", "s"]
    assert [line.split() for line in shown] == [
        ["t005", "0.001", "0/3", "-", "running", "61"],
        ["t002", "0.001", "2/3", "2", "pruned", "61"],
        ["t003", "0.001", "1/3", "1", "paused", "61"],
        ["t001", "0.001", "1/3", "3", "paused", "61"],
    ]
    assert hidden.strip() == "and 2 failed"
    assert live_table([], (100,), "recall", 4).row_count == 0


def test_terminal_has_a_table_and_time_left_and_a_log_a_line_per_event():
    for is_terminal in (True, False):
        text = io.StringIO()
        terminal = Terminal(Console(file=text, width=100, force_terminal=is_terminal))
        reporter, row = ConsoleSweepReporter(terminal, "recall"), live_row("t001", "paused", 0.25)
        row |= {"samples_per_s": None, "loss": None, "peak_gib": None, "error": None}
        with terminal.progress("training"):
            reporter.progress(row, (100, 400))
            reporter.table([row], (100, 400), TimeLeft(70, 3700, 9.6))
        line = "t001       optimizer.lr=0.001: paused in 61 s  rung 1 of 2: 0.25 after 100 samples"
        assert (line in text.getvalue()) != is_terminal
        assert ("recall@1" in text.getvalue()) == is_terminal
        assert ("01:10 elapsed, about 1:01:40 left, budget 00:10" in text.getvalue()) == is_terminal


def test_rungs_budget_and_saved_hours_are_printed():
    settings, rungs = {"optimizer.lr": 1e-3}, [{"samples": 100, "value": 2.0, "elapsed_s": 5.0}]
    trial = build_trial(recipes.load("sample"), "t001", settings)
    row = build_row(trial, TrialOutcome("pruned"), "loss", LINES, rungs=rungs, elapsed_s=5.0)
    assert ("optimizer.lr=0.001: pruned in 5 s  rung 1 of 2: 2 after 100 samples") in trial_line(
        row, (100, 400)
    )
    summary = {
        "status": "budget",
        "goal": "loss",
        "elapsed_s": 61.2,
        "recommendation": select_best([row], "loss"),
    }
    summary |= {"gpu_hours": 0.5, "saved_gpu_hours": 1.5}
    code, text = print_outcome((Path("runs/sample-tune"), summary, [row]))
    assert code == 0 and "1 of 1 trials measured in 61 s; run the same command to resume" in text
    assert "0.5 worker-hours, 1.5 saved by ending trials early" in text
    assert "t001 has held-out loss 2.000" in text and "It has 100 samples only." in text
