"""The settings that explain the results of a sweep are found, and chance is not taken for an
influence.
"""

import math

import numpy as np
import pytest

from mmray.report.importance import explain, importance

SPACE = {
    "optimizer.betas": [[0.9, 0.98], [0.9, 0.999]],
    "data.flip": [True, False],
    "model.kind": ["a", "b", "c"],
}


def sample(rng, num_trials):
    """Settings of random trials, of which only the learning rate is a number."""
    return [
        {"optimizer.lr": 10 ** rng.uniform(-4, -2)}
        | {name: values[rng.integers(len(values))] for name, values in SPACE.items()}
        for _ in range(num_trials)
    ]


def test_optimum_inside_a_range_is_important():
    rng = np.random.default_rng(1)
    trials = sample(rng, 24)
    losses = [
        1 + (math.log10(each["optimizer.lr"]) + 3) ** 2 + 0.05 * rng.normal() for each in trials
    ]
    first, *others = found = importance(trials, losses)
    assert first.setting == "optimizer.lr" and first.share > 0.5 and first.p < 0.001
    assert {each.setting for each in others} == set(SPACE)
    assert "optimizer.lr explains" in explain(found, 24) and ("No other setting") in explain(
        found, 24
    )


@pytest.mark.parametrize("num_trials", [8, 12, 32])
def test_chance_alone_is_rarely_important(num_trials):
    rng = np.random.default_rng(num_trials)
    texts = [
        explain(importance(sample(rng, num_trials), rng.normal(size=num_trials)), num_trials)
        for _ in range(60)
    ]
    assert sum("better than chance" in text for text in texts) >= 54  # 57 expected


def test_value_that_is_a_list_can_be_important():
    settings = [{"optimizer.betas": SPACE["optimizer.betas"][number % 2]} for number in range(10)]
    (found,) = importance(settings, [number % 2 + number / 100 for number in range(10)])
    assert found.share > 0.7 and found.p < 0.05


@pytest.mark.parametrize("results", [[], [1.0], list(range(7)), [0.0] * 8])
def test_few_trials_and_equal_results_have_no_importance(results):
    assert (
        importance([{"optimizer.lr": 10.0**-number} for number in range(len(results))], results)
        == []
    )


def test_trials_that_diverged_are_the_worst():
    settings = [{"optimizer.lr": 10.0**-number} for number in range(8)]
    (found,) = importance(settings, [math.inf] * 4 + [0.0, 1.0, 2.0, 3.0])
    assert found.share > 0.7 and found.p < 0.05
    assert importance([{"optimizer.lr": 0.1}] * 8, range(8)) == []
