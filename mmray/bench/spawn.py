"""Fresh processes that measure together: one a worker, joined as a run's are, with gloo on CPUs or NCCL on GPUs.

No Ray. Each call starts new processes, so that what one measurement allocated is in no other's figures.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from mmray.engine.collectives import Group
from mmray.engine.metrics.system import keep_freed_memory
from mmray.errors import ResourceError, TrainingError, is_out_of_memory

if TYPE_CHECKING:
    from mmray.config import Config

Measure = Callable[["Config", Group, Path], Any]  # of every rank; what rank 0 answers must be JSON


class RankFailed(TrainingError):
    """A process that measured came to no end; `out_of_memory` says whether it was that."""

    def __init__(self, reason: str, out_of_memory: bool) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


def device_of(config: Config) -> torch.device:
    """A GPU for each worker where there are any, as a run would choose. Raises ResourceError."""
    have, workers = torch.cuda.device_count(), config.cluster.most_workers
    if config.cluster.accelerator == "cpu" or (config.cluster.accelerator == "auto" and have < workers):
        return torch.device("cpu")
    if have < workers:
        raise ResourceError(f"mmray bench: {workers} workers with a GPU each, and this machine has {have}")
    return torch.device("cuda", 0)


def left_idle(config: Config) -> list[str]:
    """What to say where GPUs of this machine take no part, though nobody asked for that."""
    have, workers = torch.cuda.device_count(), config.cluster.most_workers
    if config.cluster.accelerator == "cpu" or have in (0, workers):
        return []
    if have < workers:
        return [f"measured on the CPU: {workers} workers want a GPU each (GPUs here: {have})"]
    return [f"{have - workers} of {have} GPUs are idle: cluster.workers is {workers}"]


def run_ranks(measure: Measure, config: Config, kind: str = "") -> Any:
    """What rank 0's `measure` (a function of a module) returns, measured in `cluster.most_workers` new processes.

    `measure` gets a folder that is gone afterwards; `kind` of device, `cpu` or `cuda`: as a run would choose where none
    is given. Raises RankFailed where one of them raised or was killed.
    """
    kind = kind or device_of(config).type
    with tempfile.TemporaryDirectory(prefix="mmray-bench-") as folder:
        try:
            torch.multiprocessing.spawn(_enter, (measure, config, kind, folder), nprocs=config.cluster.most_workers)
        except torch.multiprocessing.ProcessExitedException as error:
            raise _killed(error) from None
        except torch.multiprocessing.ProcessRaisedException:
            raise _raised(Path(folder)) from None
        return json.loads((Path(folder) / "answer.json").read_text())


def _enter(rank: int, measure: Measure, config: Config, kind: str, folder: str) -> None:
    try:
        group = join(rank, config, kind, folder, device_index=rank)
        answer = measure(config, group, Path(folder))
    except BaseException as error:
        told = {"reason": f"{type(error).__name__}: {error}", "out_of_memory": is_out_of_memory(error)}
        (Path(folder) / f"fault-{rank}.json").write_text(json.dumps(told))
        raise
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer))
    group.barrier()
    # Not by way of the interpreter's end: a thread of gloo may still release a tensor then, and abort the process.
    os._exit(0)


def join(rank: int, config: Config, kind: str, folder: str, device_index: int) -> Group:
    """The group of all ranks, which meet through a file in `folder`; `kind` is `cpu` or `cuda`."""
    torch.set_num_threads(max(1, int(config.cluster.cpus_per_worker)))
    if kind == "cpu":
        keep_freed_memory()  # as a worker does
    device = torch.device(kind, device_index) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.cluster.most_workers,
        timeout=timedelta(seconds=config.cluster.collective_timeout_s),
    )
    return Group.current(device)


def _raised(folder: Path) -> RankFailed:
    """The fault of the rank that failed by itself: memory first, for its peers see only a broken connection."""
    faults = [json.loads(file.read_text()) for file in sorted(folder.glob("fault-*.json"))]
    told = max(faults, key=lambda fault: fault["out_of_memory"])
    return RankFailed(told["reason"].splitlines()[0], told["out_of_memory"])


def _killed(error: torch.multiprocessing.ProcessExitedException) -> RankFailed:
    """SIGKILL that nobody here sent is the kernel's answer to a machine without memory."""
    if error.signal_name == "SIGKILL":
        return RankFailed("killed by SIGKILL: the kernel does that when the machine's memory is full", True)
    return RankFailed(f"a process ended with {error.signal_name or f'exit code {error.exit_code}'}", False)
