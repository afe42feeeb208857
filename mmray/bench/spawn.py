"""Run a measurement in new worker processes joined by torch.distributed (gloo on CPUs, NCCL on GPUs), without Ray.

Each call starts new processes, so that no measurement inherits the memory of another.
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
from mmray.engine.memory_probe import keep_freed_memory
from mmray.errors import ResourceError, TrainingError, is_out_of_memory

if TYPE_CHECKING:
    from mmray.config import Config

Measure = Callable[["Config", Group, Path], Any]  # called on every rank; the result of rank 0 must be JSON


class WorkerFailed(TrainingError):
    """A worker process failed; `out_of_memory` is whether memory was the cause."""

    def __init__(self, reason: str, out_of_memory: bool) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


def device_of(config: Config) -> torch.device:
    """Return the device type a run would choose: GPUs if there is one per worker. Raises ResourceError."""
    have, workers = torch.cuda.device_count(), config.cluster.max_workers
    if config.cluster.accelerator == "cpu" or (config.cluster.accelerator == "auto" and have < workers):
        return torch.device("cpu")
    if have < workers:
        raise ResourceError(f"{workers} workers need a GPU each, this machine has {have}: lower --cluster.workers")
    return torch.device("cuda", 0)


def idle_gpu_notes(config: Config) -> list[str]:
    """Return a note if GPUs of this machine are not used although --cluster.accelerator allows them."""
    have, workers = torch.cuda.device_count(), config.cluster.max_workers
    if config.cluster.accelerator == "cpu" or have in (0, workers):
        return []
    if have < workers:
        return [f"measured on the CPU: {workers} workers need a GPU each, this machine has {have}"]
    return [f"{have - workers} of {have} GPUs are idle: cluster.workers is {workers}"]


def spawn_workers(measure: Measure, config: Config, kind: str = "") -> Any:
    """Run `measure` (a module-level function) in `cluster.most_workers` new processes; return rank 0's result.

    `measure` gets a temporary folder. `kind` is `cpu` or `cuda`, by default what a run would choose.
    Raises WorkerFailed if a process raised or was killed.
    """
    kind = kind or device_of(config).type
    with tempfile.TemporaryDirectory(prefix="mmray-bench-") as folder:
        try:
            torch.multiprocessing.spawn(_enter, (measure, config, kind, folder), nprocs=config.cluster.max_workers)
        except torch.multiprocessing.ProcessExitedException as error:
            raise _killed(error) from None
        except torch.multiprocessing.ProcessRaisedException:
            raise _raised(Path(folder)) from None
        return json.loads((Path(folder) / "answer.json").read_text())


def _enter(rank: int, measure: Measure, config: Config, kind: str, folder: str) -> None:
    try:
        group = init_worker(rank, config, kind, folder, device_index=rank)
        answer = measure(config, group, Path(folder))
    except BaseException as error:
        text = {"reason": f"{type(error).__name__}: {error}", "out_of_memory": is_out_of_memory(error)}
        (Path(folder) / f"fault-{rank}.json").write_text(json.dumps(text))
        raise
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer))
    group.barrier()
    # Skip interpreter shutdown, during which a gloo thread may release a tensor and abort the process.
    os._exit(0)


def init_worker(rank: int, config: Config, kind: str, folder: str, device_index: int) -> Group:
    """Join the process group through a file in `folder`; `kind` is `cpu` or `cuda`."""
    torch.set_num_threads(max(1, int(config.cluster.cpus_per_worker)))
    if kind == "cpu":
        keep_freed_memory()  # as in a training worker
    device = torch.device(kind, device_index) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.cluster.max_workers,
        timeout=timedelta(seconds=config.cluster.collective_timeout_s),
    )
    return Group.current(device)


def _raised(folder: Path) -> WorkerFailed:
    """Return the error of the failed rank; out of memory first, because its peers only see a broken connection."""
    faults = [json.loads(file.read_text()) for file in sorted(folder.glob("fault-*.json"))]
    text = max(faults, key=lambda fault: fault["out_of_memory"])
    return WorkerFailed(text["reason"].splitlines()[0], text["out_of_memory"])


def _killed(error: torch.multiprocessing.ProcessExitedException) -> WorkerFailed:
    """Return the error of a killed worker; a SIGKILL comes from the kernel's OOM killer."""
    if error.signal_name == "SIGKILL":
        return WorkerFailed("killed by SIGKILL, which the kernel sends when the machine is out of memory", True)
    return WorkerFailed(f"a process ended with {error.signal_name or f'exit code {error.exit_code}'}", False)
