"""Stand-ins for packages that the engine imports, on a machine that has little more than torch and
transformers.

bench/gpu.py needs the sections of config/ with their defaults, not their validation; the other
packages read files, images and settings of a process, of which a benchmark on synthetic batches
needs almost nothing. tests/bench/test_gpu.py checks that the recipes are the same as with pydantic.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from inspect import get_annotations
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

UNUSED = ("simplejpeg", "tenacity", "tyro")  # only imported


def install() -> list[str]:
    """Install a stand-in for each package that cannot be imported; return their names."""
    missing = []
    for name in (*STAND_INS, *UNUSED):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
            module = _Unused(name)
            # transformers looks at it
            vars(module).update(STAND_INS.get(name, {}), __spec__=ModuleSpec(name, None))
            sys.modules[name] = module
    return missing


class _Unused(ModuleType):
    """A module whose attributes can be imported and called, which returns None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(name)

    def __call__(self, *_: Any, **__: Any) -> None: ...


# --- pydantic: fields with defaults, without validation


class FieldInfo(NamedTuple):
    default: Any = None
    alias: str | None = None


def field(default: Any = None, alias: str | None = None, **_: Any) -> FieldInfo:
    return FieldInfo(default, alias)


def unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """A decorator that returns its function."""
    return lambda function: function


class BaseModel:
    """A section: attributes from keyword arguments and defaults."""

    model_fields: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls) -> None:
        names = [
            name
            for name, annotation in get_annotations(cls).items()
            if "ClassVar" not in str(annotation)
        ]
        defaults = {name: vars(cls).get(name) for name in names}
        own = {
            name: value if isinstance(value, FieldInfo) else FieldInfo(value)
            for name, value in defaults.items()
        }
        fields: dict[str, FieldInfo] = {}
        for base in reversed(cls.__mro__[1:]):
            fields |= vars(base).get("model_fields", {})
        cls.model_fields = fields | own

    def __init__(self, **values: Any) -> None:
        for name, info in self.model_fields.items():
            vars(self)[name] = values.pop(name, values.pop(info.alias or name, info.default))
        if values:
            raise TypeError(f"{type(self).__name__} has no settings {', '.join(values)}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self).items()

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


# --- psutil: memory of the machine and of this process, from /proc


def virtual_memory() -> SimpleNamespace:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines}
    total, available = sizes["MemTotal:"], sizes["MemAvailable:"]
    return SimpleNamespace(total=total, available=available, used=total - available)


class Process:
    def memory_info(self) -> SimpleNamespace:
        pages = [
            int(word) * os.sysconf("SC_PAGE_SIZE")
            for word in Path("/proc/self/statm").read_text().split()
        ]
        return SimpleNamespace(rss=pages[1], shared=pages[2])


STAND_INS: dict[str, dict[str, Any]] = {
    "pydantic": {
        "BaseModel": BaseModel,
        "ConfigDict": dict,
        "Field": field,
        "PositiveFloat": float,
        "ValidationError": ValueError,
        "field_validator": unchanged,
        "model_validator": unchanged,
    },
    "psutil": {
        "Process": Process,
        "cpu_percent": lambda: math.nan,
        "virtual_memory": virtual_memory,
        # ranks are on one machine
        "net_if_addrs": lambda: {"lo": [SimpleNamespace(address="127.0.0.1")]},
    },
    "orjson": {"dumps": lambda value, **_: json.dumps(value).encode(), "loads": json.loads},
}
