"""Rows of trials: metrics from log lines, classification of errors; ranking and recommendation."""

import math

import pytest
import torch

from mmray.engine.batch import BatchShape
from mmray.errors import TrainingError
from mmray.train.recovery import Failure, decide_recovery
from mmray.tune.results import TrialOutcome, figures, one_line, outcome_of, row_of, select_best
from mmray.tune.trials import Trial


def line(step, rate, step_s, loss=1.0, **more):
    rates = {"throughput/samples_per_s": rate, "time/step_s": step_s} if rate else {}
    return {"step": step, "rows_stop": step * 10, "train/loss": loss, "memory/peak_gib": step / 10, **rates, **more}


def test_first_window_and_short_last_window_are_excluded_from_spread():
    lines = [line(4, 1, 10), line(8, 100, 0.1), line(12, 50, 0.2), line(13, 10, 1.0)]
    result = figures(lines)
    # Rows over seconds of 4 steps at 100/s, 4 at 50/s and 1 at 10/s: (40 + 40 + 10) / (0.4 + 0.8 + 1).
    assert result["samples_per_s"] == pytest.approx(90 / 2.2)
    assert (result["samples_per_s_min"], result["samples_per_s_max"]) == (50, 100)
    assert (result["steps"], result["samples"], result["peak_gib"]) == (13, 130, 1.3)


def test_percentiles_use_last_line_and_loss_uses_last_quarter():
    lines = [line(step, 10, 1, loss=float(step)) for step in range(1, 9)]
    lines[-1] |= {"time/step_p50_s": 0.5, "time/step_p95_s": 0.9}
    result = figures(lines)
    assert (result["step_p50_s"], result["step_p95_s"], result["loss"]) == (0.5, 0.9, 7.5)
    assert figures([*lines, line(9, 10, 1, loss=None)])["loss"] is None  # not finite: not averaged away


def test_unmeasured_values_are_none():
    assert set(figures([]).values()) == {None}
    assert figures([line(1, None, None)])["samples_per_s"] is None


class WorkerGroupError(Exception):
    """Like Ray Train's: holds the workers' errors in addition to its message."""

    def __init__(self, failures):
        super().__init__("a worker failed")
        self.worker_failures = failures


def raised_by_policy(error):
    """The exception of a run after an actor boundary, which drops its cause."""
    return decide_recovery(Failure("raised", error, 3), None, 1, 0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("allocation failed"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling cusolverDnCreate"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        TrainingError("a worker died: Task was killed due to the node running low on memory."),
        WorkerGroupError({1: torch.OutOfMemoryError("allocation failed")}),
        raised_by_policy(torch.OutOfMemoryError("allocation failed")),
        TrainingError(str(raised_by_policy(torch.OutOfMemoryError("allocation failed")))),
    ],
)
def test_oom_is_recognised_in_every_form(error):
    assert outcome_of(error).status == "out_of_memory"


def test_worker_killed_for_unknown_reason_is_not_oom():
    said = "The actor died unexpectedly. Potential root causes: (1) SIGKILL by OOM killer due to high memory usage."
    assert outcome_of(TrainingError(said)).status == "failed"


def test_other_errors_are_failures_with_one_line():
    error = TrainingError("KeyError: 'label'\n  at some line")
    assert outcome_of(error, 1.5).status == "failed" and outcome_of(error, 1.5).elapsed_s == 1.5
    assert one_line(error) == "KeyError: 'label'"
    assert one_line(ValueError()) == "ValueError" and len(one_line(ValueError("x" * 1000))) == 240


def row_with(micro, status="finished", auto=False):
    """A row of a trial with micro-batches of 64 rows whose run ended with `micro`."""
    trial = Trial("t001", {"batch.micro": 64}, None, BatchShape(256, 64, 2, 2, auto))
    lines = [line(step, 100, 0.1) | {"batch/micro": 64 if step == 1 else micro} for step in (1, 2, 3)]
    return row_of(trial, TrialOutcome(status, None, 3.0), lines)


def test_trial_with_reduced_micro_batch_is_out_of_memory():
    row = row_with(16)
    assert (row["status"], row["micro"], row["accumulation"]) == ("out_of_memory", 64, 2)
    assert "out of memory at micro-batch 64; the run continued with 16" in row["error"]
    assert row["elapsed_s"] == 3.0 and row["samples_per_s"] == 100
    assert select_best([row], "throughput", relative_to_chance=False) is None


