"""What the tests of the data share: a store in memory that several threads may read, as they read any other."""

import io

import pytest
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture(autouse=True)
def handles_of_their_own(monkeypatch):
    """fsspec hands the one object it holds, with its one position, to all that open a file: two threads that read it
    at once get each other's bytes. Here each opening for reading is a handle of its own, as of every real store."""
    opened = MemoryFileSystem._open

    def open_apart(system, path, mode="rb", **options):
        file = opened(system, path, mode, **options)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file

    monkeypatch.setattr(MemoryFileSystem, "_open", open_apart)
