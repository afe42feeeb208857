"""A lease on a directory: one writer at a time, even if a writer that was considered dead resumes.

The lease is the file `lease/N` in the directory. N is a fencing number: it grows with every take-over and attempt, and
a writer that finds a higher number stops writing (Kleppmann 2017, Designing Data-Intensive Applications, chapter 8). On
a file system, N is claimed by exclusive create. pyarrow has no conditional put for object stores. There, each contender
puts its own object `lease/N-TOKEN` and owns N only if a listing then has no other object with N or more. The later of
two contenders sees the object of the earlier one, because S3 listings are consistent since 2020.

No clocks are compared. An owner on another machine is dead if its file does not change for `stale_after_s`. On this
machine, the process is checked.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmray.errors import StorageError, TrainingError, UsageError
from mmray.storage.paths import AnyPath, RemotePath, write_atomic

_log = logging.getLogger(__name__)
FOLDER = "lease"
MAX_PAUSE_S = 1.0  # before a contender on an object store retries


class Lease:
    """The right to write into `directory`, renewed every `heartbeat_s` seconds by a thread until released.

    `activity` and `advice` complete the error message for a second writer: what the first one does, and what to do
    instead.
    """

    def __init__(
        self,
        directory: AnyPath,
        heartbeat_s: float = 10.0,
        stale_after_s: float = 60.0,
        activity: str = "being trained",
        advice: str = "choose another --run.name or --run.storage",
    ):
        self._directory, self._folder = directory, directory / FOLDER
        self._heartbeat_s, self._stale_after_s = heartbeat_s, stale_after_s
        self._activity, self._advice = activity, advice
        self._suffix = f"-{uuid.uuid4().hex[:12]}" if isinstance(directory, RemotePath) else ""
        self.fence = 0  # 0: not held
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> int:
        """Acquire the lease, start its heartbeat and return the fencing number.

        Raises UsageError if another process holds it or the directory is not writable. A dead owner on this machine is
        replaced at once, one on another machine after `stale_after_s` without a heartbeat.
        """
        try:
            while not self.fence:
                newest = max(_fences(self._folder), default=0)
                if newest and self._is_held(newest):
                    raise UsageError(self._held_message(newest))
                if self._claim(newest + 1):
                    self.fence = newest + 1
            for older in _fences(self._folder):
                if older < self.fence:
                    self._remove(older)
        except OSError as error:
            raise UsageError(
                f"Cannot write the lease {self._folder}: {error.strerror or error}. Make the folder writable, or "
                f"{self._advice}."
            ) from error
        self._released.clear()
        self._thread = threading.Thread(target=self._renew, name="mmray-lease", daemon=True)
        self._thread.start()
        return self.fence

    def advance(self) -> int:
        """Advance to the next fencing number, so that workers of an earlier attempt can no longer write.

        Raises TrainingError if the lease is lost, StorageError if the storage fails.
        """
        before = self.fence
        try:
            while not self._claim(before + 1):
                check_fence(self._directory, before)
            self.fence = before + 1
            self._remove(before)
        except OSError as error:
            raise StorageError(f"Cannot write the lease {self._folder}: {error}") from error
        return self.fence

    def check(self) -> None:
        """Raise TrainingError if another process has taken over the lease, OSError if the storage fails."""
        check_fence(self._directory, self.fence)

    def release(self) -> None:
        """Stop the heartbeat and release the lease, if it is held."""
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        self._thread = None
        fence, self.fence = self.fence, 0
        with suppress(OSError):  # an unreleased lease expires; the error of the run matters more
            path = self._path(fence)
            if path is not None and path.exists():
                write_atomic(path, json.dumps({"released": True}))  # kept: the next fencing number must be higher

    def _claim(self, fence: int) -> bool:
        """Try to become the only owner of a fencing number. Raises OSError."""
        path = self._folder / f"{fence}{self._suffix}"
        owner = json.dumps(_this_process())
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = path.open("x")
            except FileExistsError:
                return False
            try:
                with file:
                    file.write(owner)
            except OSError:
                path.unlink(missing_ok=True)  # an empty claim would block the next attempt
                raise
        else:
            path.write_text(owner)
        fences = _fences(self._folder)
        if fences.count(fence) == 1 and max(fences) == fence:
            return True
        path.unlink(missing_ok=True)
        if isinstance(path, RemotePath):  # all contenders withdrew
            time.sleep(random.uniform(0, MAX_PAUSE_S))
        return False

    def _is_held(self, fence: int) -> bool:
        """Return whether the owner is alive; waits for heartbeats of an owner on another machine."""
        beat_s, owner = self._modified_s(fence), self._owner(fence)
        if owner is None or owner.get("released"):
            return False
        alive = _is_alive_here(owner)
        if alive is not None:
            return alive
        who = f"process {owner.get('pid')} on {owner.get('host')}"
        _log.warning("%s: waiting up to %g s for a heartbeat of %s", self._directory, self._stale_after_s, who)
        deadline = time.monotonic() + self._stale_after_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._heartbeat_s / 4))
            if self._modified_s(fence) != beat_s or (not owner and self._owner(fence)):
                return True
        return False

    def _renew(self) -> None:
        """Write heartbeats until the lease is released or lost; a failed write is retried at the next heartbeat."""
        while not self._released.wait(self._heartbeat_s):
            fence = self.fence
            try:
                self._beat(fence)
            except FileNotFoundError:
                if fence == self.fence:  # not replaced by advance()
                    return  # lost: `check` reports it
            except OSError:
                continue

    def _beat(self, fence: int) -> None:
        """Update the modification time of the claim. Raises FileNotFoundError if it was deleted."""
        path = self._path(fence)
        if path is None:
            raise FileNotFoundError(f"lease {fence} in {self._folder} is gone")
        if isinstance(path, Path):
            with path.open("r+b") as file:
                file.write(b"{")  # unlike utime, a write reaches the server of every network mount
        else:
            path.write_bytes(path.read_bytes())

    def _modified_s(self, fence: int) -> float:
        """Return the time of the last heartbeat by the clock of the storage; -1 if the claim was deleted."""
        path = self._path(fence)
        try:
            if isinstance(path, Path):
                with path.open("rb") as file:  # opening makes a network mount revalidate its attributes
                    return os.fstat(file.fileno()).st_mtime
            return -1.0 if path is None else path.stat().st_mtime
        except FileNotFoundError:
            return -1.0

    def _owner(self, fence: int) -> dict[str, Any] | None:
        """Return the contents of the claim: {} while it is being written, None if it was deleted."""
        path = self._path(fence)
        try:
            owner = None if path is None else json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) or path is None else {}

    def _remove(self, fence: int) -> None:
        path = self._path(fence)
        if path is not None:
            path.unlink(missing_ok=True)

    def _path(self, fence: int) -> AnyPath | None:
        """Return the file of a claim (on an object store preferably that of this process), or None."""
        own = f"{fence}{self._suffix}"
        if isinstance(self._folder, Path):
            return self._folder / own
        names = [name for name in _claims(self._folder) if name.partition("-")[0] == str(fence)]
        return self._folder / (own if own in names else names[0]) if names else None

    def _held_message(self, fence: int) -> str:
        owner = self._owner(fence) or {}
        who = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
        return (
            f"{self._directory} is {self._activity} by {who}. Wait until it ends, stop it, or {self._advice}. If it is "
            "killed, the same command takes over."
        )


def check_fence(directory: AnyPath, fence: int) -> None:
    """Raise TrainingError if the lease with this fencing number was taken over, OSError if the storage fails."""
    fences = _fences(directory / FOLDER)
    newest = max(fences, default=0)
    if newest > fence or fence not in fences:
        raise TrainingError(
            f"{directory} was taken over by another training or a later attempt (lease {newest}, this one "
            f"had {fence}). This process stops writing; nothing is lost. Give concurrent runs other names (--run.name)."
        )


def _claims(folder: AnyPath) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.name.partition("-")[0].isdecimal()]
    except FileNotFoundError:
        return []


def _fences(folder: AnyPath) -> list[int]:
    """Return the fencing numbers of all claims."""
    return [int(name.partition("-")[0]) for name in _claims(folder)]


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "machine": _machine_id(), "process": _start_time(pid)}


def _machine_id() -> str | None:
    """Return an id of this boot and PID namespace (each container has one); None without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot, or None if it is dead.

    The start time distinguishes it from a later process with the same PID.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # proc(5): field 3 (state) first; field 22 is the start time
    return None if fields[0] == "Z" else fields[19]


def _is_alive_here(owner: dict[str, Any]) -> bool | None:
    """Return whether the owner's process is alive; None if it ran on another machine."""
    machine = _machine_id()
    if machine is None or owner.get("machine") != machine or not isinstance(owner.get("pid"), int):
        return None
    return _start_time(owner["pid"]) == owner.get("process")
