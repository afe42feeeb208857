"""Values of the settings that are `auto`, and global flags of torch, for a kind of device."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mmray.config import Train
    from mmray.engine.collectives import Group

Capability = tuple[int, int]  # compute capability of a GPU, such as (9, 0) of an H100


@dataclass(frozen=True)
class DeviceDefaults:
    """The fastest settings of a device.

    None depends on its memory: `batch.micro auto` measures the rows that fit.
    """

    precision: str  # of train.precision auto
    compile: str  # of train.compile auto
    channels_last: bool  # of train.channels_last auto: tensor cores convolve in this layout
    tf32: bool  # in float32 matrix products and convolutions
    cudnn_benchmark: bool
    # of torch's allocator: batches of different caption lengths fragment fixed ones
    expandable_segments: bool


def device_defaults(capability: Capability | None) -> DeviceDefaults:
    """Return the defaults of a GPU of this compute capability; None: of a CPU."""
    if capability is None:
        return DeviceDefaults("fp32", "none", False, False, False, False)
    ampere = capability >= (8, 0)  # the first with bf16 and TF32
    return DeviceDefaults(
        "bf16" if ampere else "fp16", "inductor" if ampere else "none", True, ampere, True, True
    )


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of a GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def resolve_auto(train: Train, group: Group) -> Train:
    """Return `train` with each `auto` replaced by the default of the oldest device of the ranks."""
    capability = capability_of(group.device)
    oldest = group.all_reduce_min(-1 if capability is None else 10 * capability[0] + capability[1])
    defaults = device_defaults(None if oldest < 0 else divmod(oldest, 10))
    can_compile = group.all_reduce_min(int(_has_compiler())) > 0
    resolved = {
        "precision": defaults.precision,
        "compile": defaults.compile if can_compile else "none",
        "channels_last": defaults.channels_last and train.parallel not in ("fsdp", "hsdp"),
    }
    return train.replace(
        **{name: value for name, value in resolved.items() if getattr(train, name) == "auto"}
    )


def _has_compiler() -> bool:
    """Return True if Triton is installed and finds a C compiler, which inductor needs on a GPU."""
    return find_spec("triton") is not None and any(
        map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))
    )


def configure_torch(train: Train, device: torch.device) -> str:
    """Set the global flags of torch for a device; return a line about the GPU and its settings,
    empty for a CPU.
    """
    defaults = device_defaults(capability_of(device))
    if device.type != "cuda":
        return ""
    torch.backends.cudnn.benchmark = defaults.cudnn_benchmark and not train.deterministic
    # a user who chooses fp32 gets all its digits
    tf32 = defaults.tf32 and train.precision != "fp32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # by default convolutions use TF32, whatever the precision of matmul
    torch.backends.cudnn.allow_tf32 = tf32
    if (
        defaults.expandable_segments
        and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    ):
        with warnings.catch_warnings():
            # torch 2.11 does not have the replacement yet
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    memory_gib = torch.cuda.mem_get_info(device)[1] / 2**30
    layout = "channels-last" if train.channels_last else "contiguous"
    name = torch.cuda.get_device_name(device)
    return (
        f"{name}, {memory_gib:.0f} GiB: {train.precision}, compile {train.compile}, {layout} "
        "convolutions"
    )
