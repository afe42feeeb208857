"""Parts of the user named `package.module:Name` in a setting, and optional packages."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmray.errors import UsageError


def load_class(name: str, setting: str, known: tuple[str, ...] = ()) -> Any:
    """Import the class or function `package.module:Name` that a setting (for errors) names.

    Raises:
        UsageError: The name has another form, or the class cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        built_in = f"use one of {', '.join(known)}, or " if known else ""
        raise UsageError(f"{setting}: no `{name}`; {built_in}name your own as package.module:Name")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{setting}: cannot load `{name}`: {error}") from error


def merge_metrics(metrics: dict[str, Any], own: dict[str, Any], source: str) -> dict[str, Any]:
    """Return metrics and those of the user, which a function or method (for errors) returned.

    Raises:
        UsageError: Two metrics have one name.
    """
    if repeated := own.keys() & metrics.keys():
        raise UsageError(
            f"{source} returned {', '.join(sorted(repeated))}, which is another metric: rename it"
        )
    return metrics | own


def load_part(name: str, setting: str, table: Mapping[str, str]) -> Any:
    """Import the built-in class of a name in a table, or a user's class. Raises UsageError."""
    return load_class(table.get(name, name), setting, tuple(table))


@cache
def source_digest(part: object) -> str:
    """Return a hash, 16 hex digits, of the file that defines a class or function of the user, as it
    was at the first call: an edit later in the process does not change the imported code.
    """
    file = sys.modules[part.__module__].__file__ or ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


@contextmanager
def packages_hidden(*packages: str) -> Iterator[None]:
    """Scope in which packages that are not imported yet cannot be found."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def check_installed(package: str, setting: str, extra: str) -> None:
    """Raise UsageError if an optional package, which an extra of mmray installs, is missing."""
    if find_spec(package) is None:
        raise UsageError(
            f'{setting}: needs {package}; install it on every node: pip install "mmray[{extra}]"'
        )
