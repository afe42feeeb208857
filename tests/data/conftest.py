"""Fixtures of the data packages: an object store in memory (`memory://...`), and prepare without
Ray.
"""

import io
import threading
from contextlib import contextmanager
from functools import wraps

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from mmray.data.prepare import pipeline
from mmray.storage import paths


class StoredFile(io.BytesIO):
    """A file of memory:// opened for reading."""

    read = io.BytesIO.read


class Store(fs.FSSpecHandler):
    """Gives files the times that a store has."""

    @staticmethod
    def _create_file_info(path, info):
        found = fs.FSSpecHandler._create_file_info(path, info)
        return fs.FileInfo(path, found.type, size=found.size, mtime=info.get("created"))


class Requests(list):
    """Methods of the requests to a store.

    Attributes:
        awaited: Reads of images and deletions wait until so many of them were made at the same
            time, or 5 s.
        most_at_once: Largest number of requests that were made at the same time.
    """

    def __init__(self):
        super().__init__()
        self.awaited = 1
        self._condition = threading.Condition()
        self._running = self.most_at_once = 0

    def _overlapped(self):
        return self.most_at_once >= self.awaited

    @contextmanager
    def running(self, name, waits):
        with self._condition:
            self.append(name)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self._condition.notify_all()
            if waits and not self._condition.wait_for(self._overlapped, 5):
                self.awaited = 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1


@pytest.fixture
def store_requests(monkeypatch):
    """The requests to memory://."""
    made = Requests()

    def record(owner, name):
        @wraps(call := getattr(owner, name))
        def recorded(*args, **options):
            is_image = name == "read" and args[0].getvalue().startswith(b"\x89PNG")
            with made.running(name, is_image or name == "rm_file"):
                return call(*args, **options)

        monkeypatch.setattr(owner, name, recorded)

    record(MemoryFileSystem, "info")
    record(MemoryFileSystem, "rm_file")
    record(StoredFile, "read")
    return made


@pytest.fixture(autouse=True)
def memory_store(monkeypatch):
    """Serve memory:// through fsspec, with one handle per opened file as on a real store."""
    open_shared, open_real = MemoryFileSystem._open, paths._from_uri

    def open_separately(system, path, mode="rb", **options):
        file = open_shared(system, path, mode, **options)
        return StoredFile(file.getvalue()) if mode == "rb" else file

    def from_uri(uri):
        scheme, _, path = uri.partition("://")
        if scheme == "memory":
            return fs.PyFileSystem(Store(MemoryFileSystem())), f"/{path.lstrip('/')}"
        return open_real(uri)

    monkeypatch.setattr(MemoryFileSystem, "_open", open_separately)
    monkeypatch.setattr(paths, "_from_uri", from_uri)
    monkeypatch.setattr(paths, "SCHEMES", (*paths.SCHEMES, "memory"))


@pytest.fixture
def in_process(monkeypatch):
    """Pack without Ray; the fixture lists the chunks that were packed."""
    packed = []

    def run(work, items):
        for item in items:
            packed.append(item.index)
            yield work(item)

    monkeypatch.setattr(pipeline, "map_tasks", run)
    return packed


@pytest.fixture
def memory():
    """Address of a store in memory."""
    yield "memory://set"
    MemoryFileSystem.store.clear()
