"""Checkpoints load bitwise, and an incomplete or damaged one is never used."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmray.engine.checkpoint import files, state_io
from mmray.errors import StorageError, TrainingError, UsageError
from mmray.storage import storage
from mmray.storage.paths import to_path

METRIC = "evaluate/recall_at_1/mean"
SHARD = "shard-1-of-1.safetensors"
FILES = ["SHA256SUMS", "meta.json", SHARD, "state.json"]


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    for _ in range(steps):
        take_step(model, optimizer)
    return model, optimizer


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def put(folder: Any, step: int, **metrics: float) -> Any:
    meta = {"rows_consumed": 8 * step, "metrics": metrics}
    state = {"model": {"w": torch.full((5,), float(step))}, "progress": {"step": step}}
    return state_io.save(folder, step, state, meta)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_state_loads_bitwise(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": state_io.optimizer_state(model, optimizer), "scaler": {}}
    path = state_io.save(tmp_path / "checkpoints", 3, state | {"progress": {"step": 3, "skipped": 0}}, {})
    twin, twin_optimizer = trained(steps=0)
    loaded = state_io.load(path, state_io.targets(twin))
    assert equal(twin.state_dict(), model.state_dict())  # loaded without a copy
    state_io.load_optimizer_state(twin, twin_optimizer, loaded["optimizer"])
    assert loaded["progress"] == {"step": 3, "skipped": 0}
    for _ in range(5):
        take_step(model, optimizer)
        take_step(twin, twin_optimizer)
    assert equal(model.state_dict(), twin.state_dict())


def test_tied_and_transposed_weights_are_stored(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    weights = {"a": weight, "b": weight, "c": weight.T, "d/e.%": weight[:1], "f": torch.tensor(7)}
    assert equal(state_io.load_weights(state_io.save(tmp_path, 1, {"model": weights}, {})), weights)


@pytest.mark.parametrize("value", [np.float64(1.0), {1, 2}, Path("x"), np.zeros(2)])
def test_state_that_needs_pickle_is_refused_by_key(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['progress'\]\[1\]"):
        state_io.save(tmp_path, 1, {"progress": [0, value]}, {})
    assert files.latest_valid(tmp_path) is None


def test_meta_is_strict_json(tmp_path: Path) -> None:
    path = put(tmp_path, 7, loss=float("nan"), other=float("inf"))
    meta = json.loads((path / "meta.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert meta["step"] == 7
    assert meta["rows_consumed"] == 56
    assert meta["metrics"] == {"loss": None, "other": None}
    assert meta["versions"]["torch"] == torch.__version__


def test_checksums_match_sha256sum(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    checked = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("OK") == 3


def test_latest_is_by_number(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        put(tmp_path, step)
    assert files.latest_valid(tmp_path) == tmp_path / "step-100"
    assert files.latest_valid(tmp_path / "missing") is None


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [flip_bit, truncate, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_is_quarantined_and_the_one_before_used(tmp_path: Path, name: str, damage: Any) -> None:
    put(tmp_path, 10)
    damage(put(tmp_path, 20) / name)
    logged: list[str] = []
    assert files.latest_valid(tmp_path, logged.append) == tmp_path / "step-10"
    assert len(logged) == 1
    assert "step-20" in logged[0]
    assert name in logged[0] or name == "SHA256SUMS"  # a wrong checksum is reported like a damaged file
    unfinished = damage is Path.unlink and name == "SHA256SUMS"
    assert (tmp_path / "step-20.damaged").exists() != unfinished
    assert files.latest_valid(tmp_path, logged.append) == tmp_path / "step-10"
    assert len(logged) == 1 + unfinished  # a quarantined checkpoint is logged once


def test_reader_next_to_a_training_renames_nothing(tmp_path: Path) -> None:
    flip_bit(put(tmp_path, 5) / SHARD)
    logged: list[str] = []
    assert files.latest_valid(tmp_path, logged.append, quarantine=False) is None
    assert len(logged) == 1
    assert (tmp_path / "step-5").exists()


def test_incomplete_folder_is_replaced(tmp_path: Path) -> None:
    half = tmp_path / "step-4"
    half.mkdir()
    (half / SHARD).write_bytes(b"half")
    (half / "junk").write_bytes(b"")
    path = put(tmp_path, 4)
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert files.latest_valid(tmp_path) == path


def test_kill_at_any_write_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt each disk write in turn: the new checkpoint is valid only after the last one."""

    class Killed(BaseException):
        pass

    real, countdown = files.fsync, [0]

    def sync_or_die(path: Path) -> None:
        if countdown[0] == 0:
            raise Killed
        countdown[0] -= 1
        real(path)

    monkeypatch.setattr(files, "fsync", sync_or_die)
    monkeypatch.setattr(state_io, "fsync", sync_or_die)
    countdown[0] = 100
    put(tmp_path, 1)
    syncs = 100 - countdown[0]
    assert syncs >= 6
    for allowed in range(syncs - 2):  # the last two follow the rename
        countdown[0] = allowed
        with pytest.raises(Killed):
            put(tmp_path, 2)
        assert files.latest_valid(tmp_path) == tmp_path / "step-1"


