"""Output and exit code of the command for each outcome of a sweep, without Ray."""

import io

import pytest
from rich.console import Console

from mmray.cli.console import Terminal
from mmray.cli.tune import _print_outcome, trial_line, trials_table
from mmray.config import from_yaml, recipes
from mmray.config.search_space import parse_space
from mmray.errors import TrainingError
from mmray.tune.results import TrialOutcome, row_of, select_best
from mmray.tune.search import SweepOutcome
from mmray.tune.trials import trials_of

LINES = [
    {"step": step, "rows_stop": 128 * step, "throughput/samples_per_s": rate, "time/step_s": 0.2, "train/loss": 2.0}
    | {"time/step_p50_s": 0.19, "time/step_p95_s": 0.25, "memory/peak_gib": 0.5}
    for step, rate in ((2, 100), (4, 500), (6, 700))
]


@pytest.fixture
def outcome(tmp_path):
    """Make the outcome of two trials with these statuses."""

    def make(status, *ends):
        trials = trials_of(recipes.load("sample"), parse_space(["batch.micro=32,64"]))
        rows = [row_of(t, e, LINES if e.status == "finished" else [], None) for t, e in zip(trials, ends, strict=True)]
        found = select_best(rows, "throughput", True)
        summary = {"status": status, "goal": "throughput", "elapsed_s": 61.2, "recommendation": found}
        return SweepOutcome(tmp_path / "sample-tune", summary, rows)

    return make


def said(outcome, width=80):
    text = io.StringIO()
    code = _print_outcome(outcome, Terminal(Console(file=text, width=width, soft_wrap=True)))
    return code, text.getvalue()


def test_finished_sweep_prints_best_trial_and_next_command(outcome):
    oom = TrialOutcome("out_of_memory", "CUDA out of memory", 3.0)
    code, text = said(outcome("finished", TrialOutcome("finished", None, 9.0), oom))
    assert code == 0
    assert "1 of 2 trials measured in 61 s" in text and "t002       out of memory: CUDA out of memory" in text
    assert "t001 is the only trial that finished: 600 samples/s." in text
    assert "mmray train " in text and "sample-tune/best.yaml" in text


def test_stopped_sweep_exits_with_130_and_prints_best_so_far(outcome):
    code, text = said(outcome("stopped", TrialOutcome("finished", None, 9.0), TrialOutcome("stopped")))
    assert code == 130 and "run the same command to resume" in text and "best.yaml" in text
    code, text = said(outcome("stopped", TrialOutcome("stopped"), TrialOutcome("stopped")))
    assert code == 130 and "best.yaml" not in text


def test_sweep_without_measured_trial_prints_each_reason(outcome):
    failed = outcome(
        "failed", TrialOutcome("failed", "KeyError: 'label'"), TrialOutcome("out_of_memory", "CUDA out of memory")
    )
    with pytest.raises(TrainingError) as caught:
        said(failed)
    assert caught.value.exit_code == 3
    assert "t001 failed: KeyError: 'label'" in str(caught.value)
    assert "t002 out of memory: CUDA out of memory" in str(caught.value)


def test_trials_without_goal_metric_are_an_error(outcome):
    blind = outcome("finished", TrialOutcome("finished", None, 9.0), TrialOutcome("finished", None, 9.0))
    blind.summary.update(goal="loss", recommendation=None)
    with pytest.raises(TrainingError, match="no trial reported a finite loss"):
        said(blind)


def test_table_fits_eighty_columns(outcome):
    rows = outcome("finished", TrialOutcome("finished", None, 9.0), TrialOutcome("finished", None, 9.0)).rows
    text = io.StringIO()
    Console(file=text, width=80).print(trials_table(rows, "throughput", select_best(rows, "throughput", True)))
    line = next(line for line in text.getvalue().splitlines() if line.startswith("t001*"))
    assert "32x2x2" in line and "600 (500-700)" in line and "190/250" in line and line.rstrip().endswith("finished")
    assert trial_line(rows[0]) == "batch.micro=32: finished in 9 s  600 (500-700) samples/s  loss 2.000  0.50 GiB"


def test_print_config_prints_the_base_recipe(capfd):
    from mmray import cli

    code = cli.run(["tune", "sample", "--space", "batch.micro=32", "--train.steps", "5", "--print-config"], Terminal())
    assert code == 0 and from_yaml(capfd.readouterr().out, "printed") == recipes.load("sample")
