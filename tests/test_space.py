"""`--space`: arguments become combinations of typed settings, and invalid ones are refused."""

import pytest

from mmray.config import Batch, Config
from mmray.config.search_space import DEFAULT_SAMPLES, override_settings, setting_value
from mmray.errors import UsageError
from tests.spaces import parse_space


def test_lists_are_crossed_with_the_last_fastest():
    space = parse_space(["batch.micro=8,16", "train.precision=fp32,bf16"])
    expected = [("8", "fp32"), ("8", "bf16"), ("16", "fp32"), ("16", "bf16")]
    assert [tuple(each.values()) for each in space.corners()] == expected and space.num_trials == 4


def test_settings_get_the_types_of_the_config():
    base = Config(batch=Batch(micro=4, global_=64))
    for typed, value in (
        ({"batch.micro": "16"}, 16),
        ({"optimizer.lr": "1e-3"}, 1e-3),
        ({"data.limit": None}, None),
    ):
        (key,) = typed
        changed = override_settings(base, typed)
        assert setting_value(changed, key) == value and type(setting_value(changed, key)) is type(
            value
        )
        assert setting_value(changed, "batch.global") == 64
    betas = parse_space(["optimizer.betas=[0.9, 0.95],[0.9, 0.99]"]).corners()
    assert [override_settings(base, each).optimizer.betas for each in betas] == [
        (0.9, 0.95),
        (0.9, 0.99),
    ]


def test_corners_have_both_ends_of_each_range():
    space = parse_space(["optimizer.lr=loguniform(1e-5,1e-3)", "batch.micro=8,16"])
    assert [tuple(each.values()) for each in space.corners()] == [
        (1e-5, "8"),
        (1e-5, "16"),
        (1e-3, "8"),
        (1e-3, "16"),
    ]
    rate = space.axes["optimizer.lr"]
    assert str(rate) == "loguniform(1e-05, 0.001)" and space.num_trials == DEFAULT_SAMPLES


def test_ranges_with_other_bounds_have_other_names():
    """By which a sweep is resumed."""
    texts = ["uniform(1048576, 2097152)", "uniform(1048580, 2097152)", "uniform(0.1, 0.3)"]
    assert [str(parse_space([f"train.seed={text}"]).axes["train.seed"]) for text in texts] == texts


def test_lists_are_a_grid_unless_a_number_of_samples_or_a_range_is_given():
    assert parse_space(["batch.micro=8,16"]).num_samples is None
    assert parse_space(["batch.micro=8,16"], num_samples=5).num_samples == 5
    assert parse_space(["optimizer.lr=uniform(1,2)"]).num_samples == DEFAULT_SAMPLES


def test_lists_have_no_more_trials_than_combinations():
    lists = ["batch.micro=8,16", "train.precision=fp32,bf16"]
    assert [parse_space(lists, num_samples=count).num_trials for count in (3, 8)] == [3, 4]
    assert parse_space([*lists, "optimizer.lr=uniform(1,2)"], num_samples=8).num_trials == 8


def test_lists_accept_brackets_none_and_hyphens():
    space = parse_space(
        ["optimizer.betas=[0.9,0.98],[0.9,0.95]", "--data.block-mb=8", "evaluate.limit=None,5"]
    )
    assert list(space.axes.values()) == [([0.9, 0.98], [0.9, 0.95]), ("8",), (None, "5")]
    assert list(space.axes) == ["optimizer.betas", "data.block_mb", "evaluate.limit"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("optimizer.lr=loguniform(0,1e-3)", "above 0 for loguniform"),
        ("optimizer.lr=uniform(2,1)", "low < high"),
        ("optimizer.lr=uniform(a,1)", "must be numbers"),
    ],
)
def test_invalid_range_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        parse_space([given], num_samples=3)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("batch.micr", "batch.micr: unknown setting; did you mean `micro`"),
        ("batch", "batch: input should be a valid dictionary"),
        ("batch.micro.x", "batch.micro: input should be a valid integer"),
        ("bach.micro", "bach: unknown setting; did you mean `batch`"),
        ("batch.micro", r"batch.micro: .*integer.*\(got 'many'\)"),
    ],
)
def test_unknown_setting_is_named(key, message):
    with pytest.raises(UsageError, match=message):
        override_settings(Config(), {key: "many"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to search"),
        (["batch.micro"], "write a setting and its values"),
        (["batch.micro=8,,9"], "a value is empty, or listed twice"),
        (["batch.micro=8,8"], "listed twice"),
        (["batch.micro=8", "batch.micro=9"], "given twice"),
        (["train.steps=1,2"], "every trial trains as many samples"),
        (["run.name=a,b"], "belongs to the whole sweep"),
    ],
)
def test_invalid_space_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        parse_space(given)
