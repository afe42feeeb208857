"""`--space`: lists are crossed, ranges drawn from the seed, errors reported."""

import pytest

from mmray.config.search_space import Range, parse_space
from mmray.errors import UsageError


def test_lists_are_crossed_with_the_last_fastest():
    space = parse_space(["batch.micro=8,16", "--batch.accumulation=1,2"])
    assert space.combinations() == [
        {"batch.micro": "8", "batch.accumulation": "1"},
        {"batch.micro": "8", "batch.accumulation": "2"},
        {"batch.micro": "16", "batch.accumulation": "1"},
        {"batch.micro": "16", "batch.accumulation": "2"},
    ]


def test_lists_accept_brackets_none_and_hyphens():
    space = parse_space(["optimizer.betas=[0.9,0.98],[0.9,0.95]", "data.block-mb=8", "evaluate.limit=None,5"])
    assert space.axes == {
        "optimizer.betas": ([0.9, 0.98], [0.9, 0.95]),
        "data.block_mb": ("8",),
        "evaluate.limit": (None, "5"),
    }


def test_seeded_ranges_stay_in_bounds_and_cross_with_lists():
    given = ["optimizer.lr=loguniform(1e-5,1e-3)", "batch.micro=8,16"]
    combinations = parse_space(given, samples=50, seed=3).combinations()
    rates = [one["optimizer.lr"] for one in combinations]
    assert len(combinations) == 100 and rates[0::2] == rates[1::2] and len(set(rates)) == 50
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    assert 15 <= sum(rate < 1e-4 for rate in rates[::2]) <= 35  # half of the range in the logarithm
    assert combinations == parse_space(given, samples=50, seed=3).combinations()
    assert rates != [one["optimizer.lr"] for one in parse_space(given, samples=50, seed=4).combinations()]
    assert parse_space(["optimizer.weight_decay=uniform(0, 0.2)"], 1).axes["optimizer.weight_decay"] == Range(
        0, 0.2, False
    )


@pytest.mark.parametrize(
    ("given", "samples", "said"),
    [
        ([], None, "nothing to search"),
        (["batch.micro"], None, "write a setting and its values"),
        (["batch.micro="], None, "write a setting and its values"),
        (["batch.micro=8,"], None, "a value is empty"),
        (["batch.micro=8,8"], None, "listed twice"),
        (["batch.micro=8", "batch.micro=16"], None, "given twice"),
        (["train.steps=10,20"], None, "a sweep has one length: --train.steps N"),
        (["run.name=a,b"], None, "belongs to the whole sweep"),
        (["optimizer.lr=loguniform(1e-5,1e-3)"], None, "--samples N"),
        (["batch.micro=8"], 3, "--samples N"),
        (["optimizer.lr=loguniform(0,1e-3)"], 3, "loguniform from above 0"),
        (["optimizer.lr=uniform(2,1)"], 3, "from a smaller to a larger"),
        (["optimizer.lr=uniform(a,1)"], 3, "not numbers"),
    ],
)
def test_invalid_space_is_reported(given, samples, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        parse_space(given, samples)
