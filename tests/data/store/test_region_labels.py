"""Labels of a region head are resolved, or refused, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mmray.config import ClipInputs, Towers
from mmray.data.store.manifest import write_manifest
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.region_labels import match_classes, with_region_labels
from mmray.engine.bad_rows import quarantine_bad_rows
from mmray.errors import DataError, UsageError
from tests.made import make_set, row

MODEL = Towers(inputs=ClipInputs(max_boxes=4, clip_s=0))


def named(folder: Path, names: dict[str, str], boxed: bool = True) -> PreparedSet:
    """A set of three rows, the last with a box, with these names of box labels."""
    box = {"boxes": [[0.0, 0.0, 1.0, 1.0]], "box_labels": [1]} if boxed else {}
    made = make_set(folder, [row(0), row(1), replace(row(2), **box)])
    write_manifest(folder, replace(made.manifest, box_names=names))
    return PreparedSet.open(str(folder))


def test_region_labels_default_to_names_of_the_sets(tmp_path: Path) -> None:
    one, two = (
        named(tmp_path / "one", {"1": "cat"}),
        named(tmp_path / "two", {"1": "cat", "4": "dog"}, boxed=False),
    )
    assert with_region_labels(MODEL, [one, two], []).region_labels == ("", "cat", "", "", "dog")
    given = MODEL.model_copy(update={"region_labels": ("sky", "sea")})
    assert with_region_labels(given, [one], [two]).region_labels == ("sky", "sea")
    plain = Towers()
    assert with_region_labels(plain, [one], []) is plain


def test_a_set_that_swaps_the_labels_of_a_run_is_refused(tmp_path: Path) -> None:
    run = MODEL.model_copy(update={"region_labels": ("", "cat", "dog")})
    synonyms = named(tmp_path / "same", {"1": "cat", "2": "puppy", "3": "elk"})
    assert match_classes(run, synonyms) is synonyms
    words = named(tmp_path / "words", {"c": "cat"}, boxed=False)
    assert match_classes(run, words) is words
    with pytest.raises(UsageError, match="other: box label 1 is `dog`, which is label 2 of model"):
        match_classes(run, named(tmp_path / "other", {"1": "dog", "2": "cat"}))


def test_missing_or_contradicting_labels_are_errors(tmp_path: Path) -> None:
    one = named(tmp_path / "one", {"1": "cat"})
    with pytest.raises(UsageError, match=r"label 1 is `cat` in one set and `dog` in .*/other"):
        with_region_labels(MODEL, [one], [named(tmp_path / "other", {"1": "dog"})])
    with pytest.raises(UsageError, match=r"with --model\.region-labels$"):
        with_region_labels(MODEL, [named(tmp_path / "nameless", {})], [])
    with pytest.raises(UsageError, match=r"a box label 90000 \(far\)"):
        with_region_labels(MODEL, [named(tmp_path / "far", {"90000": "far"})], [])


@pytest.mark.parametrize(
    ("labels", "bad"), [([0, -1], 0), ([1, 3], 3), ([-2], -2), ([1, -1], None)]
)
def test_box_label_without_name_ends_the_run(
    labels: list[int], bad: int | None, tmp_path: Path
) -> None:
    block = {
        "label": np.array([-1]),
        "box_labels": np.array([labels]),
        "valid": np.array([True]),
        "pos": np.array([0]),
    }
    model = Towers(inputs=ClipInputs(max_boxes=4, clip_s=0), region_labels=("", "cat"))
    config = SimpleNamespace(model=model, data=SimpleNamespace(train="made"))
    plan = SimpleNamespace(row_ids_at=lambda positions: positions)
    passing = quarantine_bad_rows([block], config, tmp_path, None, None, plan, lambda _: 0)  # type: ignore[arg-type]
    if bad is None:
        assert list(passing) == [block]
    else:
        with pytest.raises(
            DataError,
            match=f"made has a box with label {bad}, which has no name in model.region_labels",
        ):
            list(passing)
