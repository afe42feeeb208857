"""The local files of a run that its workers read: prepared sets, original images and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mmray.cluster.shared_storage import LocalInput
from mmray.config import Vlm
from mmray.config.base import Section
from mmray.data.store.mixture import PreparedMixture
from mmray.storage.paths import AnyPath, to_path
from mmray.training.resolve import ResolvedRun


def local_inputs(resolved: ResolvedRun) -> list[LocalInput]:
    """Return the local files and folders that workers of a run read, each once.

    The tokenizer is not among them, because the driver sends its content to the workers.
    """
    cache = to_path(resolved.config.data.cache)
    found: dict[Path, LocalInput] = {}
    for setting, path, on_data_nodes in _inputs(resolved):
        if isinstance(path, Path):
            if isinstance(cache, Path) and path.is_relative_to(cache):
                setting += ", prepared in data.cache"
            found.setdefault(path, LocalInput(setting, path, on_data_nodes))
    return list(found.values())


def _inputs(resolved: ResolvedRun) -> Iterator[tuple[str, AnyPath, bool]]:
    """Yield the setting and path of each input, and whether decode actors read it."""
    train = resolved.train_set
    config = resolved.config
    train_sets = train.sets if isinstance(train, PreparedMixture) else (train,)
    by_setting = {"data.train": train_sets, "data.eval": tuple(resolved.eval_sets.values())}
    for setting, sets in by_setting.items():
        for each in sets:
            yield setting, each.folder, True
            if each.manifest.is_index_only:
                yield f"{setting}, original files", each.image_folder, True
    parts = {f"model.{name}": part for name, part in config.model if isinstance(part, Section)}
    for name, section in {"model": config.model, **parts}.items():
        weights = Path(dict(section).get("weights", ""))
        if weights.is_absolute():  # a section makes local paths absolute
            # Decode processes read the processor in it.
            yield f"{name}.weights", weights, isinstance(config.model, Vlm)
