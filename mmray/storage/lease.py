"""A lease on a directory: one writer at a time, even if a writer that was considered dead resumes.

The file `lease/N` has the fencing token N, which grows with every take-over and attempt; a writer
that finds a higher number stops (Kleppmann 2017, chapter 8). No clocks are compared: an owner on
another machine is dead if its file does not change for `stale_after_s`.

On a disk, N is claimed by exclusive create. On a store, each contender writes `lease/N-UUID`, and
owns N if a listing then has no other object of N or more. This needs a store whose listings show
every finished write, as those of S3, GCS, Azure and HDFS do. Conditional put would replace it, but
pyarrow has none: `put(mode="create")` of obstore works, but it does not have hdfs:// and does not
find the credentials of an AWS profile, so both protocols would be needed.
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

import psutil

from mmray.errors import ForceExit, StorageError, TrainingError, UsageError
from mmray.storage.paths import AnyPath, RemotePath, list_names, write_atomic
from mmray.storage.requests import TransientStorageError

_log = logging.getLogger(__name__)
FOLDER = "lease"
# Several heartbeats.
STALE_AFTER_S = 60.0
# Longest pause before a contender on an object store retries.
MAX_PAUSE_S = 1.0


class Lease:
    """The exclusive right of a process to write into a folder, renewed by a thread.

    Use it as a context manager. While another process has the lease, `acquire` raises UsageError.
    `check` raises TrainingError for an owner that has lost it.

    Args:
        directory: local folder or folder on a store.
        heartbeat_s: seconds between two heartbeats.
        stale_after_s: seconds without a heartbeat (by default 60) after which an owner on another
            machine counts as dead, and its lease can be taken over.
        activity: what an owner does with the directory, for the UsageError of a second process.
        advice: what the user of the second process can do, for the same error.

    Attributes:
        fencing_token: number of this process's claim, higher than that of all earlier owners; 0
            without the lease.
    """

    def __init__(
        self,
        directory: AnyPath,
        heartbeat_s: float = 10.0,
        stale_after_s: float = STALE_AFTER_S,
        activity: str = "being trained",
        advice: str = "choose another --run.name or --run.storage",
    ):
        self._directory = directory
        self._folder = directory / FOLDER
        self._heartbeat_s = heartbeat_s
        self._stale_after_s = stale_after_s
        self._activity = activity
        self._advice = advice
        self._suffix = f"-{uuid.uuid4().hex[:12]}" if isinstance(directory, RemotePath) else ""
        # 0: not held.
        self.fencing_token = 0
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None and issubclass(error_type, ForceExit):
            # At once, without the storage, which may not answer; the lease expires.
            self._released.set()
        else:
            self.release()

    def acquire(self) -> int:
        """Acquire the exclusive right to write into the folder, and start the thread that renews
        it.

        Waits up to `stale_after_s` if the owner is on another machine and may be dead.

        Returns:
            The fencing token: a number that is higher than those of all earlier owners.

        Raises:
            UsageError: another process holds the lease, or the directory is not writable.
        """
        try:
            while not self.fencing_token:
                newest, file = _newest_claim(self._folder)
                if file is not None and self._is_held(file):
                    raise UsageError(
                        f"{self._directory} is {self._activity} by {_name(_read_owner(file))}. "
                        f"Wait until it ends, stop it, or {self._advice}. If it is killed, the "
                        "same command takes over."
                    )
                if self._claim(newest + 1):
                    self.fencing_token = newest + 1
            for fencing_token, file in _claims(self._folder):
                if fencing_token < self.fencing_token:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"Cannot write the lease {self._folder}: {error.strerror or error}. Make the "
                f"folder writable, free disk space, or {self._advice}."
            ) from error
        self._released.clear()
        self._thread = threading.Thread(target=self._renew, name="mmray-lease", daemon=True)
        self._thread.start()
        return self.fencing_token

    def claim_next_token(self) -> int:
        """Claim a higher fencing token, so that workers with the current one can no longer write.

        A fencing token is a number that grows with each claim on the folder. Before a write, a
        worker checks that no higher one exists.

        Raises:
            TrainingError: another process has taken over the lease.
            StorageError: the storage failed.
        """
        before = self.fencing_token
        try:
            # Otherwise the claim would be written into the empty folder below a lost mount.
            check_fencing_token(self._directory, before)
            while not self._claim(before + 1):
                check_fencing_token(self._directory, before)
            self.fencing_token = before + 1
            self._file(before).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"Cannot write the lease {self._folder}: {error}") from error
        return self.fencing_token

    def check(self) -> None:
        """Check that this process still has the exclusive right to write into the folder.

        Raises:
            TrainingError: another process has taken over the lease.
            OSError: the storage failed, or is not mounted.
        """
        check_fencing_token(self._directory, self.fencing_token)

    def release(self) -> None:
        """Give up the right to write into the folder and stop its renewal; without effect if it is
        not held.
        """
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        self._thread = None
        file = self._file(self.fencing_token)
        self.fencing_token = 0
        # An unreleased lease expires, and the error of the run matters more.
        with suppress(OSError):
            if file.exists():
                # The file is kept, because the next fencing token must be higher.
                write_atomic(file, json.dumps({"released": True}))

    def _file(self, fencing_token: int) -> AnyPath:
        """Return the file of a claim of this process."""
        return self._folder / f"{fencing_token}{self._suffix}"

    def _claim(self, fencing_token: int) -> bool:
        """Try to become the only owner of a fencing token. Raises OSError."""
        file = self._file(fencing_token)
        pid = os.getpid()
        owner = {
            "host": socket.gethostname(),
            "pid": pid,
            "machine": _machine_id(),
            "process": _start_time(pid),
        }
        if isinstance(file, Path):
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with file.open("x") as stream:
                    stream.write(json.dumps(owner))
            except FileExistsError:
                return False
            except OSError:
                # An empty claim would block the next attempt.
                file.unlink(missing_ok=True)
                raise
        else:
            file.write_text(json.dumps(owner))
        fencing_tokens = [number for number, _ in _claims(self._folder)]
        if fencing_tokens.count(fencing_token) == 1 and max(fencing_tokens) == fencing_token:
            return True
        file.unlink(missing_ok=True)
        if isinstance(file, RemotePath):
            # Two contenders that see each other both withdraw.
            time.sleep(random.uniform(0, MAX_PAUSE_S))
        return False

    def _is_held(self, file: AnyPath) -> bool:
        """Return whether the owner of a claim is alive.

        Waits up to `stale_after_s` for a heartbeat of an owner on another machine.
        """
        last_heartbeat_s = _modified_s(file)
        owner = _read_owner(file)
        if owner is None or owner.get("released"):
            return False
        is_alive = _is_alive_here(owner)
        if is_alive is not None:
            return is_alive
        _log.warning(
            "%s: waiting up to %g s for a heartbeat of %s",
            self._directory,
            self._stale_after_s,
            _name(owner),
        )
        deadline = time.monotonic() + self._stale_after_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._heartbeat_s / 4))
            if _modified_s(file) != last_heartbeat_s or (not owner and _read_owner(file)):
                return not (_read_owner(file) or {}).get("released")
        return False

    def _renew(self) -> None:
        """Write heartbeats until the release; failed writes are retried with the next one."""
        while not self._released.wait(self._heartbeat_s):
            with suppress(OSError):
                self._write_heartbeat(self.fencing_token)

    def _write_heartbeat(self, fencing_token: int) -> None:
        """Update the modification time of the claim. Raises FileNotFoundError if it was deleted."""
        file = self._file(fencing_token)
        if isinstance(file, Path):
            with file.open("r+b") as stream:
                # Unlike utime, a write reaches the server of every network mount.
                stream.write(b"{")
        else:
            file.write_bytes(file.read_bytes())


def check_fencing_token(directory: AnyPath, fencing_token: int) -> None:
    """Check that no other process has taken over a folder.

    Raises:
        TrainingError: A claim of another process exists.
        OSError: The storage failed. A folder without any claim is an empty one in place of a
            storage that is not mounted.
    """
    fencing_tokens = [number for number, _ in _claims(directory / FOLDER)]
    if not fencing_tokens:
        raise TransientStorageError(
            f"{directory} has no lease: it was deleted, or its storage is not mounted"
        )
    newest = max(fencing_tokens)
    if newest > fencing_token or fencing_token not in fencing_tokens:
        raise TrainingError(
            f"{directory} was taken over by another process or a later attempt (fencing token "
            f"{newest}, this process has {fencing_token}). It stops writing; nothing is lost. Give "
            "each run and set its own folder."
        )


def is_live(directory: AnyPath) -> bool:
    """Return whether a process holds the lease of a folder (writes into it), without waiting.

    The result is for display only, because it may be out of date at once. A process on another
    machine counts as the holder if its last heartbeat is younger than STALE_AFTER_S (60).
    """
    _, file = _newest_claim(directory / FOLDER)
    owner = None if file is None else _read_owner(file)
    if file is None or owner is None or owner.get("released"):
        return False
    alive = _is_alive_here(owner)
    if alive is not None:
        return alive
    return _now_s(directory / FOLDER) - _modified_s(file) < STALE_AFTER_S


def _now_s(folder: AnyPath) -> float:
    """Return the time by the clock of the storage, as of a file that is written now; by the clock
    of this machine, which may differ, if the folder is read-only.
    """
    file = folder / f"clock-{uuid.uuid4().hex[:12]}"
    try:
        file.write_text("")
        now_s = _modified_s(file)
        file.unlink(missing_ok=True)
    except OSError:
        return time.time()
    return now_s


def _newest_claim(folder: AnyPath) -> tuple[int, AnyPath | None]:
    """Return the claim with the highest fencing token; (0, None) without claims."""
    return max(_claims(folder), key=lambda claim: claim[0], default=(0, None))


def _claims(folder: AnyPath) -> list[tuple[int, AnyPath]]:
    """Return (fencing token, file) of all claims."""
    names = [(name.partition("-")[0], name) for name in list_names(folder)]
    return [(int(number), folder / name) for number, name in names if number.isdecimal()]


def _modified_s(file: AnyPath) -> float:
    """Return the time of the last heartbeat by the clock of the storage, in seconds.

    Returns -1 if the claim was deleted.
    """
    try:
        if isinstance(file, Path):
            # Opening makes a network mount revalidate its attributes.
            with file.open("rb") as stream:
                return os.fstat(stream.fileno()).st_mtime
        return file.stat().st_mtime
    except FileNotFoundError:
        return -1.0


def _read_owner(file: AnyPath) -> dict[str, Any] | None:
    """Return the contents of a claim: {} while it is being written, None if it was deleted."""
    try:
        owner = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _name(owner: dict[str, Any] | None) -> str:
    """Return a description of an owner for messages."""
    if not owner or "pid" not in owner:
        return "another process"
    return f"process {owner['pid']} on {owner['host']}"


def _machine_id() -> str:
    """Return an id of this boot and PID namespace, because each container has a namespace.

    Without /proc it is an id of machine and boot.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{uuid.getnode():x} {psutil.boot_time():.0f}"


def _start_time(pid: int) -> str | None:
    """Return the start time of a process; None if it is dead.

    A later process with the same PID has another start time.
    """
    # macOS has no /proc.
    if not Path("/proc/self/stat").exists():
        with suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # proc(5): the first is field 3, the state; field 22 is the start time.
    return None if fields[0] == "Z" else fields[19]


def _is_alive_here(owner: dict[str, Any]) -> bool | None:
    """Return whether the owner's process is alive; None if it ran on another machine."""
    machine = _machine_id()
    if owner.get("machine") != machine or not isinstance(owner.get("pid"), int):
        return None
    return _start_time(owner["pid"]) == owner.get("process")
