"""From the `objective` section to an objective: a built-in by name, or a user's own by `package.module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mmray import plug
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
    objective = plug.load(section.kind, "objective.kind", tuple(BUILT_IN))(section)
    missing = [name for name in ("coupled", "shared", "count", "measure") if not hasattr(objective, name)]
    if missing:
        raise UsageError(f"objective.kind: `{section.kind}` has no {', '.join(missing)} (see objectives/protocol.py)")
    return objective
