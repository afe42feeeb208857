"""Join a Ray cluster, or start one on this machine, quietly.

An address in the config or in RAY_ADDRESS is joined (that is what `ray job submit` sets); otherwise Ray starts here.
Ray's own messages stay in its log files: what a user should read, the command line prints.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mmray.errors import ResourceError, UsageError
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Cluster

# The controller looks after its workers this often; Ray's default of 2 s makes each report and each failure wait.
_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more for each group: the driver looks by itself (guard.py)
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anyone whom the user did not name
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_task_oom_retries": "5",  # Ray starts a task that its node has no memory for again for ever
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# What a process of a cluster of this machine imports while nobody has taken it yet: a second of a data actor's start.
_PRELOAD, _PRELOADED = "RAY_preload_python_modules", "ray.data,mmray.data.stream.decode_actor"
# Where an object store is, for workers of a cluster that is joined; never who may use it: Ray logs what it is given.
_STORE = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED")
INPUT_TASK_CPUS = 1  # beside the data actors: the tasks that hand them their blocks
CONNECT_TIMEOUT_S = 5.0


@contextmanager
def ray_session(section: Cluster, data_actors: int = 1, beside: Callable[[], None] | None = None) -> Iterator[None]:
    """Ray is there inside the block, its data placed; a cluster that this call started ends with it.

    `data_actors` is what the run will decode with: a cluster started here has CPUs for them. `beside` is done while Ray
    starts, in a thread; it must not import Ray's modules, which this one does. Raises what it raises.
    """
    import ray  # late: `mmray --help` must not pay for it

    from mmray.cluster.placement import set_data_placement

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        if beside is not None:
            beside()
        set_data_placement(section)
        yield
        return
    address = section.address or os.environ.get("RAY_ADDRESS")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(beside) if beside is not None else None
        _start(ray, address, section, data_actors)
    if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own there, which exits with 15
    try:
        if done is not None:
            done.result()
        _silence_ray_logging()
        set_data_placement(section)
        yield
    finally:
        ray.shutdown()


def _start(ray: object, address: str | None, section: Cluster, data_actors: int) -> None:
    from ray._common.utils import get_default_ray_temp_dir

    workers = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))}
    workers[_PRELOAD] = os.environ.get(_PRELOAD, _PRELOADED)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    try:
        if address:
            check_reachable(address)
            theirs = {name: os.environ[name] for name in (*_ENVIRONMENT, *_STORE) if name in os.environ}
            # A job's own variables are in this environment too: the same name in both is no conflict.
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
            ray.init(address=address, runtime_env={"env_vars": theirs}, **quiet)  # type: ignore[attr-defined]
        else:
            forget_dead_cluster(Path(get_default_ray_temp_dir()) / "ray_current_cluster")
            # Unless the user has set RAY_AUTH_MODE, Ray gives this cluster a token: nobody else may use it.
            with _with_environment(workers):
                ray.init(  # type: ignore[attr-defined]
                    address="local",
                    num_cpus=num_local_cpus(section, data_actors, physical=cores()),
                    include_dashboard=False,
                    **quiet,
                )
            _restrict_token_permissions()
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(f"cannot join Ray at {address or 'this machine'}: {error}") from error


@contextmanager
def _with_environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that processes started inside have too.

    For a cluster of this machine: by a runtime environment they would reach only processes begun for it, and those that
    Ray has begun ahead would never be taken.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_reachable(address: str) -> None:
    """Raise ResourceError where nothing listens at `host:port`: Ray would try for minutes.

    UsageError for an address of Ray Client, which is not told what the nodes have.
    """
    if address.startswith("ray://"):
        raise UsageError(
            f"{address} is an address of Ray Client, which mmray does not speak: submit the command as a job (`ray job "
            "submit --address http://HEAD:8265 -- mmray ...`), or run it on a node of the cluster with RAY_ADDRESS=auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto` and the like: Ray knows them
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ResourceError(
            f"nothing answers at the Ray address {address} ({error}): is the head running (`ray status` there), and is "
            "its port (6379 unless told otherwise) open from here? --cluster.address or RAY_ADDRESS names it"
        ) from None


def forget_dead_cluster(file: Path) -> None:
    """Remove Ray's note of the last cluster where nothing answers at it any more.

    A head that was killed leaves it behind, and helpers of later clusters on this machine ask there first: each attempt
    to train then takes some twelve seconds longer to end.
    """
    try:
        check_reachable(file.read_text().strip())
    except ResourceError:
        file.unlink(missing_ok=True)
    except OSError:
        return  # there is none


def _restrict_token_permissions() -> None:
    """The token that Ray has made for the clusters of this user is readable by this user alone."""
    file = Path.home() / ".ray" / "auth_token"
    if file.exists() and file.stat().st_uid == os.getuid():
        file.chmod(0o600)


def num_local_cpus(section: Cluster, data_actors: int, physical: int) -> int:
    """Logical CPUs of a cluster on this machine: at least room for the workers and for data beside them.

    Ray counts CPUs to place work, it does not bind it: a laptop of 2 cores runs 2 training workers and a data actor,
    which share the cores, where a strict count would leave the data without a slot and the run waiting for ever.
    """
    return max(physical, math.ceil(section.max_workers * section.cpus_per_worker) + data_actors + INPUT_TASK_CPUS)


def num_decode_actors(cpus: float, taken: float, memory_gib: float, block_mb: float) -> int:
    """Decoding actors that fit: a CPU each beside the training workers, and memory for themselves and their blocks."""
    actor_gib = 0.5 + 4 * block_mb / 1024
    return max(1, int(min(cpus - taken, memory_gib * 0.5 / actor_gib)))


def _silence_ray_logging() -> None:
    """Ray's loggers of this process go to its files only, warnings included; its progress bars would tear ours."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    for name in ("ray", "ray.data", "ray.train", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
