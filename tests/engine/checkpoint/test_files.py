"""Checkpoints load bitwise, and an incomplete or damaged one is never used."""

from __future__ import annotations

import json
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmray.engine.checkpoint import files, state_io
from mmray.errors import StorageError, TrainingError
from mmray.storage import requests
from mmray.storage.paths import to_path
from mmray.storage.ranges import RangeReader
from tests.checkpoints import save_checkpoint

METRIC = "evaluate/recall_at_1/mean"
SHARD = "shard-1-of-1.safetensors"
FILES = ["SHA256SUMS", "meta.json", SHARD, "state.json"]


def save(folder: Any, step: int, **metrics: float) -> Any:
    state = {"model": {"w": torch.full((5,), float(step))}, "progress": {"step": step}}
    return save_checkpoint(folder, step, state, {"rows_consumed": 8 * step, "metrics": metrics})


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_tied_and_transposed_weights_are_stored(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    weights = {"a": weight, "b": weight, "c": weight.T, "d/e.%": weight[:1], "f": torch.tensor(7)}
    assert equal(
        state_io.load_weights(save_checkpoint(tmp_path, 1, {"model": weights}, {})), weights
    )


def test_meta_is_strict_json_and_checksums_match_sha256sum(tmp_path: Path) -> None:
    path = save(tmp_path, 7, loss=float("nan"), other=float("inf"))
    meta = json.loads(
        (path / "meta.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert (meta["step"], meta["rows_consumed"], meta["metrics"]) == (
        7,
        56,
        {"loss": None, "other": None},
    )
    assert meta["versions"]["torch"] == torch.__version__
    checked = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True
    )
    assert checked.returncode == 0 and checked.stdout.count("OK") == 3, checked.stderr


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [flip_bit, truncate, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_is_quarantined_and_the_one_before_used(
    tmp_path: Path, name: str, damage: Any
) -> None:
    save(tmp_path, 10)
    damage(save(tmp_path, 20) / name)
    logged: list[str] = []
    # A reader next to a training renames nothing.
    assert (
        files.latest_valid_checkpoint(tmp_path, rename=False) == tmp_path / "step-10"
        and (tmp_path / "step-20").exists()
    )
    assert files.latest_valid_checkpoint(tmp_path, logged.append) == tmp_path / "step-10"
    assert len(logged) == 1 and "step-20" in logged[0]
    # a wrong checksum is reported like a damaged file
    assert name in logged[0] or name == "SHA256SUMS"
    unfinished = damage is Path.unlink and name == "SHA256SUMS"
    assert (tmp_path / "step-20.damaged").exists() != unfinished
    assert files.latest_valid_checkpoint(tmp_path, logged.append) == tmp_path / "step-10"
    assert len(logged) == 1 + unfinished  # a quarantined checkpoint is logged once


def test_trusted_checkpoints_need_only_be_complete(tmp_path: Path) -> None:
    """A worker that was lost while it wrote left an incomplete one; older ones may be of another
    command.
    """
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    flip_bit(tmp_path / "step-2" / SHARD)
    assert files.latest_valid_checkpoint(tmp_path, trusted_from=2) == tmp_path / "step-4"
    (tmp_path / "step-4" / "SHA256SUMS").unlink()
    (tmp_path / "step-3" / SHARD).unlink()
    assert files.latest_valid_checkpoint(tmp_path, trusted_from=2) == tmp_path / "step-2"
    assert files.latest_valid_checkpoint(tmp_path, trusted_from=3) == tmp_path / "step-1"


def test_files_are_verified_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sha256, together = save(tmp_path, 1), files.sha256, threading.Barrier(len(FILES) - 1)
    monkeypatch.setattr(files, "sha256", lambda file: (together.wait(60), sha256(file))[1])
    assert files.verify(path) is None


def test_kill_at_any_write_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt each disk write in turn: the new checkpoint is valid only after the last one."""

    class Killed(BaseException):
        pass

    fsync, remaining = files.fsync, [100]

    def fsync_or_die(path: Path) -> None:
        if remaining[0] == 0:
            raise Killed
        remaining[0] -= 1
        fsync(path)

    monkeypatch.setattr(files, "fsync", fsync_or_die)
    monkeypatch.setattr(state_io, "fsync", fsync_or_die)
    save(tmp_path, 1)
    syncs = 100 - remaining[0]
    assert syncs >= 6
    for allowed in range(syncs - 2):  # the last two follow the rename
        remaining[0] = allowed
        with pytest.raises(Killed):
            save(tmp_path, 2)
        assert files.latest_valid_checkpoint(tmp_path) == tmp_path / "step-1"


@contextmanager
def max_file_size(num_bytes: int) -> Iterator[None]:
    """Make writes beyond this size fail with EFBIG, which takes the code paths of ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        max_file_size(20_000),
        pytest.raises(TrainingError, match=r"step-2: .*[Tt]oo large.*GiB free") as raised,
    ):
        save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(50_000)}}, {})
    assert raised.value.exit_code == 3
    assert not (tmp_path / "step-2").exists()
    assert files.latest_valid_checkpoint(tmp_path) == tmp_path / "step-1"


