"""Which settings a continuation of a run may change: those that alter neither its rows nor the arithmetic of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAY_CHANGE = (
    "recipe",
    "batch.micro",
    "batch.accumulation",
    "cluster",
    "run",
    "prepare",
    "data.workers",
    "data.block_mb",
    "data.cache",
    "data.keep_mb",
    "data.local_cache",
    "data.local_cache_gb",
    "data.max_bad_rows",
    "data.eval",
    "data.eval_split",
    "evaluate",
    "train.steps",
    "train.samples",
    "train.epochs",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.callbacks",
    "train.profile",
    "train.parallel",
    "train.bucket_mb",
    "train.gradient_views",
    "train.refit_every",
    "train.recompute",
)

# What runs did that are older than these settings.
BEFORE = {"data.chunk": 1, "data.window": 1, "model.inputs.language_token": ""}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as {`section.field`: value}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return flat


def forbidden_changes(
    before: dict[str, Any], after: dict[str, Any], may_change: Sequence[str] = MAY_CHANGE
) -> list[str]:
    """Lines `setting: old -> new` for every difference that would make a continuation another run.

    `may_change` names the settings, and whole sections, that are free.
    """
    old, new = BEFORE | flatten(before), flatten(after)
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not _is_in(name, may_change)
    ]


def _is_in(name: str, settings: Sequence[str]) -> bool:
    """Whether this setting is named there, or a section that it is in."""
    return any(name == each or name.startswith(f"{each}.") for each in settings)
