"""mmray trains image-text models on a Ray cluster: `mmray.train("clip", data="prepared/my")`, as `mmray train` does."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmray.api import Run, evaluate, export, prepare, train, tune
    from mmray.config import Config
    from mmray.errors import MmrayError
    from mmray.models.export.load import load

__all__ = ["Config", "MmrayError", "Run", "evaluate", "export", "load", "prepare", "train", "tune"]
_MODULES = {"Config": "config", "MmrayError": "errors", "load": "models.export.load"}  # of the others: api


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing torch and Ray takes seconds, and `--help` does not need them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("evaluate", "train", "tune"):
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'api')}"), name)


class CallablePackage(ModuleType):
    """A package that is called as the function of its name in mmray.api.

    Python sets the attribute `train` of `mmray` to the package mmray.train when it is imported, so a function of this
    name would be replaced. A package sets its class as Python's data model describes (customizing module attributes).
    """

    @property
    def __wrapped__(self) -> Any:  # inspect.signature and notebooks show the signature of the function
        return getattr(importlib.import_module("mmray.api"), self.__name__.rpartition(".")[2])

    def __reduce__(self) -> Any:  # pickled by name, as Ray's cloudpickle does with modules of the usual class
        return importlib.import_module, (self.__name__,)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.__wrapped__(*args, **settings)
