"""Rates, stalls, ratios and bottleneck from arrivals."""

import pytest

from mmray.bench import timing
from mmray.bench.timing import Arrival


def arrivals(every_s, rows=10, count=12, first_s=0.0, epochs=None):
    epochs = epochs or [0] * count
    return [Arrival(first_s + number * every_s, rows, epochs[number]) for number in range(count)]


def test_rate_excludes_warmup_arrivals():
    burst = [Arrival(0.0, 1000), Arrival(0.001, 1000), *arrivals(0.5, first_s=0.002)]
    assert timing.rate([burst]) == pytest.approx(20)
    assert timing.rate([arrivals(0.5), arrivals(0.25)]) == pytest.approx(20 + 40)
    assert timing.rate([arrivals(0.5, count=2)]) == pytest.approx(20)  # too few arrivals to exclude any
    assert timing.rate([arrivals(0.5, count=1)]) == 0


def test_epoch_stall_is_the_extra_wait_at_an_epoch_start():
    stalled = [Arrival(at_s, 1, epoch) for at_s, epoch in [(0, 0), (1, 0), (2, 0), (3, 0), (5, 1), (6, 1), (8, 2)]]
    assert timing.epoch_stall_s([stalled]) == pytest.approx(1.0)
    assert timing.epoch_stall_s([arrivals(1.0)]) is None
    assert timing.epoch_stall_s([arrivals(1.0, epochs=[0] * 6 + [1] * 6)]) == 0


def test_ratios_pair_arms_within_a_round():
    rounds = [{"a": 10.0, "b": 5.0}, {"a": 30.0, "b": 10.0}, {"a": 4.0, "b": 4.0}, {"a": 7.0, "b": 0.0}]
    found = timing.ratios(rounds, {"a_vs_b": ("a", "b"), "a_vs_c": ("a", "c")})
    assert found == {"a_vs_b": {"median": 2.0, "min": 1.0, "max": 3.0, "pairs": 3}}


def test_arms_alternate_direction_each_round():
    assert [timing.order("abc", turn) for turn in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_bottleneck_is_the_slowest_stage_or_the_stream():
    limits = {"reading": 900.0, "decoding": 400.0}
    assert timing.bottleneck(limits, 380.0) == "decoding"
    assert "stream itself" in timing.bottleneck(limits, 200.0)
    assert timing.workers_for(2000, 600, workers=2) == 7