@contextmanager
def disk_full_after(num_bytes: int) -> Iterator[None]:
    """Make writes beyond this size fail with EFBIG, which takes the code paths of ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    put(tmp_path, 1)
    with disk_full_after(20_000), pytest.raises(TrainingError, match=r"step-2: .*[Tt]oo large.*GiB free") as raised:
        state_io.save(tmp_path, 2, {"model": {"w": torch.zeros(50_000)}}, {})
    assert raised.value.exit_code == 3
    assert not (tmp_path / "step-2").exists()
    assert files.latest_valid(tmp_path) == tmp_path / "step-1"


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    with pytest.raises(TrainingError, match=r"cannot write the checkpoint .*Not a directory"):
        put(tmp_path / "checkpoints", 1)


def test_storage_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    with pytest.raises(TrainingError, match="cannot list"):
        files.latest_valid(tmp_path / "checkpoints")


def test_read_error_does_not_quarantine_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, 1)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("mmray.engine.checkpoint.files.sha256", fail)
    with pytest.raises(TrainingError, match="Input/output error"):
        files.latest_valid(tmp_path)
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (SHARD, state_io.load_weights),
        ("state.json", state_io.load),
        ("meta.json", files.load_meta),
    ],
)
@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_unreadable_part_is_named(tmp_path: Path, name: str, read: Any, content: bytes | None) -> None:
    path = put(tmp_path, 1)
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=f"cannot read .*({name}|step-1: )"):
        read(path)


def test_checkpoint_of_the_older_format_is_refused_by_name(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    sums = (path / "SHA256SUMS").read_text()
    (path / "SHA256SUMS").write_text(sums.replace("state.json", "state.pt"))
    with pytest.raises(UsageError, match=r"step-1 was written by an older version.*--run.name"):
        files.latest_valid(tmp_path)
    assert path.exists()


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, score in [(1, 0.2), (2, 0.9), (3, 0.5), (4, float("nan")), (5, 0.4), (6, 0.3)]:
        put(tmp_path, step, **{METRIC: score})
    unfinished = tmp_path / "step-7"
    unfinished.mkdir()
    assert files.best(tmp_path, METRIC) == tmp_path / "step-2"
    gone = files.prune(tmp_path, keep=2, metric=METRIC)
    assert sorted(path.name for path in gone) == ["step-1", "step-3", "step-4", "step-7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-5", "step-6"]
    assert files.prune(tmp_path, keep=2, metric=METRIC) == []


def test_prune_without_a_metric(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step)
    files.prune(tmp_path, keep=1, metric=METRIC)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


@pytest.mark.parametrize(("metric", "expected"), [("evaluate/loss", 1), ("evaluate/median_rank/image_to_text", 1)])
def test_best_is_lowest_for_losses_and_ranks(tmp_path: Path, metric: str, expected: int) -> None:
    for step in (1, 2):
        put(tmp_path, step, **{metric: float(step)})
    assert files.best(tmp_path, metric) == tmp_path / f"step-{expected}"


def test_best_of_equals_is_the_newest(tmp_path: Path) -> None:
    for step in (9, 10):
        put(tmp_path, step, **{METRIC: 1.0})
    assert files.best(tmp_path, METRIC) == tmp_path / "step-10"


@pytest.fixture
def store(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(storage, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    return s3


def test_object_store_keeps_checkpoints_like_a_disk(store: Any) -> None:
    folder = to_path(store.address) / "checkpoints"
    assert files.latest_valid(folder) is None and files.latest_complete(folder) is None
    for step, recall in ((3, 0.5), (6, 0.9), (9, 0.1), (12, 0.2)):
        put(folder, step, recall=recall)
        files.prune(folder, 2, "recall")
    assert files.list_names(folder) == ["step-12", "step-6", "step-9"]
    newest = files.latest_valid(folder)
    assert newest is not None
    assert files.step_of(newest) == 12 and files.load_meta(newest)["metrics"] == {"recall": 0.2}
    loaded = state_io.load(newest)
    assert torch.equal(loaded["model"]["w"], torch.full((5,), 12.0)) and loaded["progress"] == {"step": 12}


def test_damaged_objects_are_quarantined(store: Any) -> None:
    folder, logged = to_path(store.address) / "checkpoints", []
    for step in (1, 2, 3, 4):
        put(folder, step)
    (folder / "step-4" / files.SUMS).unlink()  # killed before its last object
    (folder / "step-3" / SHARD).write_bytes(b"cut short")
    (folder / "step-2" / files.STATE).unlink()
    assert files.step_of(files.latest_valid(folder, logged.append)) == 1
    assert "it is incomplete" in logged[0] and "does not match its checksum (9 bytes)" in logged[1]
    assert "state.json is missing; it is renamed to step-2.damaged" in logged[2]
    assert files.list_names(folder) == ["step-1", "step-2.damaged", "step-3.damaged", "step-4"]
    put(folder, 3)
    assert files.step_of(files.latest_valid(folder)) == 3


def test_failed_upload_leaves_no_checkpoint(store: Any) -> None:
    folder = to_path(store.address) / "checkpoints"
    put(folder, 3)
    store.fail("PUT", "step-6/state.json", 1000, status=400)
    with pytest.raises(StorageError, match=r"cannot write the checkpoint s3://.*/step-6: .*Older checkpoints"):
        put(folder, 6)
    assert files.step_of(files.latest_valid(folder)) == 3
    assert files.list_names(folder) == ["step-3"]
