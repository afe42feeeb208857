"""Suggested settings: types, a grid, random draws and starting points."""

import json

import pytest

from mmray.config import recipes
from mmray.tuning.suggestions import random_settings, starting_points, tune_space
from mmray.tuning.trials import typed_space
from tests.spaces import parse_space

SAMPLE = recipes.load("sample")


def space_of(*given, samples=None):
    return typed_space(SAMPLE, parse_space(given, samples))


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
        ("optimizer.clip_norm=uniform(1,5)", float),
    ],
)
def test_range_has_the_type_of_its_setting_whatever_the_recipe_has(given, kind):
    """The recipe has `auto`, nothing, or a number."""
    base = SAMPLE.replace(batch=SAMPLE.batch.replace(micro="auto"))
    (domain,) = tune_space(base, parse_space([given])).values()
    assert all(isinstance(domain.sample(), kind) for _ in range(5))


def test_lists_are_a_grid_of_which_samples_are_a_part():
    lists = ("batch.global=64,128,256", "train.precision=fp32,bf16")
    grid = space_of(*lists)
    assert random_settings(SAMPLE, grid) == grid.corners()
    part = random_settings(SAMPLE, space_of(*lists, samples=4))
    own = {"batch.global": 128, "train.precision": SAMPLE.train.precision}
    assert len(part) == 4 and all(settings in grid.corners() for settings in part)
    assert part[0] == own or own not in grid.corners()
    assert len({str(settings) for settings in part}) == 4
    every = random_settings(SAMPLE, space_of(*lists, samples=100))
    assert sorted(map(str, every)) == sorted(map(str, grid.corners()))


def test_more_samples_keep_the_random_ones_which_are_json_data_with_four_digits():
    ranges = ("optimizer.lr=loguniform(1e-5,1e-1)", "train.seed=uniform(1,1000)")
    few = random_settings(SAMPLE, space_of(*ranges, samples=4))
    many = random_settings(SAMPLE, space_of(*ranges, samples=8))
    assert (len(few), len(many)) == (4, 8)
    assert [each for each in few if each in many] == few
    assert json.loads(json.dumps(many)) == many
    assert all(each["optimizer.lr"] == float(f"{each['optimizer.lr']:.4g}") for each in many)


def test_starting_points_scale_the_rate_with_the_global_batch():
    axes = ("optimizer.lr=loguniform(1e-5,1e-1)", "batch.global=32,128,512")
    points = starting_points(SAMPLE, space_of(*axes, samples=24))
    assert points[0] == {"optimizer.lr": 2e-3, "batch.global": 128}
    rates = {(point["batch.global"], point["optimizer.lr"]) for point in points[1:]}
    assert rates == {(512, 4e-3), (32, 1e-3), (512, 8e-3), (32, 5e-4)}
    # A grid has them all.
    assert starting_points(SAMPLE, space_of("batch.global=32,128")) == []
    narrow = space_of("optimizer.lr=loguniform(5e-3,1e-1)", samples=24)
    assert starting_points(SAMPLE, narrow) == []  # The recipe's own rate is outside.
    assert len(starting_points(SAMPLE, space_of(*axes, samples=4))) == 2
