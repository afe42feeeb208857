"""Measurements of batch shapes in earlier sweeps, for `mmray tune --reuse`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from mmray.config import Config
from mmray.report.listing import MAX_PARALLEL
from mmray.report.run import read_json
from mmray.storage.paths import AnyPath
from mmray.sweep_files import SWEEP
from mmray.tuning.shape import Measurements

# Settings of these sections that do not change the time or memory of a synthetic step. Others are
# part of the key.
WITHOUT_EFFECT: dict[str, str] = {
    "model": "",
    "objective": "",
    "optimizer": "lr final_lr_fraction warmup_steps weight_decay betas eps schedule lr_multipliers",
    "train": "steps samples epochs seed log_every checkpoint_every keep_checkpoints ema profile "
    "callbacks",
    "cluster": "address data_label train_label wait_for_nodes max_failures start_timeout_s "
    "hang_timeout_s",
}
PACKAGES = ("mmray", "torch", "torchvision", "transformers")
MEMORY_CHANGE = 1.25  # ratio of the memory of a worker, above which shapes are measured again


def measurement_key(config: Config) -> dict[str, Any]:
    """Return what time and memory of a step depend on, except hardware and shape."""
    settings = config.model_dump(mode="json", by_alias=True)
    sections = {
        section: {
            name: value for name, value in settings[section].items() if name not in names.split()
        }
        for section, names in WITHOUT_EFFECT.items()
    }
    return {**sections, "packages": {name: version(name) for name in PACKAGES}}


def earlier_measurements(storage: AnyPath) -> list[tuple[dict[str, Any], Measurements]]:
    """Return all measurements of the sweeps in `storage` with their keys, the newest sweep
    first.
    """
    folders = list(storage.iterdir()) if storage.is_dir() else []
    with ThreadPoolExecutor(MAX_PARALLEL) as threads:
        sweeps = sorted(
            filter(None, threads.map(_read_probes, folders)),
            key=lambda sweep: sweep[0],
            reverse=True,
        )
    return [
        (probe.get("key", {}), Measurements.from_json(probe | {"source": str(folder)}))
        for _, folder, probes in sweeps
        for probe in probes
    ]


def _read_probes(folder: AnyPath) -> tuple[float, AnyPath, list[dict[str, Any]]] | None:
    """Return when sweep.json was written, the folder and its probes;

    None without any. Most folders are of runs.
    """
    probes = read_json(folder / SWEEP).get("probes")
    return ((folder / SWEEP).stat().st_mtime, folder, probes) if probes else None


def is_reusable(
    earlier: Measurements, global_rows: Sequence[int], hardware: Sequence[str], limit_gib: float
) -> bool:
    """Return True if `earlier` measured these global batches on the same hardware with about as
    much memory.
    """
    ratio = limit_gib / earlier.limit_gib
    same_memory = 1 / MEMORY_CHANGE <= ratio <= MEMORY_CHANGE
    return (
        set(global_rows) <= set(earlier.global_rows)
        and list(hardware) == earlier.hardware
        and same_memory
    )
