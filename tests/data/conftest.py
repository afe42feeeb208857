"""Fixtures of the data packages: an object store in memory (`memory://...`), and prepare without Ray."""

import io

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from mmray.data.prepare import pipeline
from mmray.storage import storage


@pytest.fixture(autouse=True)
def memory_store(monkeypatch):
    """Serve memory:// through fsspec, with one handle per opened file as on a real store."""
    open_shared, open_real = MemoryFileSystem._open, storage.open_filesystem

    def open_separately(system, path, mode="rb", **options):
        file = open_shared(system, path, mode, **options)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file

    def open_filesystem(address):
        scheme, _, path = address.partition("://")
        if scheme == "memory":
            return fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem())), f"/{path}"
        return open_real(address)

    monkeypatch.setattr(MemoryFileSystem, "_open", open_separately)
    monkeypatch.setattr(storage, "open_filesystem", open_filesystem)
    monkeypatch.setattr(storage, "SCHEMES", (*storage.SCHEMES, "memory"))


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
