"""Fixtures of the data packages: an object store in memory (`memory://...`), and prepare without
Ray.
"""

import io
import threading
import time
from functools import wraps

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from mmray.data.prepare import pipeline
from mmray.storage import paths


class StoredFile(io.BytesIO):
    """A file of memory:// opened for reading."""

    read = io.BytesIO.read


class Requests(list):
    """Methods of the requests to a store.

    Attributes:
        most_at_once: Largest number of requests that were made at the same time.
    """

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.running = self.most_at_once = 0

    def change_running(self, change):
        with self.lock:
            self.running += change
            self.most_at_once = max(self.most_at_once, self.running)


@pytest.fixture
def latency(monkeypatch):
    """Let each request to memory:// take 20 ms; the fixture lists their methods."""
    made = Requests()

    def delay(owner, name):
        @wraps(call := getattr(owner, name))
        def delayed(*args, **options):
            made.append(name)
            made.change_running(1)
            time.sleep(0.02)
            try:
                return call(*args, **options)
            finally:
                made.change_running(-1)

        monkeypatch.setattr(owner, name, delayed)

    delay(MemoryFileSystem, "info")
    delay(MemoryFileSystem, "rm_file")
    delay(StoredFile, "read")
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
            return fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem())), f"/{path.lstrip('/')}"
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
            packed.append(item["index"])
            yield work(item)

    monkeypatch.setattr(pipeline, "map_tasks", run)
    return packed


@pytest.fixture
def memory():
    """Address of a store in memory."""
    yield "memory://set"
    MemoryFileSystem.store.clear()
