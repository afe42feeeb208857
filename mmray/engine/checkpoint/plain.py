"""What may be stored at rest: tensors and plain values that are read without pickle. For checkpoint.py."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def require_plain(value: Any, where: str) -> None:
    """Raise TypeError where a value would need pickle to be stored, with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            require_plain(key, f"a key of {where}")
            require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_plain(item, f"{where}[{index}]")
    # Exact types: numpy's numbers are subclasses of Python's, and need pickle.
    elif not isinstance(value, Tensor) and type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint holds tensors and plain values only")


def strict_json(value: Any) -> Any:
    """The value with NaN and infinity, which JSON lacks, as null."""
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
