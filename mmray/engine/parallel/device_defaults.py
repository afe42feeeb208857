"""Values of the settings that are `auto`, and global flags of torch, for a kind of device."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmray.engine.parallel.float8 import Capability, check_device
from mmray.errors import UsageError, first_line
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Train
    from mmray.engine.collectives import Group

MAX_COMPILE_WORKERS = 32  # inductor's own limit
# On an H200: seconds to compile CLIP without cached kernels, and the share of an eager step that it
# saves. An eager step takes a quarter of the peak, and at least the time of launching its kernels.
COMPILE_S = 40.0
COMPILE_SAVING = 0.25
EAGER_UTILIZATION = 0.25
MIN_STEP_S = 0.02
DEFAULT_PEAK_FLOPS = 1e14
NO_COMPILER = (
    "torch.compile cannot build a kernel here. Install gcc (for a CPU g++) and the headers of "
    "Python (python3-dev)"
)


@dataclass(frozen=True)
class DeviceDefaults:
    """The fastest settings of a device, which replace `auto`.

    None depends on its memory: the largest micro-batch (`batch.micro auto`) is measured instead.

    Attributes:
        precision: What `train.precision` `auto` becomes: `bf16`, `fp16` or `fp32`.
        compile: What `train.compile` `auto` becomes: `inductor` (a backend of torch.compile) or
            `none`.
        tf32: Whether float32 matrix products and convolutions use TF32.
    """

    precision: str
    compile: str
    tf32: bool


def device_defaults(capability: Capability | None) -> DeviceDefaults:
    """Return the fastest settings of a device, which replace `auto`."""
    if capability is None:
        return DeviceDefaults("fp32", "none", tf32=False)
    if capability < (8, 0):
        return DeviceDefaults("fp16", "none", tf32=False)
    return DeviceDefaults("bf16", "inductor", tf32=True)


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of a GPU, such as (9, 0) of an H100; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def resolve_auto(
    train: Train, group: Group, notify: Callable[[str, str], None] = lambda label, text: None
) -> Train:
    """Replace `auto` in `precision` and `compile` of the `train` section by the fastest setting of
    the oldest device of the ranks: bf16 or (older GPUs) fp16, fp32 on a CPU; inductor on GPUs from
    compute capability 8.0 on, if it works there, otherwise none.

    inductor is tried with one kernel on each rank, also if `compile` names it.

    Args:
        group: All ranks, which call this together.
        notify: Called with (label, line) if the model is not compiled because torch.compile does
            not work on a rank.

    Returns:
        The section without `auto` in `precision` and `compile`.

    Raises:
        UsageError: `compile` is `inductor`, which does not work on some rank, or `float8` does not
            make training faster on these devices; raised on every rank.
    """
    capability = capability_of(group.device)
    code = group.all_reduce_min(-1 if capability is None else 10 * capability[0] + capability[1])
    oldest = None if code < 0 else divmod(code, 10)
    defaults = device_defaults(oldest)
    backend = defaults.compile if train.compile == "auto" else train.compile
    if backend == "inductor":
        limit_compile_workers()
        problems = group.all_gather_objects(compile_problem(group.device))
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if failed and train.compile == "inductor":
            raise UsageError(
                f"train.compile inductor: {NO_COMPILER}, or set train.compile none. {failed[0]}"
            )
        if failed:
            backend = "none"
            cost = "compile none, which can take a third of the speed"
            notify("device", f"{cost}: {NO_COMPILER}. {failed[0]}")
    precision = defaults.precision if train.precision == "auto" else train.precision
    train = train.replace(precision=precision, compile=backend)
    check_device(train, oldest)
    return train


def compile_pays(row_flops: float, rows: int, steps: int, peak_flops: float) -> bool:
    """Return whether torch.compile saves a run more time than it takes, by an estimate.

    It takes 40 s, and saves a quarter of the time of all steps. A step without it takes row_flops x
    rows at a quarter of the peak, at least 20 ms.
    """
    peak = DEFAULT_PEAK_FLOPS if math.isnan(peak_flops) else peak_flops
    step_s = max(MIN_STEP_S, row_flops * rows / (EAGER_UTILIZATION * peak))
    return steps * step_s * COMPILE_SAVING > COMPILE_S


def limit_compile_workers() -> None:
    """Divide the cores of a node among compile processes (TORCHINDUCTOR_COMPILE_THREADS if not
    set).
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = min(MAX_COMPILE_WORKERS, max(1, cores() // ranks))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))


@contextmanager
def create_cuda_context(device: torch.device) -> Iterator[None]:
    """Context manager in whose block the CUDA context of a GPU is created by another thread, so
    that the block can import modules meanwhile.

    torch would otherwise create it at its first use of the GPU, and block all threads of Python for
    seconds. It uses a context that exists. Errors are ignored, because torch raises them at its
    first use of the GPU.

    Args:
        device: The GPU, as CUDA_VISIBLE_DEVICES numbers it; without effect for a CPU.
    """
    if device.type != "cuda":
        yield
        return
    thread = threading.Thread(target=_create_context, args=(device.index or 0,), daemon=True)
    thread.start()
    yield
    thread.join()


def _create_context(index: int) -> None:
    """Create the primary context of a GPU with the driver's library; ctypes releases the GIL."""
    with suppress(OSError, AttributeError):  # no driver, or ROCm
        driver = ctypes.CDLL("libcuda.so.1")
        gpu = ctypes.c_int()
        context = ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def compile_problem(device: torch.device) -> str:
    """Compile one small kernel with inductor to see whether it works.

    On a GPU this needs Triton, a C compiler, the headers of Python and the library of the driver.
    It is compiled without inductor's caches, because Triton would find its launcher there. On a CPU
    they are used: the headers that inductor compiles first, in 10 s, are those of the run.

    Args:
        device: Device of the kernel.

    Returns:
        Why it failed; empty if it worked.
    """
    try:
        from torch._inductor import config
        from torch._inductor.utils import fresh_cache

        # In this process: in torch 2.11 compile workers would keep the folder of this cache, so no
        # run would find the kernels of an earlier one.
        caches = nullcontext() if device.type == "cpu" else fresh_cache()
        with caches, config.patch(compile_threads=1):
            torch.compile(torch.sin)(torch.zeros(8, device=device))
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and eager code works
        return first_line(error)
    return ""


def configure_torch(train: Train, device: torch.device) -> str:
    """Set the global flags of torch for a GPU: TF32 (not for `train.precision` fp32), cuDNN's
    benchmark (not for `train.deterministic`), and an allocator with expandable segments (unless
    PYTORCH_ALLOC_CONF is set). Without effect for a CPU.

    Args:
        train: The `train` section, without `auto` in `precision` and `compile`.

    Returns:
        A line for the console about the GPU and its settings; empty for a CPU.
    """
    if device.type != "cuda":
        return ""
    defaults = device_defaults(capability_of(device))
    torch.backends.cudnn.benchmark = not train.deterministic
    # a user who chooses fp32 gets all its digits
    tf32 = defaults.tf32 and train.precision != "fp32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # by default convolutions use TF32, whatever the precision of matmul
    torch.backends.cudnn.allow_tf32 = tf32
    # Batches with captions of different lengths fragment fixed segments.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        with warnings.catch_warnings():
            # torch 2.11 does not have the replacement yet
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    memory_gib = torch.cuda.mem_get_info(device)[1] / 2**30
    name = torch.cuda.get_device_name(device)
    return f"{name}, {memory_gib:.0f} GiB: {train.precision}, compile {train.compile}"
