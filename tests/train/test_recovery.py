"""Decisions after a failed attempt, as pure functions."""

import pickle

import pytest

from mmray.errors import DataError, OutOfMemoryError, TrainingError
from mmray.train.supervisor import Fail, Failure, ReduceMicroBatch, Restart, count_failures, decide_recovery

LOST = Failure("lost", RuntimeError("worker died"), step=7)


def raised(error, step=7):
    return Failure("raised", error, step)


def test_lost_worker_is_retried_up_to_max_failures():
    assert isinstance(decide_recovery(LOST, None, 1, 2), Restart)
    assert isinstance(decide_recovery(LOST, LOST, 2, 2), Restart)
    verdict = decide_recovery(LOST, LOST, 3, 2)
    assert isinstance(verdict, Fail) and "cluster.max_failures 2" in str(verdict.error)


@pytest.mark.parametrize("kind", ["lost", "hung", "preempted"])
def test_lost_hung_and_preempted_restart(kind):
    verdict = decide_recovery(Failure(kind, TrainingError("a node went"), 7), None, 1, 3)
    assert verdict == Restart(f"{kind} after step 7: TrainingError: a node went")


def test_repeated_user_error_is_raised_with_its_traceback():
    first = raised(KeyError("label"))
    assert isinstance(decide_recovery(first, None, 1, 3), Restart)
    error = KeyError("label")
    error.add_note('Traceback (most recent call last):\n  File "mine.py", line 3, in on_step\n')
    again = decide_recovery(raised(error), first, 2, 3)
    assert isinstance(again, Fail) and "KeyError: 'label'" in str(again.error)
    assert str(again.error).startswith("Traceback") and 'File "mine.py", line 3' in str(again.error)
    assert again.error.__cause__ is error
    assert isinstance(decide_recovery(raised(KeyError("label"), 9), first, 2, 3), Restart)


def test_error_before_first_step_is_raised():
    error = ValueError("shape")
    verdict = decide_recovery(Failure("raised", error, step=0, logged=False), None, 1, 3)
    assert isinstance(verdict, Fail) and "before the first logged step" in str(verdict.error)
    assert isinstance(
        decide_recovery(Failure("raised", error, step=0), None, 1, 3), Restart
    )  # an earlier attempt logged a step


@pytest.mark.parametrize("error", [DataError("17 bad rows"), TrainingError("NaN")])
def test_mmray_errors_are_final(error):
    verdict = decide_recovery(raised(error), None, 1, 3)
    assert isinstance(verdict, Fail) and verdict.error is error


def test_oom_restarts_with_smaller_micro_batches():
    shrink = decide_recovery(Failure("raised", OutOfMemoryError("out of memory", 8), step=0), None, 9, 0)
    assert shrink == ReduceMicroBatch(8, "out of memory")
    last = decide_recovery(Failure("raised", OutOfMemoryError("a single row is too many"), step=7), None, 1, 3)
    assert isinstance(last, Fail) and last.error.exit_code == 3
    again = pickle.loads(pickle.dumps(OutOfMemoryError("out of memory", 8)))  # as it comes from a worker
    assert (str(again), again.micro) == ("out of memory", 8)


def test_failures_are_counted_since_last_checkpoint():
    failures, attempts = 0, 0
    while not isinstance(decide_recovery(LOST, LOST, failures, 3), Fail):
        failures, attempts = count_failures(failures, "lost", progressed=False), attempts + 1
    assert attempts == 4
    assert count_failures(3, "lost", progressed=True) == 1
    assert count_failures(3, "hung", progressed=False) == 4


def test_preemptions_are_not_failures():
    assert count_failures(2, "preempted", progressed=False) == 2
    assert isinstance(decide_recovery(Failure("preempted", TrainingError("gone"), 7), None, 3, 3), Restart)
