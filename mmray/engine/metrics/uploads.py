"""Files that grow while a run trains: metrics.jsonl, TensorBoard's events, a profile. For worker.py, on rank 0.

A file system takes each line as it comes. An object store takes whole objects only: there the files grow on this
machine, and go out every now and then, before each checkpoint (so that a resumed run finds the lines of all its steps),
and at the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from mmray.engine.metrics.writers import METRICS
from mmray.errors import TrainingError
from mmray.storage.paths import AnyPath, RemotePath, temp_dir

EVERY_S = 10.0
COST_SHARE = 0.05  # of the time at most: a file that has grown large goes out less often


class Growing:
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
