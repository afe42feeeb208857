"""What happens after a failure, without a cluster."""

import pickle

import pytest

from mmray.errors import DataError, OutOfMemoryError, TrainingError
from mmray.train.policy import Fail, Failure, ReduceMicroBatch, Restart, count_failures, decide_recovery

LOST = Failure("lost", RuntimeError("worker died"), step=7)


def raised(error, step=7):
    return Failure("raised", error, step)


def test_a_lost_worker_is_retried_until_the_budget_is_spent():
    assert isinstance(decide_recovery(LOST, None, 1, 2), Restart)
    assert isinstance(decide_recovery(LOST, LOST, 2, 2), Restart)
    verdict = decide_recovery(LOST, LOST, 3, 2)
    assert isinstance(verdict, Fail) and "cluster.max_failures 2" in str(verdict.error)


@pytest.mark.parametrize("kind", ["lost", "hung", "preempted"])
def test_what_is_gone_is_begun_again(kind):
    verdict = decide_recovery(Failure(kind, TrainingError("a node went"), 7), None, 1, 3)
    assert verdict == Restart(f"{kind} after step 7: TrainingError: a node went")


def test_a_users_error_is_retried_once_and_raised_with_its_own_traceback_when_it_comes_back():
    first = raised(KeyError("label"))
    assert isinstance(decide_recovery(first, None, 1, 3), Restart)
    error = KeyError("label")
    error.add_note('Traceback (most recent call last):\n  File "mine.py", line 3, in on_step\n')
    again = decide_recovery(raised(error), first, 2, 3)
    assert isinstance(again, Fail) and "KeyError: 'label'" in str(again.error)
    assert str(again.error).startswith("Traceback") and 'File "mine.py", line 3' in str(again.error)
    assert again.error.__cause__ is error
    assert isinstance(decide_recovery(raised(KeyError("label"), 9), first, 2, 3), Restart)


def test_an_error_before_the_first_step_is_raised_at_once():
    error = ValueError("shape")
    verdict = decide_recovery(Failure("raised", error, step=0, logged=False), None, 1, 3)
    assert isinstance(verdict, Fail) and "before any step" in str(verdict.error)
    assert isinstance(
        decide_recovery(Failure("raised", error, step=0), None, 1, 3), Restart
    )  # an earlier attempt came further


@pytest.mark.parametrize("error", [DataError("17 bad rows"), TrainingError("NaN")])
def test_our_own_errors_are_final_and_keep_their_exit_code(error):
    verdict = decide_recovery(raised(error), None, 1, 3)
    assert isinstance(verdict, Fail) and verdict.error is error


def test_without_memory_an_attempt_begins_again_with_smaller_micro_batches():
    shrink = decide_recovery(Failure("raised", OutOfMemoryError("no room", 8), step=0), None, 9, 0)
    assert shrink == ReduceMicroBatch(8, "no room")
    last = decide_recovery(Failure("raised", OutOfMemoryError("a single row is too many"), step=7), None, 1, 3)
    assert isinstance(last, Fail) and last.error.exit_code == 3
    again = pickle.loads(pickle.dumps(OutOfMemoryError("no room", 8)))  # as it comes from a worker
    assert (str(again), again.micro) == ("no room", 8)


def test_a_run_that_only_fails_ends_and_one_that_moves_on_does_not():
    failures, attempts = 0, 0
    while not isinstance(decide_recovery(LOST, LOST, failures, 3), Fail):
        failures, attempts = count_failures(failures, "lost", progressed=False), attempts + 1
    assert attempts == 4
    assert count_failures(3, "lost", progressed=True) == 1
    assert count_failures(3, "hung", progressed=False) == 4


def test_preemptions_do_not_touch_the_failure_budget():
    assert count_failures(2, "preempted", progressed=False) == 2
    assert isinstance(decide_recovery(Failure("preempted", TrainingError("gone"), 7), None, 3, 3), Restart)
