"""What a head for regions needs of the data, settled before anything starts: names of the labels, and boxes at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError

MOST_LABELS = 20_000  # each is read by the text branch in every micro-batch
LOOKED_AT = 128  # rows of a set


def with_names(model: Any, train_sets: Sequence[PreparedSet], eval_set: PreparedSet | None) -> Any:
    """The `model` section with `region_labels`; those that are not set are the training sets' own.

    Raises UsageError where there are none, or sets mean different things by a label; DataError where no row of a
    sample has a labelled box.
    """
    if not getattr(model, "regions", False):
        return model
    names = model.region_labels or _names(train_sets)
    if eval_set is not None and not model.region_labels:
        _agree([*train_sets, eval_set])
    if not any(_has_boxes(each) for each in train_sets):
        raise DataError(
            f"none of {LOOKED_AT} rows of {train_sets[0].place.address} has a box with a label: prepare a source that "
            "has (COCO's instances, or rows with `boxes` and `box_labels`), or leave --model.regions off"
        )
    return model.replace(region_labels=names)


def _names(sets: Sequence[PreparedSet]) -> tuple[str, ...]:
    """Names by label, empty where a label has none. Raises UsageError."""
    known = _agree(sets)
    if not known:
        raise UsageError(
            f"model.regions: {sets[0].place.address} does not know what its box labels are called; give the names of "
            "labels 0, 1, ... with --model.region-labels"
        )
    if max(known) >= MOST_LABELS:
        raise UsageError(
            f"model.regions: {sets[0].place.address} has a box label {max(known)} ({known[max(known)]}); labels count "
            f"from 0 and are fewer than {MOST_LABELS:,}: number them anew in the source"
        )
    return tuple(known.get(label, "") for label in range(max(known) + 1))


def _agree(sets: Sequence[PreparedSet]) -> dict[int, str]:
    """The names of all sets. Raises UsageError where two of them call a label differently."""
    known: dict[int, str] = {}
    for each in sets:
        for label, name in ((int(label), name) for label, name in each.manifest.box_names.items()):
            if known.setdefault(label, name) != name:
                raise UsageError(
                    f"model.regions: box label {label} is `{known[label]}` in one set and `{name}` in "
                    f"{each.place.address}; number the labels of both alike in their sources"
                )
    return known


def _has_boxes(prepared: PreparedSet) -> bool:
    """Whether some of a sample of rows, spread over the set, has a labelled box."""
    rows = np.unique(np.linspace(0, prepared.num_rows - 1, LOOKED_AT).astype(np.int64))
    return any(_has_box(prepared, row) for row in rows)


def _has_box(prepared: PreparedSet, row: int) -> bool:
    try:
        return bool(prepared.read(np.array([row]))[0].box_labels)
    except (OSError, ValueError):  # a damaged row is named where it is trained on
        return False
