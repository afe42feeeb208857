"""Writers of rank 0: metrics.jsonl, TensorBoard events, profiles, and their upload to object
stores.

Metric keys are `area/name_unit`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mmray.errors import StorageError, TrainingError
from mmray.storage.outage import Outage
from mmray.storage.paths import AnyPath, RemotePath, copy_file, temp_dir, write_atomic

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Metrics = dict[str, Any]
METRICS = "metrics.jsonl"
CHECK_EVERY_S = 10.0  # time between two checks that this process still owns the run
UPLOAD_EVERY_S = 10.0
UPLOAD_COST_FRACTION = 0.05  # at most this share of the time: large files are uploaded less often
PROFILE_WARMUP_STEPS = 2  # steps before a profile, which allocate and compile


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run that starts or resumes after `start_step`
    steps.

    Lines of later steps, from workers that failed, are dropped, because those steps are taken
    again. A thread writes, because storage may stall. Lines that cannot be written are kept and
    written later.

    `write(metrics)` takes a dict with `step` and values by name, such as `train/loss`, which
    becomes one line.

    Args:
        folder: Local folder of the log.
        start_step: Number of steps before the start or the resume.
        notify: Called with (label, warning) if lines cannot be written; the label is the word to
            print before the warning.
        check_lease: Called without arguments by the thread, at most every ten seconds and at the
            end; raises TrainingError if another process has taken over the run.

    Attributes:
        wasted_steps: Number of steps from `start_step` to the last dropped line.

    Raises:
        StorageError: The log cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        start_step: int = 0,
        notify: Callable[[str, str], None] = lambda label, text: None,
        check_lease: Callable[[], None] = lambda: None,
    ):
        self._folder = folder
        self._purge_step = start_step + 1
        self._warn = partial(notify, "storage")
        meanwhile = "training continues, and lines are kept for a later write"
        self._outage = Outage(folder / METRICS, self._warn, meanwhile)
        self._check_lease = check_lease
        self._path = folder / METRICS
        self._pending = b""  # lines not written yet
        self._is_stale = False  # the file must be opened again
        self._checked_s = time.time()  # wall clock: includes suspend
        self._lost_lease: TrainingError | None = None
        self._events: SummaryWriter | None = None
        self._thread = ThreadPoolExecutor(1, "mmray-log")
        self._last: Future[None] = Future()  # newest of the thread's tasks
        self._last.set_result(None)
        try:
            self.wasted_steps = _drop_after(self._path, start_step)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"cannot write {self._path}: {error.strerror or error}. Free disk space or fix the "
                "permissions, then rerun the same command"
            ) from error

    def write(self, metrics: Metrics) -> None:
        """Write one line to metrics.jsonl and TensorBoard, in the thread."""
        if self._lost_lease is not None:
            raise self._lost_lease
        line = orjson.dumps(metrics, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        self._last = self._thread.submit(self._write_line, line, dict(metrics))

    def write_file(self, name: str, text: str) -> None:
        """Write a file next to the log, in the thread; an error is only a warning."""
        self._last = self._thread.submit(self._write_file, self._folder / name, text)

    def flush(self) -> None:
        """Wait until the thread has written all pending lines and files, or has failed to."""
        wait([self._last])

    def close(self) -> None:
        """Write pending lines and end the thread.

        A log that is not closed loses at most TensorBoard's last two minutes.
        """
        self._last = self._thread.submit(self._close)
        self._thread.shutdown()
        self._last.result()

    def _write_line(self, line: bytes, metrics: Metrics) -> None:
        try:
            self._check_lease_every(CHECK_EVERY_S)
            self._pending += line
            self._write_out()
            self._write_tensorboard(metrics)
            self._outage.ended()
        except TrainingError as error:
            self._lost_lease = error
        except OSError as error:
            self._outage.failed(error)

    def _write_file(self, path: Path, text: str) -> None:
        try:
            write_atomic(path, text)
        except OSError as error:
            self._warn(f"cannot write {path}: {error.strerror or error}")

    def _close(self) -> None:
        try:
            self._check_lease_every(0.0)
            self._write_out()
            if self._events is not None:
                self._events.close()
        except OSError as error:
            lost = self._pending.count(b"\n")
            self._warn(
                f"cannot write {self._path}: {error.strerror or error}; its last {lost} "
                "lines are lost"
            )
        finally:
            self._file.close()

    def _check_lease_every(self, every_s: float) -> None:
        """Raise TrainingError if another process owns the run; on a storage error the write will
        fail instead.
        """
        if abs(time.time() - self._checked_s) >= every_s:
            with suppress(OSError):
                self._check_lease()
                self._checked_s = time.time()

    def _write_out(self) -> None:
        """Write pending lines, continuing after partial writes. Raises OSError."""
        if self._is_stale:
            # Without O_CREAT: a new file could be in the empty folder below a lost mount.
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            with suppress(OSError):
                self._file.close()
            self._file = os.fdopen(file, "ab", buffering=0)
            self._is_stale = False
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            # The open file of a storage that was unmounted stays unusable.
            self._is_stale = error.errno != errno.ENOSPC
            raise

    def _write_tensorboard(self, metrics: Metrics) -> None:
        """Write the line to TensorBoard. Raises OSError; pending events are then missing there."""
        from torch.utils.tensorboard import (
            SummaryWriter,  # takes seconds to import: after the start, on one rank
        )

        try:
            if self._events is None:
                self._path.stat()  # the writer would create the folder below a lost mount
                self._events = SummaryWriter(str(self._folder), purge_step=self._purge_step)
            for key, value in metrics.items():
                if "/" in key:
                    self._events.add_scalar(key, value, metrics["step"])
        except OSError:  # the writer's thread has ended; continue in another file
            self._events = None
            self._purge_step = metrics["step"]
            raise


def _drop_after(path: Path, start_step: int) -> int:
    """Keep complete lines up to `start_step`; return how many steps the dropped lines went beyond
    it.
    """
    if not path.exists():
        return 0
    lines = []
    last_step = start_step
    # a kill may have cut the last one, even inside a character
    for line in path.read_bytes().splitlines():
        try:
            step = int(orjson.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
        last_step = max(last_step, step)
        if step <= start_step:
            lines.append(line + b"\n")
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(b"".join(lines))
    temporary.replace(path)
    return last_step - start_step


class LogUploader:
    """Uploads growing files from `local_folder` to the run's folder.

    An object store cannot append to objects, so files grow locally and are uploaded every 10 s,
    before each checkpoint and at the end. For a run on a local disk, `local_folder` is the run's
    folder and nothing is uploaded.

    `upload_changed()` uploads what has changed, and `close()` the rest.

    Args:
        notify: Called with (label, warning) if an upload fails; the label is the word to print
            before the warning.
        check_lease: Called without arguments; raises TrainingError if another process owns the run:
            nothing is uploaded then.

    Attributes:
        local_folder: Local folder in which the files grow, such as metrics.jsonl.

    Raises:
        StorageError: The log so far cannot be read.
    """

    def __init__(
        self, folder: AnyPath, notify: Callable[[str, str], None], check_lease: Callable[[], None]
    ):
        self._folder = folder
        self._notify = notify
        self._check_lease = check_lease
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if not isinstance(folder, RemotePath):
            self.local_folder = folder
            return
        self._temporary = ExitStack()
        self.local_folder = self._temporary.enter_context(temp_dir())
        try:
            if (folder / METRICS).exists():
                copy_file(folder / METRICS, self.local_folder / METRICS)
        except OSError as error:
            raise StorageError(
                f"cannot read {folder / METRICS}: {error.strerror or error}. Check the storage and "
                "rerun the command"
            ) from error
        self._thread = threading.Thread(
            target=self._upload_loop, name="mmray-uploader", daemon=True
        )
        self._thread.start()

    def upload_changed(self) -> None:
        """Upload the files of `local_folder` that have changed since their last upload to the run's
        folder.

        Raises:
            OSError: The object store failed.
            TrainingError: Another process has taken over the run.
        """
        if not isinstance(self._folder, RemotePath):
            return
        with self._lock:
            self._check_lease()
            files = (path for path in self.local_folder.rglob("*") if path.is_file())
            # these are being written
            for file in sorted(path for path in files if not path.name.startswith(".")):
                state = (file.stat().st_size, file.stat().st_mtime_ns)
                if self._uploaded.get(file) != state:
                    copy_file(file, self._folder / file.relative_to(self.local_folder).as_posix())
                    self._uploaded[file] = state

    def close(self) -> None:
        """Upload the rest and delete the local files; if the upload fails, keep them and warn where
        they are.

        Raises:
            TrainingError: Another process has taken over the run.
        """
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        with self._temporary:
            try:
                self.upload_changed()
            except OSError as error:
                name = f"mmray-not-stored-{self.local_folder.name[-8:]}"
                target = self.local_folder.rename(self.local_folder.with_name(name))
                self._notify(
                    "storage",
                    f"cannot upload the last log lines; they are kept in {target}: {error}",
                )

    def _upload_loop(self) -> None:
        pause_s = UPLOAD_EVERY_S
        while not self._ended.wait(pause_s):
            start_s = time.monotonic()
            try:
                self.upload_changed()
            except OSError as error:
                self._notify("storage", f"cannot upload metrics, will retry: {error}")
            except TrainingError:  # another process owns the run
                return
            pause_s = max(UPLOAD_EVERY_S, (time.monotonic() - start_s) / UPLOAD_COST_FRACTION)


@contextmanager
def profile_steps(
    steps: int, file: Path | None, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Context manager that profiles steps with torch.profiler into a Chrome trace.

    Args:
        steps: Number of steps to profile, which follow two that are not recorded; 0: none.
        file: The trace to write; None: none.
        device: Device of training; on a GPU its kernels are recorded too.

    Yields:
        A function to call after each step.
    """
    if steps == 0 or file is None:
        yield lambda: None
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    plan = schedule(wait=PROFILE_WARMUP_STEPS - 1, warmup=1, active=steps, repeat=1)
    with profile(
        activities=kinds, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(file))
    ) as running:
        yield running.step
