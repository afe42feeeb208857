"""Settings: saved and read back the same, typos answered with the nearest name, bad values with their setting."""

import pytest
from pydantic import ValidationError

from mmray import recipes
from mmray.config import Batch, Config, from_yaml, to_yaml
from mmray.errors import UsageError
from mmray.train.continuation import forbidden_changes


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_yaml_reads_back_equal(name):
    config = recipes.load(name)
    assert from_yaml(to_yaml(config), "here") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch: {micro: 0}", r"run.yaml: batch.micro: .*greater than or equal to 1 \(got 0\)"),
        ("batch: {micr: 3}", "batch.micr: there is no such setting; did you mean `micro`"),
        ("bach: {micro: 3}", "bach: there is no such setting; did you mean `batch`"),
        ("train: {steps: 3, epochs: 2}", r"train: give one of steps, samples, epochs \(got steps, epochs\)"),
        ("model: {inputs: {std: [0, 1, 1]}}", "model.inputs: std must be above 0"),
        ("model: {inputs: {image_side: big}}", r"model.inputs.image_side: .*integer.*\(got 'big'\)"),
        ("data: {workers: 0}", "data: workers must be `auto` or at least 1"),
        ("run: {name: '../x'}", "run.name: .*pattern"),
        ("- 1", "run.yaml holds no settings"),
        ("a: [", "run.yaml is not YAML"),
    ],
)
def test_bad_settings_are_named(text, message):
    with pytest.raises(UsageError, match=message):
        from_yaml(text, "run.yaml")


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Config().batch.micro = 3  # type: ignore[misc]


def test_unknown_recipe_answers_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean `sample`"):
        recipes.load("sampel")
    with pytest.raises(UsageError, match=r"cannot read the recipe nowhere.yaml"):
        recipes.load("nowhere.yaml")


def test_a_continuation_may_change_the_cut_but_not_the_rows():
    before = Config(batch=Batch(micro=4, global_=16)).model_dump(mode="json", by_alias=True)
    recut = Config(batch=Batch(micro=2, global_=16)).model_dump(mode="json", by_alias=True)
    other = Config(batch=Batch(micro=4, global_=32)).model_dump(mode="json", by_alias=True)
    assert forbidden_changes(before, recut) == []
    assert forbidden_changes(before, other) == ["batch.global: 16 -> 32"]
