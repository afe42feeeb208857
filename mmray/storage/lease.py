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
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from mmray.errors import StorageError, TrainingError, UsageError
from mmray.storage.paths import AnyPath, RemotePath

# Where a lease is written down: numbered claims in a folder, of which each number is got by one process alone.
#
# For lease.py. On a file system that is a file which only its creator can create. An object store lets everybody put
# anything, so there each contender puts an object of its own, looks who else did, and has the number only where nobody
# else did: of two, the later one to put sees the earlier one's (a listing shows every object put before; S3 says so
# since
# 2020), so never both have it.
LONGEST_PAUSE_S = 1.0  # of a contender that gave way to another one, until it looks again


class Claims(Protocol):
    """Numbered claims; raises OSError where the storage does."""

    def fences(self) -> list[int]: ...
    def take(self, fence: int, text: str) -> bool: ...
    def read(self, fence: int) -> str | None: ...
    def beat(self, fence: int) -> None: ...
    def modified_s(self, fence: int) -> float: ...
    def now_s(self) -> float: ...
    def rewrite(self, fence: int, text: str) -> None: ...
    def remove(self, fence: int) -> None: ...


def claims_in(folder: AnyPath) -> Claims:
    return ObjectClaims(folder) if isinstance(folder, RemotePath) else FileClaims(folder)


class FileClaims:
    """Claim N is the file FOLDER/N."""

    def __init__(self, folder: Path):
        self._folder = folder

    def fences(self) -> list[int]:
        """The numbers that are there."""
        try:
            return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []

    def take(self, fence: int, text: str) -> bool:
        """Whether this process is the one that got the number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / str(fence)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(text)
        except OSError:
            path.unlink(missing_ok=True)  # or who tries again would find it taken
            raise
        if max(self.fences(), default=0) > fence:  # a slow one: others took this number and more, meanwhile
            path.unlink(missing_ok=True)
            return False
        return True

    def read(self, fence: int) -> str | None:
        """What its holder wrote; None where it is gone."""
        try:
            return (self._folder / str(fence)).read_text()
        except FileNotFoundError:
            return None

    def beat(self, fence: int) -> None:
        """Give the claim the storage's present time. Raises FileNotFoundError where it is gone."""
        handle = os.open(self._folder / str(fence), os.O_RDWR)
        try:
            os.pwrite(handle, b"{", 0)  # not utime: some network mounts keep that to themselves
        finally:
            os.close(handle)

    def modified_s(self, fence: int) -> float:
        """Time of the last beat, as the storage has it; -1, different from every beat, where it is gone."""
        try:
            handle = os.open(self._folder / str(fence), os.O_RDONLY)  # makes a network mount ask the server
        except FileNotFoundError:
            return -1.0
        try:
            return os.fstat(handle).st_mtime
        finally:
            os.close(handle)

    def now_s(self) -> float:
        """The time that the storage gives to a file written now."""
        return _written_now_s(self._folder / f".now-{socket.gethostname()}-{os.getpid()}")

    def rewrite(self, fence: int, text: str) -> None:
        """Another text for a claim of one's own, whole or not at all; nothing where it is gone."""
        mine = self._folder / str(fence)
        if mine.exists():
            temporary = self._folder / f".{mine.name}.released"
            temporary.write_text(text)
            temporary.replace(mine)

    def remove(self, fence: int) -> None:
        (self._folder / str(fence)).unlink(missing_ok=True)


class ObjectClaims:
    """Claim N is the object FOLDER/N-TOKEN, the token its holder's own."""

    def __init__(self, folder: RemotePath):
        self._folder, self._token = folder, uuid.uuid4().hex[:12]

    def fences(self) -> list[int]:
        """The numbers that are there."""
        return [int(name.partition("-")[0]) for name in self._names()]

    def take(self, fence: int, text: str) -> bool:
        """Whether this process is the one that got the number; of several at once all give way, and look again."""
        mine = self._folder / f"{fence}-{self._token}"
        mine.write_text(text)
        others = [name for name in self._names() if name != mine.name and int(name.partition("-")[0]) >= fence]
        if not others:
            return True
        mine.unlink(missing_ok=True)
        time.sleep(random.uniform(0, LONGEST_PAUSE_S))
        return False

    def read(self, fence: int) -> str | None:
        """What its holder wrote; None where it is gone."""
        path = self._path(fence)
        try:
            return None if path is None else path.read_text()
        except FileNotFoundError:
            return None

    def beat(self, fence: int) -> None:
        """Give the claim the storage's present time. Raises FileNotFoundError where it is gone.

        Where it is taken over between the look and the beat, the object comes back; its number is then not the highest,
        which is what counts.
        """
        path = self._path(fence)
        if path is None:
            raise FileNotFoundError(f"the lease {fence} in {self._folder} is gone")
        path.write_bytes(path.read_bytes())

    def modified_s(self, fence: int) -> float:
        """Time of the last beat, as the storage has it; -1, different from every beat, where it is gone."""
        path = self._path(fence)
        try:
            return -1.0 if path is None else path.stat().st_mtime
        except FileNotFoundError:
            return -1.0

    def now_s(self) -> float:
        """The time that the storage gives to an object put now."""
        return _written_now_s(self._folder / f".now-{self._token}")

    def rewrite(self, fence: int, text: str) -> None:
        """Another text for a claim of one's own; nothing where it is gone."""
        path = self._path(fence)
        if path is not None:
            path.write_text(text)

    def remove(self, fence: int) -> None:
        path = self._path(fence)
        if path is not None:
            path.unlink(missing_ok=True)

    def _path(self, fence: int) -> RemotePath | None:
        """One's own claim of this number, else anybody's."""
        names = [name for name in self._names() if name.partition("-")[0] == str(fence)]
        mine = f"{fence}-{self._token}"
        return self._folder / (mine if mine in names else names[0]) if names else None

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._folder.iterdir() if path.name.partition("-")[0].isdecimal()]
        except FileNotFoundError:
            return []


def _written_now_s(probe: AnyPath) -> float:
    """The time that the storage gives to a file written now, which goes again."""
    probe.write_text("now")
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


FOLDER = "lease"


class Lease:
    """The right to write into `run_dir`, renewed by a thread every `heartbeat_s` seconds until released."""

    def __init__(self, run_dir: AnyPath, heartbeat_s: float = 10.0, stale_after_s: float = 60.0):
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
                check_fence(self._folder.parent, before)
            self.fence = before + 1
            self._claims.remove(before)
        except OSError as error:
            raise StorageError(f"cannot write the lease of the run in {self._folder}: {error}") from error
        return self.fence

    def check(self) -> None:
        """Raise TrainingError where another training has the run now, OSError where the storage does not answer."""
        check_fence(self._folder.parent, self.fence)

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


def check_fence(run_dir: AnyPath, fence: int) -> None:
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


def _held_message(folder: AnyPath, holder: dict[str, Any] | None) -> str:
    holder = holder or {}
    who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "another process"
    return (
        f"{folder.parent} is being trained by {who}: wait for its end or stop it, or choose another --run.name. "
        "If it is gone for good, the same command takes over a minute or two after its last sign of life"
    )


@contextmanager
def _told(folder: AnyPath) -> Iterator[None]:
    """Errors of the storage as one that a user can act on."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write the lease of the run in {folder}: {error.strerror or error}; choose another --run.storage"
        ) from error
