"""Output and exit code of the command for each outcome of a sweep, without Ray."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mmray import cli
from mmray.cli.console import Terminal
from mmray.cli.tune import _print_outcome, trial_line
from mmray.config import from_yaml, recipes
from mmray.config.search_space import parse_space
from mmray.errors import TrainingError
from mmray.tune.results import TrialOutcome, build_row, select_best
from mmray.tune.trials import build_trial, corner_trials

LINES = [
    {"step": step, "rows_stop": 128 * step, "throughput/samples_per_s": rate, "time/step_s": 0.2, "train/loss": 2.0}
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
        build_row(t, o, "throughput", LINES if o.status == "finished" else [], elapsed_s=9.0)
        for t, o in zip(trials, outcomes, strict=True)
    ]
    best = select_best(rows, "throughput")
    summary = {"status": status, "goal": "throughput", "elapsed_s": 61.2, "recommendation": best}
    return Path("runs/sample-tune"), summary, rows


def print_outcome(sweep):
    text = io.StringIO()
    code = _print_outcome(*sweep, Terminal(Console(file=text, width=80, soft_wrap=True)))
    return code, text.getvalue()


def test_finished_sweep_prints_best_trial_and_next_command():
    code, text = print_outcome(outcome("finished", FINISHED, OOM))
    assert code == 0
    assert "1 of 2 trials measured in 61 s" in text and "t002       out of memory: CUDA out of memory" in text
    assert "t001 has 640 samples/s, the highest of 1 trials." in text
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


def test_print_config_prints_the_base_recipe(capfd):
    words = ["tune", "sample", "--space", "batch.micro=32", "--train.steps", "5", "--print-config"]
    assert cli.run(words, Terminal()) == 0
    assert from_yaml(capfd.readouterr().out, "printed") == recipes.load("sample")


def test_rungs_budget_and_saved_hours_are_printed():
    settings, rungs = {"optimizer.lr": 1e-3}, [{"samples": 100, "value": 2.0, "elapsed_s": 5.0}]
    trial = build_trial(recipes.load("sample"), "t001", settings)
    row = build_row(trial, TrialOutcome("pruned"), "loss", LINES, rungs=rungs, elapsed_s=5.0)
    assert "optimizer.lr=0.001: pruned in 5 s  rung 1 of 2: 2 after 100 samples" in trial_line(row, (100, 400))
    summary = {"status": "budget", "goal": "loss", "elapsed_s": 61.2, "recommendation": select_best([row], "loss")}
    summary |= {"gpu_hours": 0.5, "saved_gpu_hours": 1.5}
    code, text = print_outcome((Path("runs/sample-tune"), summary, [row]))
    assert code == 0 and "run the same command to resume" in text
    assert "0.5 worker-hours, 1.5 saved by ending trials early" in text
    assert "t001 has held-out loss 2.000" in text and "It has 100 samples only." in text
