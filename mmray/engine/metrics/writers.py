"""What a run tells while it trains: lines of metrics.jsonl, TensorBoard events, rates, and the mark of a step's rows.

loop.py measures on every rank; the log itself is kept by rank 0 alone. Keys are `area/name_unit`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mmray.errors import StorageError, TrainingError
from mmray.storage.paths import AnyPath, RemotePath, temp_dir

Metrics = dict[str, Any]


METRICS = "metrics.jsonl"


NEWLINE = b"\n"


CHECK_EVERY_S = 10.0  # between two looks at whether this is still the run's training


class MetricsLog:
    """metrics.jsonl and TensorBoard events of a run that begins, or goes on, after `start_step` steps.

    Lines of later steps, left by an attempt that failed, are dropped: those steps are taken again.
    `wasted_steps` is how many steps they prove. What the disk does not take is told (`tell`, once for each time that it
    fails) and written when it takes lines again. `check` raises where the folder is another training's now: at a line
    every ten seconds at most, and at the end. Raises StorageError where the log cannot even be opened.
    """

    def __init__(
        self,
        folder: Path,
        start_step: int = 0,
        tell: Callable[[str], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ):
        self._folder, self._purge_step = folder, start_step + 1
        self._tell, self._check = tell, check
        self._path = folder / METRICS
        self._pending = b""  # lines that the disk has not taken yet
        self._refused = False
        self._checked_s = time.time()  # of day: it goes on while the machine sleeps
        self._events: Any = None
        try:
            self.wasted_steps = _drop_after(self._path, start_step)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"cannot write {self._path}: {error.strerror or error}. Make room (or mend the permissions) and start "
                "the same command again"
            ) from error

    def write(self, metrics: Metrics) -> None:
        """One line, at once on disk; numbers that JSON lacks (NaN, infinity) become null."""
        line = json.dumps({key: _plain(value) for key, value in metrics.items()}, allow_nan=False) + "\n"
        self._own(CHECK_EVERY_S)
        self._pending += line.encode()
        try:
            self._write_out()
            self._plot(metrics)
            self._refused = False
        except OSError as error:
            if not self._refused:
                self._tell(f"{self._refusal(error)}. Its lines are kept, and written as soon as it takes them again")
            self._refused = True

    def close(self) -> None:
        """Write out what is pending; a log that is not closed loses TensorBoard's last two minutes at most."""
        try:
            self._own(0.0)
            self._write_out()
            if self._events is not None:
                self._events.close()
        except OSError as error:
            self._tell(f"{self._refusal(error)}: its last {self._pending.count(NEWLINE)} lines are lost")
        finally:
            self._file.close()

    def _own(self, every_s: float) -> None:
        """Raise TrainingError where this is not the run's training any more; where nobody can say, the write will."""
        if abs(time.time() - self._checked_s) < every_s:
            return
        try:
            self._check()
            self._checked_s = time.time()
        except OSError:
            return

    def _write_out(self) -> None:
        """Write what is pending, and go on where a write was cut short. Raises OSError."""
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def _plot(self, metrics: Metrics) -> None:
        """The line for TensorBoard. Raises OSError; what was on its way is then missing there, and only there."""
        try:
            for key, value in metrics.items():
                if "/" in key:
                    self._writer().add_scalar(key, value, metrics["step"])
        except OSError:  # the writer's thread has ended; another file goes on from here
            self._events, self._purge_step = None, metrics["step"]
            raise

    def _writer(self) -> Any:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds of import: after training began, on one rank

            self._events = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._events

    def _refusal(self, error: OSError) -> str:
        return f"the storage does not take {self._path}: {error.strerror or error}"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, start_step: int) -> int:
    """Keep the lines up to `start_step`, whole ones only; returns how many steps the dropped lines went beyond it."""
    if not path.exists():
        return 0
    kept, last_step = [], start_step
    for line in path.read_text(encoding="utf-8").splitlines():
        step = _step_of(line)
        last_step = max(last_step, step or 0)
        if step is not None and step <= start_step:
            kept.append(line + "\n")
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return last_step - start_step


def _step_of(line: str) -> int | None:
    """Step of a line; None for one that a kill cut off in the middle."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


EVERY_S = 10.0


COST_SHARE = 0.05  # of the time at most: a file that has grown large goes out less often


class LogUploader:
    """`here` is the folder of this machine to write into; `tell` hears of what could not be carried.

    `check` raises TrainingError where the folder is another training's now: nothing is carried then.
    """

    def __init__(self, folder: AnyPath, tell: Callable[[str], None], check: Callable[[], None] = lambda: None):
        self._folder, self._tell, self._check = folder, tell, check
        self._sent: dict[Path, tuple[int, int]] = {}
        self._one_at_a_time, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if not isinstance(folder, RemotePath):
            self.here = folder
            return
        self._lent = ExitStack()
        self.here = self._lent.enter_context(temp_dir())
        if (folder / METRICS).exists():
            (folder / METRICS).download(self.here / METRICS)
        self._thread = threading.Thread(target=self._carry, name="mmray-growing", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Carry what has changed. Raises OSError where the store does not take it, and what `check` raises."""
        if not isinstance(self._folder, RemotePath):
            return
        with self._one_at_a_time:
            self._check()
            for file in sorted(path for path in self.here.rglob("*") if path.is_file()):
                state = (file.stat().st_size, file.stat().st_mtime_ns)
                if self._sent.get(file) == state:
                    continue
                remote = self._folder
                for part in file.relative_to(self.here).parts:
                    remote = remote / part
                remote.upload(file)
                self._sent[file] = state

    def close(self) -> None:
        """Carry the rest; the files on this machine are gone then, unless the store did not take them."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        with self._lent:
            try:
                self.push()
            except OSError as error:
                kept = self.here.rename(self.here.with_name(f"mmray-not-stored-{self.here.name[-8:]}"))
                self._tell(f"the last lines of what was logged are not on the storage; they are in {kept}: {error}")

    def _carry(self) -> None:
        pause_s = EVERY_S
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            if not self._try():
                return
            pause_s = max(EVERY_S, (time.monotonic() - began_s) / COST_SHARE)

    def _try(self) -> bool:
        """Whether this is still the run's training: who writes next is told that it is not."""
        try:
            self.push()
        except OSError as error:
            self._tell(f"metrics are not on the storage yet: {error}")
        except TrainingError:
            return False
        return True


# A torch profile of a few steps, in Chrome's trace format (ui.perfetto.dev opens it); for `--train.profile N`.
SKIPPED = 2  # steps before it: the first allocate and compile


@contextmanager
def profiled(steps: int, file: Path | None, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step; `steps` steps are written to `file`. 0 steps, or no file: nothing."""
    if steps == 0 or file is None:
        yield lambda: None
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    plan = schedule(wait=SKIPPED - 1, warmup=1, active=steps, repeat=1)
    with profile(activities=kinds, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(file))) as running:
        yield running.step
