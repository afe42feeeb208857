"""Checkpoints: what comes back is what was saved, and nothing half-written or damaged is ever taken for whole."""

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

from mmray.engine.checkpoint import files
from mmray.errors import TrainingError

METRIC = "evaluate/recall_at_1/mean"


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


def put(folder: Path, step: int, **metrics: float) -> Path:
    meta = {"rows_consumed": 8 * step, "metrics": metrics}
    return files.save(folder, step, {"w": torch.full((5,), float(step))}, {"progress": {"step": step}}, meta)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_state_comes_back_bitwise(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"optimizer": optimizer.state_dict(), "scaler": {}, "progress": {"step": 3, "skipped": 0}}
    path = files.save(tmp_path / "checkpoints", 3, model.state_dict(), state, {"rows_consumed": 24})
    twin, twin_optimizer = trained(steps=0)
    loaded = files.load(path)
    twin.load_state_dict(loaded.pop("model"))
    twin_optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["progress"] == {"step": 3, "skipped": 0}
    for _ in range(5):
        take_step(model, optimizer)
        take_step(twin, twin_optimizer)
    assert equal(model.state_dict(), twin.state_dict())


def test_tied_and_transposed_weights_are_stored(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    path = files.save(tmp_path, 1, {"a": weight, "b": weight, "c": weight.T}, {}, {})
    assert equal(files.load_weights(path), {"a": weight, "b": weight, "c": weight.T})


@pytest.mark.parametrize("value", [np.float64(1.0), {1, 2}, Path("x"), np.zeros(2)])
def test_state_that_would_need_pickle_is_refused_with_its_place(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['progress'\]\[1\]"):
        files.save(tmp_path, 1, {}, {"progress": [0, value]}, {})
    assert files.latest_valid(tmp_path) is None


def test_meta_is_strict_json_for_people(tmp_path: Path) -> None:
    path = put(tmp_path, 7, loss=float("nan"), other=float("inf"))
    meta = json.loads((path / "meta.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert meta["step"] == 7
    assert meta["rows_consumed"] == 56
    assert meta["metrics"] == {"loss": None, "other": None}
    assert meta["versions"]["torch"] == torch.__version__


def test_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    checked = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("OK") == 3


def test_newest_is_by_number(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "meta.json", "SHA256SUMS"])
def test_damaged_falls_back_to_the_last_good_and_says_so(tmp_path: Path, name: str, damage: Any) -> None:
    put(tmp_path, 10)
    damage(put(tmp_path, 20) / name)
    said: list[str] = []
    assert files.latest_valid(tmp_path, said.append) == tmp_path / "step-10"
    assert len(said) == 1
    assert "step-20" in said[0]
    assert name in said[0] or name == "SHA256SUMS"  # a wrong sum looks like a wrong file
    unfinished = damage is Path.unlink and name == "SHA256SUMS"
    assert (tmp_path / "step-20.damaged").exists() != unfinished
    assert files.latest_valid(tmp_path, said.append) == tmp_path / "step-10"
    assert len(said) == 1 + unfinished  # what was set aside is not told twice


def test_reader_beside_a_training_moves_nothing(tmp_path: Path) -> None:
    flip_bit(put(tmp_path, 5) / "state.pt")
    said: list[str] = []
    assert files.latest_valid(tmp_path, said.append, quarantine=False) is None
    assert len(said) == 1
    assert (tmp_path / "step-5").exists()


def test_half_written_folder_is_replaced(tmp_path: Path) -> None:
    half = tmp_path / "step-4"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (half / "junk").write_bytes(b"")
    path = put(tmp_path, 4)
    assert sorted(file.name for file in path.iterdir()) == ["SHA256SUMS", "meta.json", "model.safetensors", "state.pt"]
    assert files.latest_valid(tmp_path) == path


def test_kill_at_any_moment_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops at every single write to disk in turn: only after the last may the new checkpoint count."""
    from mmray.engine.checkpoint import checksums

    class Killed(BaseException):
        pass

    real, countdown = checksums._sync, [0]

    def sync_or_die(path: Path) -> None:
        if countdown[0] == 0:
            raise Killed
        countdown[0] -= 1
        real(path)

    monkeypatch.setattr(checksums, "_sync", sync_or_die)
    countdown[0] = 100
    put(tmp_path, 1)
    syncs = 100 - countdown[0]
    assert syncs >= 6
    for allowed in range(syncs - 2):  # the last two come after the rename: they only make it last
        countdown[0] = allowed
        with pytest.raises(Killed):
            put(tmp_path, 2)
        assert files.latest_valid(tmp_path) == tmp_path / "step-1"


@contextmanager
def disk_full_after(num_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail as on a full disk (errno EFBIG instead of ENOSPC; the same paths in the code)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("big", ["model", "state"])
def test_full_disk_is_told_and_leaves_nothing(tmp_path: Path, big: str) -> None:
    put(tmp_path, 1)
    large, small = {"w": torch.zeros(50_000)}, {"w": torch.zeros(2)}
    with disk_full_after(20_000), pytest.raises(TrainingError, match=r"step-2: .*[Tt]oo large.*GiB free") as raised:
        files.save(tmp_path, 2, large if big == "model" else small, large if big == "state" else small, {})
    assert raised.value.exit_code == 3
    assert not (tmp_path / "step-2").exists()
    assert files.latest_valid(tmp_path) == tmp_path / "step-1"


def test_unwritable_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    with pytest.raises(TrainingError, match=r"cannot write the checkpoint .*Not a directory"):
        put(tmp_path / "checkpoints", 1)


def test_storage_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    with pytest.raises(TrainingError, match="cannot list"):
        files.latest_valid(tmp_path / "checkpoints")


def test_read_error_does_not_condemn_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, 1)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("mmray.engine.checkpoint.checksums.sha256", fail)
    with pytest.raises(TrainingError, match="Input/output error"):
        files.latest_valid(tmp_path)
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", files.load_weights),
        ("state.pt", files.load),
        ("meta.json", files.load_meta),
    ],
)
@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_unreadable_part_is_named(tmp_path: Path, name: str, read: Any, content: bytes | None) -> None:
    path = put(tmp_path, 1)
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=f"cannot read .*{name}"):
        read(path)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    torch.save({"optimizer": Path("/")}, path / "state.pt")
    with pytest.raises(TrainingError, match=r"state\.pt"):
        files.load(path)


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
