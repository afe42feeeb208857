"""A lease on a directory: one writer at a time, even if a writer that was considered dead resumes.

The file `lease/N` has the fencing token N, which grows with every take-over and attempt; a writer
that finds a higher number stops (Kleppmann 2017, chapter 8). On disks N is claimed by exclusive
create. pyarrow has no conditional put: on an object store each contender writes `lease/N-UUID`, and
owns N if a listing has no other object of N or more. No clocks are compared: an owner on another
machine is dead if its file does not change for `stale_after_s`.
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
from mmray.storage.paths import AnyPath, RemotePath, write_atomic

_log = logging.getLogger(__name__)
FOLDER = "lease"
STALE_AFTER_S = 60.0  # several heartbeats
MAX_PAUSE_S = 1.0  # before a contender on an object store retries


class Lease:
    """The right to write into `directory`, renewed by a thread;

    `activity` and `advice` are for error messages.
    """

    def __init__(
        self,
        directory: AnyPath,
        heartbeat_s: float = 10.0,
        stale_after_s: float = STALE_AFTER_S,
        activity: str = "being trained",
        advice: str = "choose another --run.name or --run.storage",
    ):
        self._directory, self._folder = directory, directory / FOLDER
        self._heartbeat_s, self._stale_after_s = heartbeat_s, stale_after_s
        self._activity, self._advice = activity, advice
        self._suffix = f"-{uuid.uuid4().hex[:12]}" if isinstance(directory, RemotePath) else ""
        self.fencing_token = 0  # 0: not held
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None and issubclass(error_type, ForceExit):
            # at once, without the storage, which may not answer; the lease expires
            self._released.set()
        else:
            self.release()

    def acquire(self) -> int:
        """Acquire the lease and return the fencing token.

        Raises UsageError if it is held or not writable.
        """
        try:
            while not self.fencing_token:
                newest, file = _newest_claim(self._folder)
                if file is not None and self._is_held(file):
                    owner = _read_owner(file) or {}
                    who = (
                        (f"process {owner['pid']} on {owner['host']}")
                        if "pid" in owner
                        else "another process"
                    )
                    raise UsageError(
                        f"{self._directory} is {self._activity} by {who}. Wait until it ends, stop "
                        "it, or "
                        f"{self._advice}. If it is killed, the same command takes over."
                    )
                if self._claim(newest + 1):
                    self.fencing_token = newest + 1
            for fencing_token, file in _claims(self._folder):
                if fencing_token < self.fencing_token:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"Cannot write the lease {self._folder}: {error.strerror or error}. Make the "
                "folder writable, free "
                f"disk space, or {self._advice}."
            ) from error
        self._released.clear()
        self._thread = threading.Thread(target=self._renew, name="mmray-lease", daemon=True)
        self._thread.start()
        return self.fencing_token

    def claim_next_token(self) -> int:
        """Claim the next token, so that earlier workers cannot write.

        Raises TrainingError if lost, StorageError.
        """
        before = self.fencing_token
        try:
            while not self._claim(before + 1):
                check_fencing_token(self._directory, before)
            self.fencing_token = before + 1
            self._file(before).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"Cannot write the lease {self._folder}: {error}") from error
        return self.fencing_token

    def check(self) -> None:
        """Raise TrainingError if another process has taken over the lease, OSError if the storage
        fails.
        """
        check_fencing_token(self._directory, self.fencing_token)

    def release(self) -> None:
        """Stop the heartbeat and release the lease, if it is held."""
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        self._thread = None
        file, self.fencing_token = self._file(self.fencing_token), 0
        with suppress(OSError):  # an unreleased lease expires; the error of the run matters more
            if file.exists():
                # kept: the next fencing token must be higher
                write_atomic(file, json.dumps({"released": True}))

    def _file(self, fencing_token: int) -> AnyPath:
        """Return the file of a claim of this process."""
        return self._folder / f"{fencing_token}{self._suffix}"

    def _claim(self, fencing_token: int) -> bool:
        """Try to become the only owner of a fencing token. Raises OSError."""
        file, pid = self._file(fencing_token), os.getpid()
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
                file.unlink(missing_ok=True)  # an empty claim would block the next attempt
                raise
        else:
            file.write_text(json.dumps(owner))
        fencing_tokens = [number for number, _ in _claims(self._folder)]
        if fencing_tokens.count(fencing_token) == 1 and max(fencing_tokens) == fencing_token:
            return True
        file.unlink(missing_ok=True)
        if isinstance(file, RemotePath):  # all contenders withdrew
            time.sleep(random.uniform(0, MAX_PAUSE_S))
        return False

    def _is_held(self, file: AnyPath) -> bool:
        """Return whether the owner of a claim is alive; waits for heartbeats of an owner on another
        machine.
        """
        last_heartbeat_s, owner = _modified_s(file), _read_owner(file)
        if owner is None or owner.get("released"):
            return False
        if (alive := _is_alive_here(owner)) is not None:
            return alive
        who = f"process {owner.get('pid')} on {owner.get('host')}"
        _log.warning(
            "%s: waiting up to %g s for a heartbeat of %s",
            self._directory,
            self._stale_after_s,
            who,
        )
        deadline = time.monotonic() + self._stale_after_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._heartbeat_s / 4))
            if _modified_s(file) != last_heartbeat_s or (not owner and _read_owner(file)):
                return not (_read_owner(file) or {}).get("released")
        return False

    def _renew(self) -> None:
        """Write heartbeats until the lease is released or lost; a failed write is retried at the
        next heartbeat.
        """
        while not self._released.wait(self._heartbeat_s):
            fencing_token = self.fencing_token
            try:
                self._write_heartbeat(fencing_token)
            except FileNotFoundError:
                if fencing_token == self.fencing_token:  # not replaced by `claim_next_token`
                    return  # lost: `check` reports it
            except OSError:
                continue

    def _write_heartbeat(self, fencing_token: int) -> None:
        """Update the modification time of the claim. Raises FileNotFoundError if it was deleted."""
        file = self._file(fencing_token)
        if isinstance(file, Path):
            with file.open("r+b") as stream:
                # unlike utime, a write reaches the server of every network mount
                stream.write(b"{")
        else:
            file.write_bytes(file.read_bytes())


def check_fencing_token(directory: AnyPath, fencing_token: int) -> None:
    """Raise TrainingError if the lease with this fencing token was taken over, OSError if the
    storage fails.
    """
    fencing_tokens = [number for number, _ in _claims(directory / FOLDER)]
    newest = max(fencing_tokens, default=0)
    if newest > fencing_token or fencing_token not in fencing_tokens:
        raise TrainingError(
            f"{directory} was taken over by another process or a later attempt (fencing token "
            f"{newest}, this "
            f"process has {fencing_token}). It stops writing; nothing is lost. Give each run and "
            "set its own folder."
        )


def is_live(directory: AnyPath, stale_after_s: float = STALE_AFTER_S) -> bool:
    """Return whether a process holds the lease, without waiting: on another machine, by the age of
    its heartbeat.

    The age is by the clock of this machine, so use it for display only.
    """
    _, file = _newest_claim(directory / FOLDER)
    owner = None if file is None else _read_owner(file)
    if file is None or owner is None or owner.get("released"):
        return False
    alive = _is_alive_here(owner)
    return time.time() - _modified_s(file) < stale_after_s if alive is None else alive


def _newest_claim(folder: AnyPath) -> tuple[int, AnyPath | None]:
    """Return the claim with the highest fencing token; (0, None) without claims."""
    return max(_claims(folder), key=lambda claim: claim[0], default=(0, None))


def _claims(folder: AnyPath) -> list[tuple[int, AnyPath]]:
    """Return (fencing token, file) of all claims."""
    try:
        return [
            (int(number), file)
            for file in folder.iterdir()
            if (number := file.name.partition("-")[0]).isdecimal()
        ]
    except FileNotFoundError:
        return []


def _modified_s(file: AnyPath) -> float:
    """Return the time of the last heartbeat by the clock of the storage; -1 if the claim was
    deleted.
    """
    try:
        if isinstance(file, Path):
            # opening makes a network mount revalidate its attributes
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


def _machine_id() -> str:
    """Return an id of this boot and PID namespace (each container has one); without /proc, of
    machine and boot.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{uuid.getnode():x} {psutil.boot_time():.0f}"


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, which a later process of the same PID does not have;

    None if it is dead.
    """
    if not Path("/proc/self/stat").exists():  # macOS
        with suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # the process is dead
    # proc(5): field 3 (state) first; field 22 is the start time
    return None if fields[0] == "Z" else fields[19]


def _is_alive_here(owner: dict[str, Any]) -> bool | None:
    """Return whether the owner's process is alive; None if it ran on another machine."""
    machine = _machine_id()
    if owner.get("machine") != machine or not isinstance(owner.get("pid"), int):
        return None
    return _start_time(owner["pid"]) == owner.get("process")
