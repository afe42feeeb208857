"""mmray trains image-text models on a Ray cluster: `mmray.train("clip", data="prepared/my")`, as
`mmray train` does.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from mmray.version import VERSION as __version__

if TYPE_CHECKING:
    from mmray.api import (
        evaluate,
        export,
        prepare,
        score,
        select,
        show,
        train,
        tune,
    )
    from mmray.config import Config
    from mmray.errors import MmrayError
    from mmray.models.export.load import load
    from mmray.run import Run
    from mmray.training.saved_model import pretrained_config

__all__ = [
    "Config",
    "MmrayError",
    "Run",
    "__version__",
    "evaluate",
    "export",
    "load",
    "prepare",
    "pretrained_config",
    "score",
    "select",
    "show",
    "train",
    "tune",
]
# Modules of the names that are not in mmray.api.
_MODULES = {
    "Config": "config",
    "MmrayError": "errors",
    "Run": "run",
    "load": "models.export.load",
    "pretrained_config": "training.saved_model",
}


# Of torchao and bitsandbytes, which transformers and peft import if they are installed.
logging.getLogger("torch.utils._pytree").addFilter(
    lambda line: "Enum subclass" not in str(line.msg)
)
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda line: "gemm_4bit_forward" not in str(line.msg)
)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because importing torch and Ray takes seconds and `--help`
    does not need them.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'api')}")
    return getattr(module, name)
