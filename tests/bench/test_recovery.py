"""Figures of a lost worker, from the clock of its steps."""

import pytest

from mmray.bench.recovery import Watching, bench_recovery, recovery
from mmray.config.recipes import load
from mmray.errors import UsageError


def test_recovery_is_from_the_kill_to_the_next_groups_first_step():
    """Killed at 10.0 after step 7; step 8 was on its way; the next group begins after step 5 at 14.0."""
    times = [(9.0, 6), (10.0, 7), (10.1, 8), (14.0, 6), (15.0, 7), (16.0, 8), (17.5, 9)]
    found = recovery(Watching(kill_at=7, killed_s=10.0, steps=times))
    assert found == {"recovery_s": pytest.approx(4.0), "caught_up_s": pytest.approx(7.5)}


def test_a_run_without_a_loss_has_no_figure():
    with pytest.raises(UsageError, match="no worker was lost"):
        recovery(Watching(kill_at=7, killed_s=10.0, steps=[(10.0, 7), (11.0, 8), (12.0, 9)]))


def test_too_few_steps_are_refused_before_anything_starts():
    with pytest.raises(UsageError, match=r"--steps 10 .* at least 24"):
        bench_recovery(load("sample"), 10, 8, 1, lambda _: None)
