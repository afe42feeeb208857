"""JSON files of a model, such as config.json, in its folder or on the Hugging Face hub.

Without torch and transformers, because data processes read them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmray.errors import UsageError, first_line


def read_weights_json(setting: str, weights: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object in the first of some files that a model has; {} if it has none.

    Args:
        weights: Folder of the model, or its name on the Hugging Face hub, from which a file is
            downloaded unless it is in the cache.

    Raises:
        UsageError: The hub cannot be reached or has no such model, or the file is not a JSON
            object.
    """
    folder = Path(weights).expanduser()
    for name in names:
        path = folder / name if folder.is_dir() else _file_of_hub(setting, weights, name)
        if path is None or not path.is_file():
            continue
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")).items())
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"{setting}: {path} is not a JSON object: {error}") from None
    return {}


def _file_of_hub(setting: str, weights: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        path = try_to_load_from_cache(weights, name)
        if path is None:
            path = hf_hub_download(weights, name)
    except (EntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        is_unreachable = isinstance(error, LocalEntryNotFoundError)
        if isinstance(error, EntryNotFoundError) and not is_unreachable:
            return None
        raise UsageError(
            f"{setting}: cannot read {name} of `{weights}`: {first_line(error).rstrip('.')}. Set a "
            "folder saved by transformers, or a name of the hub; without a network, run "
            f"`hf download {weights} --local-dir DIR` elsewhere and set {setting} to DIR"
        ) from None
    # The cache has an object for a file that the hub does not have.
    return Path(path) if isinstance(path, str) else None
