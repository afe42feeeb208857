"""Labels of several sets are matched by the names of their classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmray.config import Config, Towers, TwoTower
from mmray.config.model import CustomModel
from mmray.data.store.class_names import match_classes, with_class_names
from mmray.data.store.manifest import write_manifest
from mmray.data.store.mixture import PreparedMixture
from mmray.data.store.prepared_set import UNKNOWN_CLASS, PreparedSet
from mmray.errors import UsageError
from mmray.evaluation.build import describe_code_names
from tests.made import make_set, row

MODEL = Towers(classes=4)
CUSTOM = CustomModel(kind="my.model:Model")


def labeled(folder: Path, names: tuple[str, ...], labels: list[int | None]) -> PreparedSet:
    rows = [replace(row(number), label=label) for number, label in enumerate(labels)]
    write_manifest(folder, replace(make_set(folder, rows).manifest, class_names=names))
    return PreparedSet.open(str(folder))


def labels(prepared: PreparedSet | PreparedMixture) -> list[int | None]:
    return [each.label for each in prepared.read(np.arange(prepared.num_rows))]


@pytest.mark.parametrize("model", [MODEL, CUSTOM])
def test_sets_of_a_mixture_are_matched_by_name(tmp_path: Path, model: Towers | CustomModel) -> None:
    one = labeled(tmp_path / "one", ("ant", "bee", "cat"), [0, 1, 2, None])
    two = labeled(tmp_path / "two", ("bee", "cat", "dog"), [0, 1, 2, -1])
    model = with_class_names(model, [one, two])
    assert model.class_names == ("ant", "bee", "cat", "dog")
    mixture = PreparedMixture([match_classes(model, each) for each in (one, two)], [1, 1])
    assert labels(mixture) == [0, 1, 2, None, 1, 2, 3, -1]
    assert match_classes(model, mixture.sets[0]).stored_labels(np.arange(3)) == [0, 1, 2]
    only = with_class_names(model.replace(class_names=()), [two])
    assert only.class_names == ("bee", "cat", "dog") and match_classes(only, two) is two


def test_classes_of_numbers_are_their_names(tmp_path: Path) -> None:
    folders = labeled(tmp_path / "folders", ("1", "2", "3"), [0, 1, 2])
    numbers = labeled(tmp_path / "numbers", (), [3, 1, None])
    named = with_class_names(MODEL, [folders, numbers])
    assert named.class_names == ("1", "2", "3")
    assert labels(match_classes(named, numbers)) == [2, 0, None]
    assert with_class_names(MODEL, [numbers]) == MODEL
    assert labels(match_classes(MODEL, folders)) == [1, 2, 3]
    assert match_classes(MODEL, numbers) is numbers
    hidden = labeled(tmp_path / "hidden", (), [None] * 1000 + [7])
    assert labels(match_classes(named, hidden))[-1] == UNKNOWN_CLASS
    assert "none of model.class_names (1, 2, 3)" in named.label_problem(UNKNOWN_CLASS)


def test_classes_that_cannot_be_matched_are_refused_with_both_lists(tmp_path: Path) -> None:
    animals = labeled(tmp_path / "animals", ("ant", "bee"), [0, 1])
    model = with_class_names(MODEL, [animals])
    others = labeled(tmp_path / "others", ("bee", "elk"), [0, 1])
    with pytest.raises(UsageError, match=r"others has the classes bee, elk.*ant, bee .*: elk can"):
        match_classes(model, others)
    numbers = labeled(tmp_path / "numbers", (), [0, 5])
    with pytest.raises(UsageError, match=r"numbers has the classes 0, 5, .* are ant, bee "):
        match_classes(model, numbers)
    with pytest.raises(UsageError, match=r"others has the classes bee, elk.* are numbers "):
        match_classes(MODEL, others)
    with pytest.raises(UsageError, match=r"model.classes is 2, .*set --model.classes 3"):
        with_class_names(Towers(classes=2), [animals, others])
    twice = labeled(tmp_path / "twice", ("crane", "crane"), [0, 1])
    assert match_classes(with_class_names(MODEL, [twice]), twice) is twice
    with pytest.raises(UsageError, match="`crane` is the name of two"):
        with_class_names(MODEL, [animals, twice])


def test_models_without_classes_keep_the_labels_of_each_set(tmp_path: Path) -> None:
    animals = labeled(tmp_path / "animals", ("ant", "bee"), [0, 1])
    for model in (Towers(), TwoTower()):
        assert with_class_names(model, [animals]) is model
        assert match_classes(model, animals) is animals
    custom = with_class_names(CUSTOM, [animals])
    others = labeled(tmp_path / "others", ("elk",), [0])
    logs: list[tuple[str, str]] = []
    unmatched = match_classes(custom, others, lambda *line: logs.append(line))
    assert unmatched is others, "it may use no labels"
    ((line, label),) = logs
    assert label == "warning" and "others has the classes elk" in line and "ant, bee" in line


@pytest.mark.parametrize(
    ("names", "is_warned"),
    [
        (("n01440764", "n01443537", "n01484850", "n01491361"), True),
        (("0", "1", "2"), True),
        (("class 1", "class 2"), True),
        (("ant", "bee", "n01440764"), False),
        (("boeing 747", "airbus a380"), False),
        ((), False),
    ],
)
def test_codes_in_prompts_are_named(
    tmp_path: Path, names: tuple[str, ...], is_warned: bool
) -> None:
    sets = {"": labeled(tmp_path / "set", names, [0])}
    warnings = describe_code_names(Config(), sets)
    assert len(warnings) == is_warned
    if is_warned:
        prompts = ", ".join(f"`a photo of a {name}.`" for name in names[:3])
        assert f"classification are {prompts}: name the classes" in warnings[0]
        assert warnings[0].startswith(f"{len(names)} of the {len(names)} class names")
    named = Config().replace(evaluate=Config().evaluate.replace(classes=("ant", "bee")))
    assert describe_code_names(named, sets) == []
