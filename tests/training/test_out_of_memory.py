"""Out-of-memory errors are recognized by type, or by message if the type was lost in transfer."""

import pytest
import ray.exceptions
import torch

from mmray import errors
from mmray.engine.batch import BatchShape
from mmray.errors import is_out_of_memory


class OfLibrary(torch.OutOfMemoryError):
    """A subclass as in a library."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        OfLibrary("no block"),
        MemoryError(),
        errors.OutOfMemoryError("no memory", BatchShape(8, 4, world_size=1)),
        ray.exceptions.OutOfMemoryError("killed"),
        errors.TrainingError("Task was killed due to the node running low on memory."),
        errors.TrainingError("before any step was logged: OutOfMemoryError: allocation failed"),
        "CUDA error: out of memory",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ],
)
def test_out_of_memory_errors_are_recognized(error):
    assert is_out_of_memory(RuntimeError(error) if isinstance(error, str) else error)


@pytest.mark.parametrize(
    "message",
    [
        "shapes do not match",
        "",
        "CUDA error: an illegal memory access",
        "CUBLAS_STATUS_EXECUTION_FAILED",
        "FIND was unable to find an engine to execute this computation",  # of cuDNN
    ],
)
def test_other_errors_are_not_out_of_memory(message):
    assert not is_out_of_memory(RuntimeError(message))
