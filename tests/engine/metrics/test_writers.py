"""Runs on an object store: only complete checkpoints count, a lease has one owner, growing files are uploaded."""

from functools import partial

import pytest

from mmray.engine.metrics import writers
from mmray.engine.metrics.writers import LogUploader
from mmray.errors import TrainingError
from mmray.storage import paths, storage
from mmray.storage.lease import Lease, check_fence
from mmray.storage.paths import temp_dir, to_path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(storage, "MAX_WAIT_S", 0.01)


def test_growing_files_are_uploaded_fully_and_continued(s3, monkeypatch):
    monkeypatch.setattr(writers, "UPLOAD_EVERY_S", 0.2)
    folder, told = to_path(s3.address) / "mine", []
    for text in ("one\n", "two\n"):
        files = LogUploader(folder, told.append)
        with (files.here / "metrics.jsonl").open("a") as file:
            file.write(text)
        (files.here / "profile").mkdir()
        (files.here / "profile" / "rank-0.json").write_text(text)
        files.push()
        assert (folder / "metrics.jsonl").read_text().endswith(text)
        with (files.here / "metrics.jsonl").open("a") as file:
            file.write("last\n")
        files.close()
    assert (folder / "metrics.jsonl").read_text() == "one\nlast\ntwo\nlast\n"
    assert (folder / "profile" / "rank-0.json").read_text() == "two\n" and not files.here.exists() and not told


def test_growing_files_do_not_overwrite_those_of_another_training(s3):
    folder = to_path(s3.address) / "mine"
    held = Lease(folder)
    files = LogUploader(folder, print, partial(check_fence, folder, held.acquire()))
    (files.here / "metrics.jsonl").write_text("one\n")
    files.push()
    held.advance()
    (files.here / "metrics.jsonl").write_text("one\nof the orphan\n")
    for late in (files.push, files.close):
        with pytest.raises(TrainingError, match="taken over"):
            late()
    held.release()
    assert (folder / "metrics.jsonl").read_text() == "one\n" and not files.here.exists()


def test_leftover_growing_files_are_removed_after_their_process_ended(s3, monkeypatch):
    monkeypatch.setattr(paths, "STALE_AFTER_S", -1.0)
    files = LogUploader(to_path(s3.address) / "mine", print)
    with temp_dir():  # sweeps
        assert files.here.exists() and files.here.name.startswith(paths.PREFIX)
    files.close()
    assert not files.here.exists()
