"""Output and exit code of the command for each outcome of a sweep, without Ray."""

import io
import re

import pytest
from rich.console import Console

from mmray import cli
from mmray.config import from_yaml, recipes
from mmray.console.reporter import ConsoleReporter
from mmray.console.sweep import trial_line
from mmray.errors import TrainingError
from mmray.report.sweep import SweepRecord
from mmray.sweep_files import Rung, TrialRow
from mmray.tuning.results import recommend_trial


def trial(name, status, *values, **changes):
    """A row with these values at rungs of 100, 400 and 1600 samples."""
    rungs = tuple(Rung(100 * 4**number, value) for number, value in enumerate(values))
    return TrialRow(name, status, {"optimizer.lr": 1e-3}, rungs=rungs, elapsed_s=61.0, **changes)


FINISHED = trial("t001", "finished", 2.0, samples_per_s=640.0, peak_gib=0.5)
OOM = trial("t002", "out_of_memory", error="CUDA out of memory")
STOPPED = trial("t001", "stopped")


@pytest.fixture
def printed(monkeypatch, tmp_path, capfd):
    """Run the command with a search that ends with given rows; return exit code and output."""

    def run(status, *rows):
        best = recommend_trial(rows, "loss")
        summary = {
            "status": status,
            "goal": "loss",
            "elapsed_s": 61.2,
            "recommendation": best and best._asdict(),
        }
        sweep = SweepRecord(tmp_path / "runs" / "sample-tune", summary, list(rows))
        monkeypatch.setattr("mmray.tuning.search.search", lambda request, reporter: sweep)
        text = io.StringIO()
        console = ConsoleReporter(Console(file=text, width=80, soft_wrap=True))
        code = cli.run(["tune", "sample", "--goal", "loss"], console)
        return code, text.getvalue() + " ".join(capfd.readouterr().err.split())

    return run


def test_finished_sweep_prints_best_trial_and_next_command(printed):
    code, text = printed("finished", FINISHED, OOM)
    assert code == 0
    assert "1 of 2 trials measured in 61 s" in text
    assert "t002       out of memory: CUDA out of memory" in text
    assert "t001 has 2 held-out loss; no other trial was trained" in text
    assert "t001*" in text and "mmray train " in text and "sample-tune/best.yaml" in text


def test_stopped_sweep_exits_with_130_and_prints_best_so_far(printed):
    code, text = printed("stopped", FINISHED, STOPPED)
    assert code == 130 and "run the same command to resume" in text and "best.yaml" in text
    code, text = printed("stopped", STOPPED)
    assert code == 130 and "best.yaml" not in text
    assert printed("budget", FINISHED)[0] == 0


def test_sweep_without_ranked_trial_is_an_error_with_each_reason(printed):
    code, text = printed("failed", trial("t001", "failed", error="KeyError: 'label'"), OOM)
    assert code == TrainingError.exit_code
    assert "t001 failed: KeyError: 'label'" in text
    assert "t002 out of memory: CUDA out of memory" in text
    assert "no trial reported a finite loss" in printed("failed", trial("t001", "pruned"))[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "optimizer.betas=[0.9,0.98"], "a list must end with `]`"),
        (["--space", "batch.micro=8,16"], "--goal loss depends on the global batch"),
        (
            ["--goal", "throughput", "--budget", "2h", "--concurrency", "2"],
            "--budget, --concurrency: no effect on --goal throughput without --space",
        ),
        (["--goal", "throughput", "--samples", "3"], "--samples: no effect on --goal"),
    ],
)
def test_search_that_cannot_run_is_a_usage_error(words, message, capsys, tmp_path):
    defaults = ["--goal", "loss", "--run.storage", str(tmp_path)]
    assert (
        cli.run(["tune", "sample", *defaults, *words], ConsoleReporter(Console(file=io.StringIO())))
        == 2
    )
    assert message in " ".join(capsys.readouterr().err.split())


def test_recipe_that_is_not_utf8_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_bytes("recipe: sämple".encode("latin-1"))
    assert cli.run(["tune", str(tmp_path / "mine.yaml"), "--goal", "loss"], ConsoleReporter()) == 2
    assert "mine.yaml is not valid YAML in UTF-8" in " ".join(capsys.readouterr().err.split())


def test_print_config_prints_the_base_recipe(capfd):
    words = ["tune", "sample", "--space", "batch.micro=32", "--train.steps", "5", "--print-config"]
    assert cli.run(words, ConsoleReporter()) == 0
    assert from_yaml(capfd.readouterr().out, "printed") == recipes.load("sample")


def test_line_of_a_trial_has_settings_rung_speed_and_reason():
    line = trial_line(FINISHED, num_rungs=2)
    assert line == (
        "optimizer.lr=0.001: finished in 61 s  rung 1 of 2: 2 after 100 samples  640 samples/s  "
        "0.50 GiB"
    )
    assert trial_line(OOM, 2) == "optimizer.lr=0.001: out of memory in 61 s  CUDA out of memory"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_each_rung_and_end_of_a_trial_is_a_line(is_terminal):
    text = io.StringIO()
    reporter = ConsoleReporter(Console(file=text, width=100, force_terminal=is_terminal))
    with reporter.show_progress("training"):
        reporter.trial(trial("t001", "paused", 0.25), num_rungs=2)
        reporter.trial(OOM, num_rungs=2)
    line = "t001       optimizer.lr=0.001: paused in 61 s  rung 1 of 2: 0.25 after 100 samples"
    assert line in re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())
    assert "CUDA out of memory" in text.getvalue()
