"""metrics.jsonl stays correct across restarts and full disks, has one owner, and is uploaded to
object stores.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from mmray.engine.metrics import writers
from mmray.engine.metrics.writers import LogUploader, MetricsLog, profile_steps
from mmray.errors import StorageError, TrainingError
from mmray.storage.lease import Lease, check_fencing_token
from mmray.storage.paths import to_path


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_after_the_resumed_step_are_dropped_and_counted(tmp_path, monkeypatch):
    # Part of the names of event files, which TensorBoard reads in the order of their text: 9 would
    # come after 10.
    monkeypatch.setattr(
        "tensorboard.summary.writer.event_file_writer._global_uid", AtomicCounter(0)
    )
    log = MetricsLog(tmp_path)
    for step in (10, 20, 30):
        log.write({"step": step, "rows_sha": "ab", "train/loss": 1 / step})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 40, "train/é'.encode()[:-1])  # killed in the middle of a character
    resumed = MetricsLog(tmp_path, start_step=20)
    assert resumed.wasted_steps == 10
    resumed.write({"step": 25, "train/loss": 0.5})
    resumed.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [10, 20, 25]
    assert MetricsLog(tmp_path, start_step=25).wasted_steps == 0
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [event.step for event in events] == [10, 20, 25]


def test_line_is_written_before_the_next_as_strict_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "train/loss": float("nan"), "train/grad_norm": float("inf")})
    log.flush()
    assert lines_of(tmp_path) == [{"step": 1, "train/loss": None, "train/grad_norm": None}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    log.close()


class LimitedDisk:
    """The log's file, on a disk with this many free bytes."""

    def __init__(self, log, free, error=errno.ENOSPC):
        self.file, self.free, self.error = log._file, free, error
        log._file = self

    def write(self, line):
        if not self.free:
            raise OSError(self.error, os.strerror(self.error))
        written = self.file.write(line[: self.free])
        self.free -= written
        return written

    def close(self):
        self.file.close()


def test_full_disk_is_logged_once_and_lines_are_written_later(tmp_path):
    messages = []
    log = MetricsLog(tmp_path, notify=lambda _, text: messages.append(text))
    disk = LimitedDisk(log, free=70)
    for step in range(1, 6):
        log.write({"step": step, "train/loss": 1 / step})
    log.flush()
    assert len(messages) == 1 and "No space left on device" in messages[0]
    assert str(tmp_path / "metrics.jsonl") in messages[0] and socket.gethostname() in messages[0]
    assert (tmp_path / "metrics.jsonl").stat().st_size == 70  # two lines and a half
    for step, disk.free in ((6, 10**6), (7, 0)):
        log.write({"step": step, "train/loss": 0.1})
        log.flush()
    disk.free = 10**6
    log.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert len(messages) == 3  # it was full twice, and free once before the end


def test_log_of_a_stale_mount_is_opened_again(tmp_path):
    """After an unmount the open file is of no use, and a new one must not be created."""
    messages = []
    (tmp_path / "run").mkdir()
    log = MetricsLog(tmp_path / "run", notify=lambda _, text: messages.append(text))
    disk = LimitedDisk(log, free=0, error=errno.ESTALE)
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        log.write({"step": step})
    log.flush()
    assert not list((tmp_path / "run").iterdir()) and "Stale file handle" in messages[0]
    (tmp_path / "run").rmdir()
    (tmp_path / "away").rename(tmp_path / "run")
    log.write({"step": 3})
    log.close()
    assert log._file is not disk and "can be used again" in messages[-1]
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3]


def test_lines_never_written_are_counted_and_do_not_end_the_run(tmp_path):
    messages = []
    log = MetricsLog(tmp_path, notify=lambda _, text: messages.append(text))
    LimitedDisk(log, free=0)
    for step in (1, 2):
        log.write({"step": step})
    log.close()
    assert len(messages) == 2 and "its last 2 lines are lost" in messages[1]


def test_tensorboard_on_full_disk_is_logged_and_starts_another_file_later(tmp_path):
    messages = []
    log = MetricsLog(tmp_path, notify=lambda _, text: messages.append(text))
    log.write({"step": 1, "train/loss": 1.0})
    log.flush()
    log._events.flush()  # TensorBoard's own thread writes the first line
    writer = log._events._get_file_writer().event_writer._async_writer
    writer._worker.exception = OSError(errno.ENOSPC, "No space left on device")
    for step in (2, 3):
        log.write({"step": step, "train/loss": 0.5})
    log.close()
    files = list(tmp_path.glob("events.*"))
    assert len(messages) == 2 and len(lines_of(tmp_path)) == 3 and len(files) == 2
    assert (
        max(EventAccumulator(str(file)).Reload().Scalars("train/loss")[-1].step for file in files)
        == 3
    )


