"""Measurements are reused on equal hardware with about as much memory, and survive a JSON file."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmray.config import recipes
from mmray.storage.paths import AnyPath
from mmray.tuning import reuse
from mmray.tuning.reuse import is_reusable, measurement_key
from mmray.tuning.shape import FailedShape, Measurements, Sample

FOUND = Measurements(
    2,
    10.0,
    0.5,
    [Sample(4, 1, 0.1, 0.01, 2.0)],
    too_large=8,
    reason="out of memory",
    sync_s={2: 0.01},
    failed={64: (8, "out of memory")},
    pairs={32: [{4: 0.1}]},
    peak_gib={32: {4: 2.0}},
    hardware=["H100", "H100"],
    global_rows=[32, 64],
    source="runs/a",
    failed_shapes=[FailedShape(2, 8, "out of memory")],
)


def test_measurements_survive_json():
    assert (
        Measurements.from_json(json.loads(json.dumps(FOUND.to_json())) | {"settings": {}}) == FOUND
    )


def test_sweeps_of_a_storage_are_read_in_parallel_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, time_s in (("a", 1), ("b", 3), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").write_text(
            json.dumps({"probes": [{"key": {"of": name}, **FOUND.to_json()}]})
        )
        os.utime(tmp_path / name / "sweep.json", (time_s, time_s))
    (tmp_path / "run").mkdir()
    (tmp_path / "file").touch()
    together = threading.Barrier(5, timeout=20)

    def read_json(file: AnyPath) -> dict[str, Any]:
        together.wait()  # until all five entries are read at the same time
        return read(file)

    read = reuse.read_json
    monkeypatch.setattr(reuse, "read_json", read_json)
    found = reuse.earlier_measurements(tmp_path)
    assert [(key["of"], Path(each.source).name) for key, each in found] == [
        (name, name) for name in "bca"
    ]
    assert reuse.earlier_measurements(tmp_path / "missing") == []


def test_other_hardware_memory_or_global_batches_are_measured():
    assert is_reusable(FOUND, [32], ["H100", "H100"], 9.0)
    assert not is_reusable(FOUND, [32, 128], ["H100", "H100"], 10.0)
    assert not is_reusable(FOUND, [32], ["H100", "A100"], 10.0)
    assert not is_reusable(FOUND, [32], ["H100"], 10.0)
    assert not is_reusable(FOUND, [32], ["H100", "H100"], 5.0)
    assert not is_reusable(replace(FOUND, limit_gib=5.0), [32], ["H100", "H100"], 10.0)


def test_key_has_what_changes_a_step():
    base = recipes.load("sample")
    key = measurement_key(base)
    assert measurement_key(base.replace(optimizer=base.optimizer.replace(lr=0.5))) == key
    for changed in (
        base.replace(optimizer=base.optimizer.replace(kind="lion")),
        base.replace(train=base.train.replace(precision="bf16")),
        base.replace(model=base.model.replace(embed_dim=64)),
        base.with_cluster(cpus_per_worker=1),
    ):
        assert measurement_key(changed) != key
