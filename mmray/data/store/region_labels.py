"""Names of box labels for models that classify boxes over label texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import UsageError

MAX_LABELS = 20_000  # the text tower embeds the name of each label in every micro-batch


def with_region_labels(
    model: Any, train_sets: Sequence[PreparedSet], eval_sets: Sequence[PreparedSet]
) -> Any:
    """Fill in `model.region_labels`, the names of the box classes, from the sets, unless it is set.

    Args:
        model: The `model` section of the config; returned unchanged if it has no `regions` or has
            `region_labels`.
        train_sets: Sets whose manifests have the names of their box labels.
        eval_sets: Sets that must not name a label differently.

    Returns:
        The section with the name of label n at index n; "" for a number without a name.

    Raises:
        UsageError: The sets have no names, different ones, or a label of MAX_LABELS (20,000) or
            more.
    """
    if not getattr(model, "regions", False) or model.region_labels:
        return model
    labels = _merge_label_names(train_sets)
    address = train_sets[0].folder
    if not labels:
        raise UsageError(
            f"model.region_labels: {address} has no names of its box labels; name labels "
            "0, 1, ... with --model.region-labels"
        )
    last = max(labels)
    if last >= MAX_LABELS:
        raise UsageError(
            f"model.region_labels: {address} has a box label {last} ({labels[last]}); they count "
            f"from 0 and are fewer than {MAX_LABELS:,}: renumber them in the source"
        )
    _merge_label_names([*train_sets, *eval_sets])
    return model.replace(region_labels=tuple(labels.get(label, "") for label in range(last + 1)))


def _merge_label_names(sets: Sequence[PreparedSet]) -> dict[int, str]:
    """Merge the label names of the sets. Raises UsageError if two sets name a label differently."""
    labels: dict[int, str] = {}
    for each in sets:
        for label, name in each.manifest.box_names.items():
            if labels.setdefault(int(label), name) != name:
                raise UsageError(
                    f"model.region_labels: label {label} is `{labels[int(label)]}` in one set and "
                    f"`{name}` in {each.folder}; use the same label numbers in both sources"
                )
    return labels
