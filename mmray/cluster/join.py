"""Join a Ray cluster, or start one on this machine, quietly.

An address in the config or in RAY_ADDRESS is joined (that is what `ray job submit` sets); otherwise Ray starts here.
Ray's own messages stay in its log files: what a user should read, the command line prints.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mmray.errors import ResourceError

if TYPE_CHECKING:
    from mmray.config import Cluster

# The controller looks after its workers this often; Ray's default of 2 s makes each report and each failure wait.
_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# Beside the training workers: a data actor, and one CPU for the tasks that feed it.
SPARE_CPUS = 2


@contextmanager
def joined(section: Cluster) -> Iterator[None]:
    """Ray is there inside the block; a cluster that this call started ends with it."""
    import ray  # late: `mmray --help` must not pay for it

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        yield
        return
    address = section.address or os.environ.get("RAY_ADDRESS")
    _start(ray, address, section)
    _hush()
    try:
        yield
    finally:
        ray.shutdown()


def _start(ray: object, address: str | None, section: Cluster) -> None:
    workers = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    try:
        if address:
            ray.init(address=address, runtime_env={"env_vars": _ENVIRONMENT}, **quiet)  # type: ignore[attr-defined]
        else:
            # Unless the user has set RAY_AUTH_MODE, Ray gives this cluster a token: nobody else may use it.
            ray.init(  # type: ignore[attr-defined]
                address="local",
                num_cpus=local_cpus(section, physical=os.cpu_count() or 1),
                runtime_env={"env_vars": {**_ENVIRONMENT, **workers}},
                include_dashboard=False,
                **quiet,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(f"cannot join Ray at {address or 'this machine'}: {error}") from error


def local_cpus(section: Cluster, physical: int) -> int:
    """Logical CPUs of a cluster on this machine: at least room for the workers and for data beside them.

    Ray counts CPUs to place work, it does not bind it: a laptop of 2 cores runs 2 training workers and a data actor,
    which share the cores, where a strict count would leave the data without a slot and the run waiting for ever.
    """
    return max(physical, int(-(-section.workers * section.cpus_per_worker // 1)) + SPARE_CPUS)


def data_workers(cpus: float, taken: float, memory_gib: float, block_mb: float) -> int:
    """Decoding actors that fit: a CPU each beside the training workers, and memory for themselves and their blocks."""
    actor_gib = 0.5 + 4 * block_mb / 1024
    return max(1, min(int(cpus - taken), int(memory_gib * 0.5 / actor_gib)))


def free_memory_gib() -> float:
    return psutil.virtual_memory().available / 2**30


def _hush() -> None:
    """Ray's loggers of this process go to its files only, warnings included; its progress bars would tear ours."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    for name in ("ray", "ray.data", "ray.train", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
