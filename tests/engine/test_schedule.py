"""Learning rates: warmup, peak, decay, floor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mmray.engine.optimizer import lr_at

SECTION = SimpleNamespace(lr=1.0, warmup_steps=4, final_lr_fraction=0.2, schedule="cosine")


def test_rates_at_known_steps():
    rates = [lr_at(step, SECTION, 12) for step in range(13)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[8] == pytest.approx(0.6)  # half way down from 1.0 to 0.2
    assert rates[12] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_schedule_without_warmup_starts_at_the_peak():
    assert lr_at(0, SimpleNamespace(lr=3.0, warmup_steps=0, final_lr_fraction=0.0, schedule="cosine"), 10) == 3.0


@pytest.mark.parametrize("total_steps", [1, 4, 5])
def test_run_shorter_than_warmup_has_positive_rates(total_steps):
    assert all(0 < lr_at(step, SECTION, total_steps) <= 1 for step in range(total_steps))


def test_rate_after_the_end_is_the_floor():
    assert lr_at(40, SECTION, 12) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "half", "last"), [("linear", 0.6, 0.2), ("constant", 1.0, 1.0), ("cooldown", 1.0, 0.2)]
)
def test_other_decay_shapes(schedule, half, last):
    section = SimpleNamespace(**{**vars(SECTION), "schedule": schedule})
    rates = [lr_at(step, section, 12) for step in range(13)]
    assert (rates[4], rates[8], rates[12]) == pytest.approx((1.0, half, last))
    if schedule == "cooldown":
        assert rates[10:12] == pytest.approx([1.0, 0.7])  # it falls in the last fifth of the eight steps
