"""What happens after a failure, without a cluster."""

import pytest

from mmray.errors import DataError, TrainingError
from mmray.train.policy import Failure, Raise, Retry, decide

LOST = Failure("lost", RuntimeError("worker died"), step=7)


def test_a_lost_worker_is_retried_until_the_budget_is_spent():
    assert isinstance(decide(LOST, None, attempt=1, max_failures=2), Retry)
    assert isinstance(decide(LOST, LOST, attempt=2, max_failures=2), Retry)
    verdict = decide(LOST, LOST, attempt=3, max_failures=2)
    assert isinstance(verdict, Raise) and "cluster.max_failures 2" in str(verdict.error)


def test_a_users_error_is_retried_once_and_raised_when_it_comes_back():
    first = Failure("raised", KeyError("label"), step=7)
    assert isinstance(decide(first, None, 1, 3), Retry)
    again = decide(Failure("raised", KeyError("label"), step=7), first, 2, 3)
    assert isinstance(again, Raise) and "KeyError: 'label'" in str(again.error)
    assert isinstance(again.error.__cause__, KeyError)
    assert isinstance(decide(Failure("raised", KeyError("label"), step=9), first, 2, 3), Retry)


def test_an_error_before_the_first_step_is_raised_at_once():
    verdict = decide(Failure("raised", ValueError("shape"), step=0), None, 1, 3)
    assert isinstance(verdict, Raise) and "before any step" in str(verdict.error)


@pytest.mark.parametrize("error", [DataError("17 bad rows"), TrainingError("NaN")])
def test_our_own_errors_are_final_and_keep_their_exit_code(error):
    verdict = decide(Failure("raised", error, step=7), None, 1, 3)
    assert isinstance(verdict, Raise) and verdict.error is error
