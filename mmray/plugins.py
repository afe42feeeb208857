"""A user's own class, named `package.module:Class` in a setting: models, objectives, callbacks."""

from __future__ import annotations

import importlib
from typing import Any

from mmray.errors import UsageError


def load_class(name: str, setting: str, known: tuple[str, ...] = ()) -> Any:
    """The class that `name` means. Raises UsageError naming the setting, and the `known` built-in names."""
    module, _, attribute = name.partition(":")
    if not attribute:
        built_in = f"take one of {', '.join(known)}, or " if known else ""
        raise UsageError(f"{setting}: there is no `{name}`; {built_in}name your own as package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{setting}: `{name}` cannot be loaded: {error}") from error
