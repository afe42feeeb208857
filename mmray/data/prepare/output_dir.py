"""The output folder of a prepare: create it, lock it, delete stale files."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mmray.data.prepare.pack import record_path
from mmray.data.prepare.tasks import ATTEMPT_SUFFIX
from mmray.data.store.manifest import MANIFEST, PARTS, SHARDS, Shard
from mmray.errors import UsageError
from mmray.storage import lease
from mmray.storage.paths import to_path
from mmray.storage.storage import TEMP_SUFFIX, Storage

_LOCK = ".lock"


def create_output_dir(out: Storage) -> None:
    """Create the folder. Raises UsageError if it contains anything else."""
    try:
        names = set(out.listdir()) - {_LOCK, lease.FOLDER}
        if names and not names & {MANIFEST, PARTS}:
            raise UsageError(f"{out.address} is not empty and is not a prepared set: choose another folder")
        out.mkdir(PARTS)
        out.mkdir(SHARDS)
    except OSError as error:
        raise UsageError(f"cannot write to {out.address} ({error}): choose another folder") from None


@contextmanager
def exclusive_lock(out: Storage) -> Iterator[None]:
    """Exclude a second prepare of the folder; uses a lease on an object store. Raises UsageError."""
    if out.local_path is None:
        with lease.Lease(to_path(out.address), activity="being prepared", advice="choose another folder"):
            yield
        return
    try:
        lock = os.open(out.local_path / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UsageError(f"cannot write to {out.address} ({error}): choose another folder") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 200).decode(errors="replace")
            raise UsageError(f"{out.address} is being prepared by {holder}: wait until it has finished") from None
        os.truncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        os.close(lock)  # closing releases the lock


def remove_temp_files(out: Storage) -> None:
    """Delete the partial files of a killed prepare."""
    for folder in ("", SHARDS, PARTS):
        for name in out.listdir(folder):
            if name.endswith((TEMP_SUFFIX, ATTEMPT_SUFFIX)):
                out.delete(f"{folder}/{name}".lstrip("/"))


def remove_stale_files(out: Storage, shards: Iterable[Shard], num_chunks: int) -> None:
    """Delete all shards and records except those of this prepare: leftovers of killed tasks and earlier settings.

    `shards` come from this process, not from the records, because another writer may have replaced one on a store.
    """
    wanted = {shard.file for shard in shards} | {record_path(index) for index in range(num_chunks)}
    for folder in (SHARDS, PARTS):
        for name in out.listdir(folder):
            if f"{folder}/{name}" not in wanted:
                out.delete(f"{folder}/{name}")
