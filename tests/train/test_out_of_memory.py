"""Out-of-memory errors are recognised by type, or by message if the type was lost in transfer."""

import subprocess
import sys

import pytest
import ray.exceptions
import torch

from mmray import errors
from mmray.errors import is_out_of_memory


class TheirOwn(torch.OutOfMemoryError):
    """A subclass as in a library."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        TheirOwn("no block"),
        MemoryError(),
        errors.OutOfMemoryError("no room", 4),
        ray.exceptions.OutOfMemoryError("killed"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        errors.TrainingError("Task was killed due to the node running low on memory."),
        errors.TrainingError("before any step was logged: OutOfMemoryError: allocation failed"),
    ],
)
def test_out_of_memory_errors_are_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        ValueError(),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
    ],
)
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_sweep_recognises_oom_without_importing_torch():
    asked = "import sys, mmray.tune.results; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0