def test_read_error_does_not_quarantine_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "sha256", fail)
    with pytest.raises(TrainingError, match="Input/output error"):
        files.latest_valid_checkpoint(tmp_path)
    assert path.exists()


def test_storage_errors_of_loading_differ_from_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)
    (path / files.META).write_text("damaged")
    for name in (files.META, "missing.json"):
        with pytest.raises(TrainingError) as raised:
            files.read_json(path / name)
        assert not isinstance(raised.value, StorageError)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(RangeReader, "read", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        state_io.load(path)


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    assert files.latest_valid_checkpoint(tmp_path / "missing") is None
    for step, score in [(1, 0.2), (2, 0.9), (3, 0.5), (4, float("nan")), (9, 0.4), (10, 0.3)]:
        save(tmp_path, step, **{METRIC: score})
    (tmp_path / "step-11").mkdir()  # unfinished
    assert files.latest_valid_checkpoint(tmp_path) == tmp_path / "step-10"
    assert files.best_checkpoint(tmp_path, METRIC) == tmp_path / "step-2"
    files.prune(tmp_path, keep=2, metric=METRIC)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2", "step-9"]
    files.prune(tmp_path, keep=1, metric="evaluate/missing")
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_failing_storage_costs_no_best_checkpoint(tmp_path: Path) -> None:
    for step, score in ((1, 0.9), (2, 0.5), (3, 0.2)):
        save(tmp_path, step, **{METRIC: score})
    meta = tmp_path / "step-1" / "meta.json"
    meta.unlink()
    meta.mkdir()  # reading it fails, and the file is not missing
    with pytest.raises(StorageError, match=r"cannot read .*step-1"):
        files.prune(tmp_path, keep=1, metric=METRIC)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "step-3"}


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("evaluate/loss", (1.0, 2.0), 1),
        ("evaluate/median_rank/image_to_text", (1.0, 2.0), 1),
        (METRIC, (1.0, 2.0), 2),
        (METRIC, (1.0, 1.0), 2),  # the newest of equals
    ],
)
def test_best_is_lowest_loss_or_rank(
    tmp_path: Path, metric: str, values: tuple[float, float], expected: int
) -> None:
    for step, value in zip((1, 2), values, strict=True):
        save(tmp_path, step, **{metric: value})
    assert files.best_checkpoint(tmp_path, metric) == tmp_path / f"step-{expected}"


def test_damaged_evaluation_costs_only_its_own_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        save(checkpoints, step)
    lines = [{"step": 1, METRIC: 0.4}, {"step": 2, METRIC: 0.6}, {"step": 3, METRIC: 0.8}]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / files.EVALUATIONS).write_text(text[:-5])  # the writer was killed
    assert files.best_checkpoint(checkpoints, METRIC) == checkpoints / "step-2"


@pytest.fixture
def store(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(requests, "ATTEMPTS", 1)
    return s3


def test_object_store_keeps_checkpoints_like_a_disk(store: Any) -> None:
    folder = to_path(store.address) / "checkpoints"
    assert files.latest_valid_checkpoint(folder) is None and files.latest_complete_step(folder) == 0
    for step, recall in ((3, 0.5), (6, 0.9), (9, 0.1), (12, 0.2)):
        save(folder, step, recall=recall)
        files.prune(folder, 2, "recall")
    assert files.list_checkpoint_names(folder) == ["step-6", "step-9", "step-12"]
    latest = files.latest_valid_checkpoint(folder)
    assert files.step_of(latest) == 12 and files.load_meta(latest)["metrics"] == {"recall": 0.2}
    loaded = state_io.load(latest)
    assert torch.equal(loaded["model"]["w"], torch.full((5,), 12.0)) and loaded["progress"] == {
        "step": 12
    }


def test_damaged_objects_are_quarantined_without_local_copies(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, logged = to_path(store.address) / "checkpoints", []
    monkeypatch.setattr(
        files, "local_copy", lambda _: pytest.fail("a checkpoint may not fit on the disk")
    )
    for step in (1, 2, 3, 4):
        save(folder, step)
    (folder / "step-4" / files.SUMS).unlink()  # killed before its last object
    (folder / "step-3" / SHARD).write_bytes(b"cut short")
    (folder / "step-2" / files.STATE).unlink()
    assert files.step_of(files.latest_valid_checkpoint(folder, logged.append)) == 1
    assert "it is incomplete" in logged[0] and "does not match its checksum (9 bytes)" in logged[1]
    assert "state.json is missing; it is renamed to step-2.damaged" in logged[2]
    assert files.list_checkpoint_names(folder) == [
        "step-1",
        "step-2.damaged",
        "step-3.damaged",
        "step-4",
    ]
    save(folder, 3)
    assert files.step_of(files.latest_valid_checkpoint(folder)) == 3