@pytest.mark.parametrize(
    ("micro", "status", "auto", "split"),
    [
        (64, "finished", False, (64, 2)),
        (16, "finished", True, (16, 8)),
        (64, "finished", True, (64, 2)),
        (16, "stopped", False, (64, 2)),  # run again
    ],
)
def test_other_trials_keep_their_status(micro, status, auto, split):
    row = row_with(micro, status, auto)
    assert (row["status"], row["error"], (row["micro"], row["accumulation"])) == (status, None, split)


def row(trial, size, rate, gib=1.0, loss=1.0, recall=0.5, status="finished", spread=0.01):
    row = {"trial": trial, "status": status, "global": size, "peak_gib": gib, "loss": loss, "recall_at_1": recall}
    rates = {"samples_per_s_min": rate * (1 - spread), "samples_per_s_max": rate * (1 + spread)}
    return row | rates | {"samples_per_s": rate}


def test_fastest_is_ranked_per_global_batch_and_overall():
    rows = [row("t001", 64, 100), row("t002", 64, 120), row("t003", 128, 300), row("t004", 128, 200)]
    best = select_best(rows, "throughput", True)
    assert (best["best"], best["per_global"]) == ("t003", {"64": "t002", "128": "t003"})
    assert best["why"] == "t003 has the most samples/s of 4 trials: 300 samples/s."


def test_lower_memory_wins_within_two_percent():
    rows = [row("t001", 64, 100, gib=8), row("t002", 64, 99, gib=4), row("t003", 64, 97, gib=1)]
    best = select_best(rows, "throughput", True)
    assert best["best"] == "t002"
    assert best["why"].startswith(
        "t002 is within 2% of the most samples/s (99 samples/s; t001: 100 samples/s) and uses less memory "
        "(4.00 GiB; t001: 8.00 GiB)."
    )


def test_rival_within_the_spread_is_named():
    rows = [row("t001", 64, 100, spread=0.2), row("t002", 64, 90)]
    assert "90 samples/s is within the range of 80 to 120" in select_best(rows, "throughput", True)["why"]
    assert "may be as fast" not in select_best([row("t001", 64, 100), row("t002", 64, 90)], "throughput", True)["why"]


def test_unfinished_trial_is_never_best():
    rows = [row("t001", 64, 900, status="out_of_memory"), row("t002", 64, 800, status="stopped"), row("t003", 64, 5)]
    assert select_best(rows, "throughput", True)["best"] == "t003"
    assert select_best(rows, "throughput", True)["why"] == "t003 is the only trial that finished: 5 samples/s."
    assert select_best(rows[:2], "throughput", True) is None


def test_unmeasured_goal_has_no_best():
    rows = [row("t001", 64, 10, recall=None), row("t002", 64, 9, recall=0.2)]
    assert select_best(rows, "recall", True)["best"] == "t002"
    assert select_best(rows[:1], "recall", True) is None


def test_contrastive_losses_of_different_global_batches_are_compared_below_chance():
    """2.0 for 64 rows is 2.16 nats below chance; 1.9 for 16 rows, though smaller, is only 0.87 below."""
    rows = [row("t001", 16, 10, loss=1.9), row("t002", 64, 10, loss=2.0), row("t003", 64, 10, loss=2.5)]
    best = select_best(rows, "loss", relative_to_chance=True)
    assert (best["best"], best["per_global"]) == ("t002", {"16": "t001", "64": "t002"})
    assert f"{math.log(64) - 2.0:.2f} nats below chance" in best["why"]
    assert select_best(rows, "loss", relative_to_chance=False)["best"] == "t001"


def test_ties_of_loss_and_memory_are_decided_by_speed():
    rows = [row("t001", 64, 10, loss=2.0), row("t002", 64, 30, loss=2.001), row("t003", 64, 90, loss=2.5)]
    assert select_best(rows, "loss", True)["best"] == "t002"
    rows = [row("t001", 64, 10, gib=1.0), row("t002", 64, 30, gib=1.01), row("t003", 64, 90, gib=4)]
    assert select_best(rows, "memory", True)["best"] == "t002"
