"""mmray trains image-text models on a Ray cluster; `mmray.load(folder)` loads an exported model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmray.models.export.load import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import `load` on first use: importing torch takes seconds, and `--help` does not need it."""
    if name == "load":
        from mmray.models.export.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
