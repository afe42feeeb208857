"""Suggested settings: types, a grid, random draws and Optuna, without repetition."""

import json
import pickle
from itertools import islice

import pytest

from mmray.config import recipes
from mmray.config.search_space import parse_space, round_sampled
from mmray.tuning.suggestions import build_optuna, distinct_settings, tune_space
from mmray.tuning.trials import parse_values

SAMPLE = recipes.load("sample")


def test_sampled_settings_have_the_types_of_the_config():
    sampled = tune_space(
        SAMPLE, parse_space(["batch.global=uniform(8,16)", "optimizer.lr=loguniform(1e-4,1e-2)"])
    )
    assert all(isinstance(sampled["batch.global"].sample(), int) for _ in range(5))
    assert 1e-4 <= sampled["optimizer.lr"].sample() <= 1e-2


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("batch.micro=loguniform(4,64)", int),
        ("batch.accumulation=uniform(1,4)", int),
        ("evaluate.limit=uniform(8,9)", int),
    ],
)
def test_range_of_a_setting_without_a_number_has_the_type_of_its_numbers(given, kind):
    """The recipe has `auto`, or nothing."""
    base = SAMPLE.replace(batch=SAMPLE.batch.replace(micro="auto"))
    (domain,) = tune_space(base, parse_space([given])).values()
    assert all(isinstance(domain.sample(), kind) for _ in range(5))


def test_no_settings_are_suggested_twice():
    grid = parse_space(["batch.micro=8,16", "train.precision=fp32,bf16"])
    assert list(distinct_settings(SAMPLE, grid, [], 0)) == grid.corners()
    lists = parse_space(["batch.micro=8,16", "train.precision=fp32,bf16"], 100)
    drawn = list(distinct_settings(SAMPLE, lists, [grid.corners()[2]], 0))
    assert drawn[0] == grid.corners()[2] and sorted(map(str, drawn)) == sorted(
        map(str, grid.corners())
    )
    space = parse_space(["optimizer.lr=loguniform(1e-5,1e-1)", "batch.global=uniform(32,34)"], 8)
    several = list(islice(distinct_settings(SAMPLE, space, [], 0), 8))
    # more samples keep the first ones
    assert several[:4] == list(islice(distinct_settings(SAMPLE, space, [], 0), 4))
    assert json.loads(json.dumps(several)) == several
    assert all(each["optimizer.lr"] == float(f"{each['optimizer.lr']:.4g}") for each in several)


@pytest.mark.parametrize("given", ["batch.global=32,64,128", "optimizer.lr=loguniform(1e-4,1e-2)"])
def test_optuna_suggests_no_settings_twice_also_after_a_restart(given):
    pytest.importorskip("optuna")
    space = parse_values(SAMPLE, parse_space([given], 12))
    names, seen = iter("abcdefghijklmnopqrst"), []
    for count in (6, 12):  # the second command repeats the trials of the first
        searcher = build_optuna(SAMPLE, space, seen, num_concurrent=100)
        searcher.set_search_properties("value", "min", tune_space(SAMPLE, space))
        pickle.dumps(searcher)  # as Ray Tune does when it starts
        suggested = []
        while (
            len(suggested) < count
            and (settings := searcher.suggest(name := next(names))) != searcher.FINISHED
        ):
            suggested.append({key: round_sampled(value) for key, value in settings.items()})
            # equal values: TPE has no reason to move
            searcher.on_trial_complete(name, {"value": 1.0})
        assert suggested[: len(seen)] == seen
        seen = suggested
    assert len({str(each) for each in seen}) == len(seen) == (3 if "global" in given else 12)