def test_log_taken_over_by_another_training_gets_no_further_lines(tmp_path, monkeypatch):
    now_s, owned = [1000.0], [True]
    monkeypatch.setattr(writers.time, "time", lambda: now_s[0])

    def check():
        if not owned[0]:
            raise TrainingError("taken over")

    log = MetricsLog(tmp_path, check_lease=check)
    log.write({"step": 1})
    log.flush()
    owned[0] = False
    log.write({"step": 2})  # the lease file is not read in each step
    log.flush()
    now_s[0] += writers.CHECK_EVERY_S
    log.write({"step": 3})
    log.flush()
    for late in (lambda: log.write({"step": 4}), log.close):
        with pytest.raises(TrainingError, match="taken over"):
            late()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_stalled_storage_does_not_stop_the_training_thread(tmp_path, monkeypatch):
    """The lease check waits for the storage, and lines are written when it answers."""
    monkeypatch.setattr(writers, "CHECK_EVERY_S", 0.0)
    answer, asked = threading.Event(), threading.Event()

    def check():
        assert threading.current_thread() is not threading.main_thread()
        asked.set()
        answer.wait(60)

    log = MetricsLog(tmp_path, check_lease=check)
    for step in (1, 2):
        log.write({"step": step})
    log.write_file("examples.json", "{}")
    assert asked.wait(60) and not lines_of(tmp_path)
    answer.set()
    log.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2] and (
        tmp_path / "examples.json"
    ).read_text() == "{}"


def test_profile_of_requested_steps_is_written(tmp_path):
    file = tmp_path / "profile" / "rank-0.json"
    with profile_steps(2, file, torch.device("cpu")) as step_done:
        for _ in range(6):
            torch.ones(3) + 1
            step_done()
    trace = json.loads(file.read_text())
    assert sum(event.get("name") == "aten::add" for event in trace["traceEvents"]) == 2
    with profile_steps(0, tmp_path / "none.json", torch.device("cpu")) as step_done:
        step_done()
    assert not (tmp_path / "none.json").exists()


@pytest.fixture
def run(s3):
    """The folder of a run on an object store."""
    return to_path(s3.address) / "run"


def test_growing_files_are_uploaded_fully_and_continued(run, monkeypatch):
    monkeypatch.setattr(writers, "UPLOAD_EVERY_S", 0.2)
    messages = []
    for text in ("one\n", "two\n"):
        files = LogUploader(run, lambda *message: messages.append(message), lambda: None)
        with (files.local_folder / "metrics.jsonl").open("a") as file:
            file.write(text)
        (files.local_folder / "profile").mkdir()
        (files.local_folder / "profile" / "rank-0.json").write_text(text)
        files.upload_changed()
        assert (run / "metrics.jsonl").read_text().endswith(text)
        with (files.local_folder / "metrics.jsonl").open("a") as file:
            file.write("last\n")
        files.close()
    assert (run / "metrics.jsonl").read_text() == "one\nlast\ntwo\nlast\n"
    assert (
        (run / "profile" / "rank-0.json").read_text() == "two\n"
        and not files.local_folder.exists()
        and not messages
    )


def test_log_that_cannot_be_read_is_a_storage_error(run, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    (run / "metrics.jsonl").write_text("one\n")
    monkeypatch.setattr(writers, "copy_file", fail)
    with pytest.raises(StorageError, match=r"cannot read .*metrics\.jsonl: Input/output error"):
        LogUploader(run, print, lambda: None)


def test_growing_files_do_not_overwrite_those_of_another_training(run):
    lease = Lease(run)
    files = LogUploader(run, print, partial(check_fencing_token, run, lease.acquire()))
    (files.local_folder / "metrics.jsonl").write_text("one\n")
    files.upload_changed()
    lease.claim_next_token()
    (files.local_folder / "metrics.jsonl").write_text("one\nof the orphan\n")
    for late in (files.upload_changed, files.close):
        with pytest.raises(TrainingError, match="taken over"):
            late()
    lease.release()
    assert (run / "metrics.jsonl").read_text() == "one\n" and not files.local_folder.exists()
