"""Names of classes, by which the labels of several sets are matched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.row_columns import is_integer
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Model

_NUM_CHECKED_ROWS = 1000  # of a set whose classes have no names
_NUM_SHOWN_NAMES = 20


@runtime_checkable
class HasClassNames(Protocol):
    """A section `model` whose model may use labels."""

    class_names: tuple[str, ...]

    def replace(self, **settings: object) -> Any:
        """Return a copy with other settings."""


@runtime_checkable
class HasClasses(Protocol):
    """A section `model` with a classification head."""

    classes: int


def with_class_names(model: Model, train_sets: Sequence[PreparedSet]) -> Model:
    """Fill in `model.class_names`, the names of the labels 0, 1, ..., from the sets, unless it is
    set; without effect on a model that uses no labels.

    Classes of several sets are joined by name, in the order in which the sets have them.

    Raises:
        UsageError: The model has too few classes, or different sets have a name twice.
    """
    if not _uses_labels(model) or model.class_names:
        return model
    names = {each.manifest.class_names: each for each in train_sets if each.manifest.class_names}
    for theirs, prepared in names.items() if len(names) > 1 else ():
        _check_distinct(theirs, prepared)
    class_names: tuple[str, ...] = tuple(dict.fromkeys(chain(*names)))
    if len(names) == 1:
        (class_names,) = names
    num_classes = model.classes if isinstance(model, HasClasses) else len(class_names)
    if len(class_names) > num_classes:
        folders = ", ".join(str(each.folder) for each in names.values())
        raise UsageError(
            f"model.classes is {num_classes}, and the classes of {folders} are "
            f"{_format_names(class_names)}: set --model.classes {len(class_names)}"
        )
    return model.replace(class_names=class_names)


def match_classes(
    model: Model, prepared: PreparedSet, log: Callable[[str, str], None] = lambda _, __: None
) -> PreparedSet:
    """Return a set whose labels are those of the classes of a run with the same names.

    A class without a name has its number as its name, as folders `0`, `1`, ... have it.

    Args:
        model: The `model` section of the run, with `class_names`.
        prepared: A set of the run, or one to evaluate it on.
        log: Called with (warning, label) if a model of the user's own, which may use no labels,
            gets them as the set numbers them.

    Raises:
        UsageError: The set has classes that the run does not have, and the model has a
            classification head.
    """
    own = prepared.manifest.class_names
    if not _uses_labels(model) or own == model.class_names:
        return prepared
    names = dict(enumerate(own))
    if not own:
        rows = np.arange(min(_NUM_CHECKED_ROWS, prepared.num_rows))
        labels = {label for label in prepared.stored_labels(rows) if label is not None}
        names = {label: str(label) for label in labels if label >= 0}
    if model.class_names:
        of_run = {name: number for number, name in enumerate(model.class_names)}
    else:
        of_run = {name: int(name) for name in names.values() if is_integer(name)}
    lacking = [name for name in names.values() if name not in of_run]
    if lacking:
        problem = (
            f"{prepared.folder} has the classes {_format_names(list(names.values()))}, and those "
            f"of the run are {_format_names(model.class_names) or 'numbers'} (model.class_names): "
            f"{_format_names(lacking)} cannot be matched by name"
        )
        if isinstance(model, HasClasses):
            raise UsageError(f"{problem}. Prepare the set with the same names")
        log(
            f"{problem}, so its labels stay as it numbers them. If the model uses labels, name the "
            "classes of all sets in --model.class-names",
            "warning",
        )
        return prepared
    if not own:  # also for the rows that were not checked
        numbers = {int(name): number for name, number in of_run.items() if is_integer(name)}
        return prepared.with_label_numbers(numbers)
    for each in (own, model.class_names):
        _check_distinct(each, prepared)
    return prepared.with_label_numbers({label: of_run[name] for label, name in names.items()})


def _uses_labels(model: Model) -> TypeGuard[HasClassNames]:
    uses_none = isinstance(model, HasClasses) and model.classes == 0
    return isinstance(model, HasClassNames) and not uses_none


def _check_distinct(names: Sequence[str], prepared: PreparedSet) -> None:
    """Raise UsageError if two classes have the same name, and so cannot be matched."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            f"the classes of {prepared.folder} are matched with those of other sets by name, and "
            f"`{twice}` is the name of two: rename one in the source"
        )


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN_NAMES:,} more" if len(names) > _NUM_SHOWN_NAMES else ""
    return ", ".join(names[:_NUM_SHOWN_NAMES]) + more
