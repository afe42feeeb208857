"""Metrics of a row from log lines, and classification of its error."""

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
    found = figures(lines)
    # Rows over seconds of 4 steps at 100/s, 4 at 50/s and 1 at 10/s: (40 + 40 + 10) / (0.4 + 0.8 + 1).
    assert found["samples_per_s"] == pytest.approx(90 / 2.2)
    assert (found["samples_per_s_min"], found["samples_per_s_max"]) == (50, 100)
    assert (found["steps"], found["samples"], found["peak_gib"]) == (13, 130, 1.3)


def test_percentiles_use_last_line_and_loss_uses_last_quarter():
    lines = [line(step, 10, 1, loss=float(step)) for step in range(1, 9)]
    lines[-1] |= {"time/step_p50_s": 0.5, "time/step_p95_s": 0.9}
    found = figures(lines)
    assert (found["step_p50_s"], found["step_p95_s"], found["loss"]) == (0.5, 0.9, 7.5)
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


def row_with(found, status="finished", auto=False):
    """A row of a trial with micro-batches of 64 rows whose run ended with `found`."""
    trial = Trial("t001", {"batch.micro": 64}, None, BatchShape(256, 64, 2, 2, auto))
    lines = [line(step, 100, 0.1) | {"batch/micro": 64 if step == 1 else found} for step in (1, 2, 3)]
    return row_of(trial, TrialOutcome(status, None, 3.0), lines, None)


def test_trial_with_reduced_micro_batch_is_out_of_memory():
    row = row_with(16)
    assert (row["status"], row["micro"], row["accumulation"]) == ("out_of_memory", 64, 2)
    assert "out of memory at micro-batch 64; the run continued with 16" in row["error"]
    assert row["elapsed_s"] == 3.0 and row["samples_per_s"] == 100
    assert select_best([row], "throughput", relative_to_chance=False) is None


@pytest.mark.parametrize(("found", "auto", "cut"), [(64, False, (64, 2)), (16, True, (16, 8)), (64, True, (64, 2))])
def test_trial_with_requested_micro_batch_is_finished(found, auto, cut):
    row = row_with(found, auto=auto)
    assert (row["status"], row["error"], (row["micro"], row["accumulation"])) == ("finished", None, cut)


def test_stopped_trial_is_rerun():
    assert row_with(16, "stopped")["status"] == "stopped"
