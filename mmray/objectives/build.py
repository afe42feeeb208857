"""From the `objective` section to an objective: a built-in by name, or a user's own by `package.module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from mmray.errors import UsageError
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.protocol import Objective

if TYPE_CHECKING:
    from mmray.config import Objective as Section

BUILT_IN: dict[str, Callable[[], Objective]] = {"contrastive": Contrastive}


def build(section: Section) -> Objective:
    """The objective that `section.kind` names. Raises UsageError."""
    if section.kind in BUILT_IN:
        return BUILT_IN[section.kind]()
    if ":" not in section.kind:
        raise UsageError(
            f"objective.kind: there is no objective `{section.kind}`; "
            f"take one of {', '.join(BUILT_IN)}, or name your own as package.module:Class"
        )
    objective = _load(section.kind)(section)
    missing = [name for name in ("coupled", "shared", "count", "measure") if not hasattr(objective, name)]
    if missing:
        raise UsageError(f"objective.kind: `{section.kind}` has no {', '.join(missing)} (see objectives/protocol.py)")
    return objective


def _load(kind: str) -> type:
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"objective.kind: `{kind}` cannot be loaded: {error}") from error
