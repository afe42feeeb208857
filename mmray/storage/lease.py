"""Who may write into a run's folder: one training at a time, even when an earlier one is only believed dead.

The driver holds the lease while it trains; each rank that is about to write a checkpoint calls `check`. The lease is a
claim lease/N in the run's folder (claims.py). N, the fence, only grows: whoever takes over claims N + 1, which succeeds
for one process alone, and removes N. A holder that was only asleep finds its claim gone and stops (fencing tokens:
Kleppmann 2017, Designing Data-Intensive Applications, chapter 8).

No two clocks are compared. The age of a heartbeat is the difference of two times that the same storage gave, and a
lease is taken from a silent holder only after watching it stay silent; on this machine, a dead process is enough.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mmray.errors import StorageError, TrainingError, UsageError
from mmray.storage.claims import claims_in
from mmray.storage.remote_path import Folder

FOLDER = "lease"


class Lease:
    """The right to write into `run_dir`, renewed by a thread every `heartbeat_s` seconds until released."""

    def __init__(self, run_dir: Folder, heartbeat_s: float = 10.0, stale_after_s: float = 60.0):
        self._folder = run_dir / FOLDER
        self._claims = claims_in(self._folder)
        self._heartbeat_s, self._stale_after_s = heartbeat_s, stale_after_s
        self.fence = 0  # of what is written now; 0: not held
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> int:
        """Take the lease and begin its heartbeat; returns the fence.

        Raises UsageError while another process holds it, or where the folder cannot be written. Takes over at once from
        a dead process of this machine; from a silent one elsewhere after watching for 1.5 heartbeats.
        """
        with _told(self._folder):
            while not self.fence:
                newest = max(self._claims.fences(), default=0)
                if newest and self._is_held(newest):
                    raise UsageError(_held_message(self._folder, self._holder(newest)))
                self.fence = newest + 1 if self._claims.take(newest + 1, json.dumps(_myself())) else 0
            for older in self._claims.fences():
                if older < self.fence:
                    self._claims.remove(older)
        self._ended.clear()
        self._thread = threading.Thread(target=self._beat, name="mmray-lease", daemon=True)
        self._thread.start()
        return self.fence

    def advance(self) -> int:
        """A new fence for the next attempt of the same holder: a worker of an earlier one that wakes up writes no more.

        Raises TrainingError where the lease is lost, StorageError where the storage fails.
        """
        before = self.fence
        try:
            while not self._claims.take(before + 1, json.dumps(_myself())):
                check(self._folder.parent, before)
            self.fence = before + 1
            self._claims.remove(before)
        except OSError as error:
            raise StorageError(f"cannot write the lease of the run in {self._folder}: {error}") from error
        return self.fence

    def check(self) -> None:
        """Raise TrainingError where another training has the run now, OSError where the storage does not answer."""
        check(self._folder.parent, self.fence)

    def release(self) -> None:
        """End the heartbeat and let the next process have the run; nothing where it is lost or not held."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        fence, self.fence = self.fence, 0
        with suppress(OSError):  # it goes stale by itself, and how the training ended is more than how its lease did
            # Rewritten, not deleted: its number stays the highest, so that the next fence is a new one.
            self._claims.rewrite(fence, json.dumps({"released": True}))

    def _is_held(self, fence: int) -> bool:
        """Whether the holder of a lease may still be at work; watches it for a while where only that can tell."""
        holder = self._holder(fence)
        if holder is None or holder.get("released"):
            return False
        alive = _lives_here(holder)
        if alive is not None:
            return alive
        beat_s = self._claims.modified_s(fence)
        age_s = self._storage_now_s() - beat_s
        if 0 <= age_s < self._stale_after_s:
            return True
        # It looks stale, or its clock ran back; a storage whose clock jumped would look so too. A beat settles it.
        silence_s = 1.5 * self._heartbeat_s if age_s >= 0 else self._stale_after_s
        until = time.monotonic() + silence_s
        while time.monotonic() < until:
            time.sleep(min(1.0, self._heartbeat_s / 4))
            if self._claims.modified_s(fence) != beat_s:
                return True
        return False

    def _storage_now_s(self) -> float:
        return self._claims.now_s()

    def _holder(self, fence: int) -> dict[str, Any] | None:
        """What the holder wrote; empty where it is only just writing it, None where the claim is gone."""
        text = self._claims.read(fence)
        try:
            holder = None if text is None else json.loads(text)
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) or text is None else {}

    def _beat(self) -> None:
        """Renew the lease until released or lost; a storage that fails for a while is tried again at the next beat."""
        while not self._ended.wait(self._heartbeat_s):
            fence = self.fence
            try:
                self._claims.beat(fence)
            except FileNotFoundError:
                if fence == self.fence:  # it was not this holder that went on to the next
                    return  # lost: `check` tells those who write
            except OSError:
                continue


def check(run_dir: Folder, fence: int) -> None:
    """Raise TrainingError where the lease with this fence was taken over: whoever holds it must write nothing more.

    Raises OSError where the storage does not answer.
    """
    fences = claims_in(run_dir / FOLDER).fences()
    newest = max(fences, default=0)
    if newest > fence or fence not in fences:
        raise TrainingError(
            f"{run_dir} was taken over by another training or a later attempt (lease {newest}, this one had {fence}): "
            "this one stops and writes nothing more. Nothing is lost; give two trainings two names (--run.name) to run "
            "them side by side"
        )


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "machine": _machine(), "process": _process(pid)}


def _machine() -> str | None:
    """This boot of this machine and this table of processes (a container has its own); None where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _process(pid: int) -> str | None:
    """When a process began, in ticks since boot, which tells it from a later one of the same number; None: no such."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # proc(5): field 3 (state) first, field 22 is the start time
    return None if fields[0] == "Z" else fields[19]


def _lives_here(holder: dict[str, Any]) -> bool | None:
    """Whether the holder's process lives; None where it ran elsewhere, so that only its heartbeat can tell."""
    machine = _machine()
    if machine is None or holder.get("machine") != machine or not isinstance(holder.get("pid"), int):
        return None
    return _process(holder["pid"]) == holder.get("process")


def _held_message(folder: Folder, holder: dict[str, Any] | None) -> str:
    holder = holder or {}
    who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "another process"
    return (
        f"{folder.parent} is being trained by {who}: wait for its end or stop it, or choose another --run.name. "
        "If it is gone for good, the same command takes over a minute or two after its last sign of life"
    )


@contextmanager
def _told(folder: Folder) -> Iterator[None]:
    """Errors of the storage as one that a user can act on."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write the lease of the run in {folder}: {error.strerror or error}; choose another --run.storage"
        ) from error
