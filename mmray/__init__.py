"""mmray trains image-text models on a Ray cluster; `mmray.load(folder)` opens one that was exported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmray.models.export.export import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import `load` when it is asked for: torch costs seconds, and data workers and `--help` do without."""
    if name == "load":
        from mmray.models.export.export import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
