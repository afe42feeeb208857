"""Readers of rows that stall or fail; without torch, which data processes do not import."""

import os
import signal
import time
from pathlib import Path

from mmray.data.stream.reader import RowReader
from mmray.storage.requests import TransientStorageError


class FailingReader(RowReader):
    """Reads no block, like a file system that returns errors."""

    def read_block(self, plan, positions, pixels=None):
        raise TransientStorageError(5, "Input/output error")


class StalledReader(RowReader):
    """Reads nothing from step 6 on, like a file system that does not respond."""

    def read_block(self, plan, positions, pixels=None):
        if positions.max() >= 5 * 16:
            time.sleep(600)
        return super().read_block(plan, positions, pixels)


class SlowReader(RowReader):
    """Sleeps before it reads a block, so that the number of actors decides the rate."""

    def __init__(self, block_s, *arguments):
        super().__init__(*arguments)
        self.block_s = block_s

    def read_block(self, plan, positions, pixels=None):
        time.sleep(self.block_s)
        return super().read_block(plan, positions, pixels)


class StoppingReader(RowReader):
    """Stops its process once, before the rows of step 5 (16 rows per step)."""

    def read_block(self, plan, positions, pixels=None):
        mark = Path(os.environ["MMRAY_TEST_FAULTS"]) / "stopped-reader"
        if positions.max() >= 64 and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().read_block(plan, positions, pixels)
