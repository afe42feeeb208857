"""Freed memory stays with the process, so its pages are not faulted again."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys
import numpy as np
from mmray.engine.memory_probe import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    print("not heard")
    raise SystemExit
def work():
    whole = np.ones(50 * 2**20, np.uint8)
    return np.ones(20 * 2**20, np.uint8)[0] + whole[0]
work(), work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_second_allocation_faults_no_pages():
    """70 MB are 17,920 pages of 4 KiB, or 35 large ones."""
    said = {
        way: subprocess.run([sys.executable, "-c", FAULTS, way], capture_output=True, text=True, check=True).stdout
        for way in ("kept", "given back")
    }
    if said["kept"] == "not heard\n":
        pytest.skip("not glibc's allocator")
    assert int(said["kept"]) < int(said["given back"]) / 10
