"""Connect to a Ray cluster, or start one on this machine, without Ray's console output."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmray.errors import Log, ResourceError, UsageError
from mmray.machine import cores

if TYPE_CHECKING:
    from mmray.config import Cluster

# Ray appends up to 66 characters (ray/session_DATE_TIME_PID/sockets/plasma_store) to a path of at
# most 107 bytes.
MAX_TEMP_DIR = 40
_WORKER_PACKAGES = (
    *("numpy", "pandas", "pyarrow", "torch", "torchvision", "transformers", "tokenizers"),
    *("safetensors", "PIL", "pydantic", "yaml", "orjson", "psutil", "simplejpeg"),
)
_SHORT_TEMP_DIR = "/tmp"
# Imported ahead, so that each decode actor starts a second faster.
_PRELOADED_MODULES = "mmray.data.stream.decode_actor"
# Object storage settings for workers of a remote cluster. No credentials, because Ray logs these
# values.
S3_ENV = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_EC2_METADATA_DISABLED",
)
# Each decides how Ray finds the token of a cluster; otherwise it is stored in HOME.
_AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# Messages of Ray that are not shown. The run reports lost workers and nodes, and what it waits for,
# itself; the log of another node's raylet, and the number of processes that runs start together,
# need no action.
_HIDDEN_MESSAGES = (
    "A worker died or was killed|Raylet is terminated|worker processes have been started"
    "|has been marked dead|infeasible resource requests"
)
INPUT_TASK_CPUS = 1  # reserved for tasks of Ray Data, which prepare sets
CONNECT_TIMEOUT_S = 5.0


def is_connected() -> bool:
    """Return whether this process is connected to a Ray cluster; Ray is not imported."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def needs_ray(cluster_config: Cluster) -> bool:
    """Return whether a command needs Ray, because the settings request it or this process is
    connected; otherwise a process of this machine can be its worker.
    """
    return is_connected() or asks_for_cluster(cluster_config)


def asks_for_cluster(cluster_config: Cluster) -> bool:
    """Return whether settings or RAY_ADDRESS request several workers or a Ray cluster."""
    cluster_only = (_address(cluster_config), cluster_config.resources_per_worker)
    return cluster_config.max_workers > 1 or cluster_config.wait_for_nodes or any(cluster_only)


def session_title(cluster_config: Cluster) -> str:
    """Return what `ray_session` does first, for people."""
    is_shared = is_connected() or _address(cluster_config)
    return "connecting to Ray" if is_shared else "starting Ray"


def _address(cluster_config: Cluster) -> str | None:
    return cluster_config.address or os.environ.get("RAY_ADDRESS")


@contextmanager
def data_session(cluster_config: Cluster, log: Log) -> Iterator[None]:
    """Context manager that connects to Ray for tasks of data if they need it (`needs_ray`).

    Raises:
        ResourceError: The cluster cannot be reached, or can never have a CPU for data.
    """
    if not needs_ray(cluster_config):
        yield
        return
    with ray_session(cluster_config, log=log):
        from mmray.cluster.placement import check_data_capacity

        check_data_capacity(cluster_config)
        yield


@contextmanager
def ray_session(
    cluster_config: Cluster,
    decode_actors: int = 1,
    while_starting: Callable[[], None] | None = None,
    log: Log = lambda _, __: None,
) -> Iterator[None]:
    """Context manager that connects to a Ray cluster, or starts Ray on this machine, and
    disconnects at the end.

    Without effect on the connection if this process is already connected.

    Args:
        decode_actors: Number of decode actors; if Ray is started here, it gets CPUs for them.
        while_starting: Called in a thread while Ray starts; it must not import Ray. Its errors are
            raised.
        log: Called with (line, label), while tasks of Ray Data wait for a CPU.

    Raises:
        ResourceError: Ray cannot be reached or started, or fails in the block.
        UsageError: The address is one of Ray Client, or a file of the working directory replaces a
            package of the workers.
    """
    # Read when Ray is imported: Ray's driver prints these messages whatever `_start` sets.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _HIDDEN_MESSAGES)
    import ray  # here: `mmray --help` must not import Ray
    import ray.exceptions

    from mmray.cluster.ray_internals import ENVIRONMENT
    from mmray.cluster.waiting import set_data_jobs

    set_data_jobs(cluster_config, log)
    for name, value in {**ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        if while_starting is not None:
            while_starting()
        yield
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(while_starting) if while_starting is not None else None
        _start(_address(cluster_config), cluster_config, decode_actors)
    if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler exits with code 15
    try:
        if future is not None:
            future.result()
        for name in ("ray", "ray.train", "ray.tune"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    except ray.exceptions.RayTaskError:  # a RayError too, but a bug of the task
        raise
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"Ray failed: {error}. Check `ray status`, and rerun the same command"
        ) from error
    finally:
        ray.shutdown()


def _start(address: str | None, cluster_config: Cluster, decode_actors: int) -> None:
    import ray

    from mmray.cluster.ray_internals import (
        ENVIRONMENT,
        PRELOAD_VARIABLE,
        STATE_TRACKING_VARIABLE,
        essential_processes,
    )

    log_options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    check_working_dir(Path.cwd())
    try:
        if address:
            check_reachable(address)
            os.environ.setdefault(STATE_TRACKING_VARIABLE, "1")
            names = (*ENVIRONMENT, STATE_TRACKING_VARIABLE, *S3_ENV)
            env_vars = {name: os.environ[name] for name in names if name in os.environ}
            # A submitted job has the variables of its runtime environment here too; equal names are
            # no conflict.
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
            ray.init(address=address, runtime_env={"env_vars": env_vars}, **log_options)
        else:
            # For Ray's prestarted workers, which have no runtime environment.
            os.environ["PYTHONPATH"] = python_path(Path.cwd(), os.environ.get("PYTHONPATH", ""))
            os.environ.setdefault(PRELOAD_VARIABLE, _PRELOADED_MODULES)
            _shorten_temp_dir()
            _set_auth_token()
            # A local cluster requires a token unless the user sets RAY_AUTH_MODE.
            num_cpus = num_local_cpus(cluster_config, decode_actors, available_cores=cores())
            with essential_processes():
                ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **log_options)
            if "RAY_AUTH_TOKEN" not in os.environ:
                token = Path.home() / ".ray" / "auth_token"
                if token.exists() and token.stat().st_uid == os.getuid():
                    token.chmod(0o600)
    except ray.exceptions.AuthenticationError as error:
        raise ResourceError(
            f"cannot connect to Ray at {address or 'this machine'}: {error.message}. Set "
            "RAY_AUTH_MODE as on the head, and RAY_AUTH_TOKEN to the head's token (there in "
            "~/.ray/auth_token)"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"cannot connect to Ray at {address or 'this machine'}: {error}"
        ) from error


def _shorten_temp_dir() -> None:
    """Let Ray use /tmp if the path of its sockets below TMPDIR would be too long.

    Raises:
        ResourceError: /tmp is not writable either.
    """
    folder = tempfile.gettempdir()
    if "RAY_TMPDIR" in os.environ or len(folder) <= MAX_TEMP_DIR:
        return
    if not os.access(_SHORT_TEMP_DIR, os.W_OK):
        raise ResourceError(
            f"TMPDIR is {folder}: with it the paths of Ray's sockets are longer than the 107 bytes "
            f"of the system. Set RAY_TMPDIR to a folder of at most {MAX_TEMP_DIR} characters"
        )
    os.environ["RAY_TMPDIR"] = _SHORT_TEMP_DIR


def _set_auth_token() -> None:
    """Set the token of a local cluster in the environment if Ray cannot store one in HOME."""
    if any(name in os.environ for name in _AUTH_VARIABLES):
        return
    try:
        folder = Path.home() / ".ray"
        folder.mkdir(parents=True, exist_ok=True)
        is_usable = os.access(folder / "auth_token", os.R_OK) or os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        is_usable = False
    if not is_usable:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def python_path(working_dir: Path, before: str) -> str:
    """Return PYTHONPATH for processes of a local Ray: the working directory, then `before`.

    The directory is left out if a file in it, such as random.py, would replace a module of Python
    or Ray. Ray adds it in workers after their start.
    """
    paths = list(filter(None, before.split(os.pathsep)))
    if _modules_in(working_dir).isdisjoint({*sys.stdlib_module_names, "ray"}):
        paths.insert(0, str(working_dir))
    return os.pathsep.join(dict.fromkeys(paths))


def check_working_dir(working_dir: Path) -> None:
    """Raise UsageError if a file of the working directory, which Ray puts first, replaces a
    package.
    """
    if shadowed := sorted(_modules_in(working_dir) & set(_WORKER_PACKAGES)):
        raise UsageError(
            f"{shadowed[0]} in {working_dir} would replace the package {shadowed[0]} in the "
            "workers: rename it, or start the command in another folder"
        )


def _modules_in(folder: Path) -> set[str]:
    """Return the names of the modules and packages of Python in a folder."""
    modules = {each.stem for each in folder.glob("*.py")}
    return modules | {each.parent.name for each in folder.glob("*/__init__.py")}


def check_reachable(address: str) -> None:
    """Check that Ray can be reached at an address, because Ray itself would try for minutes.

    Args:
        address: `host:port`, for example `10.0.0.5:6379`. Other values, such as `auto`, are not
            checked.

    Raises:
        ResourceError: Nothing listens at the address.
        UsageError: It is an address of Ray Client (`ray://...`).
    """
    if address.startswith("ray://"):
        raise UsageError(
            f"{address}: Ray Client addresses are not supported. Submit the command as a job (`ray "
            "job submit --address http://HEAD:8265 -- mmray ...`), or run it on a node of the "
            "cluster with RAY_ADDRESS=auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto` and similar, which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ResourceError(
            f"no response from Ray at {address} ({error}). Check that the head is running (`ray "
            "status` there), that its port (6379 by default) is reachable, and the address "
            "(--address, --cluster.address or RAY_ADDRESS)"
        ) from None


def num_local_cpus(cluster_config: Cluster, decode_actors: int, available_cores: int) -> int:
    """Return the number of logical CPUs with which Ray is started on this machine.

    It is the number of cores, or the CPUs of all workers and of their decode actors and one more,
    if these are more; they then share cores.
    """
    workers = cluster_config.max_workers
    cpus = max(1, cluster_config.resolve_cpus(available_cores))
    decode_cpus = workers * math.ceil(decode_actors / workers)  # each worker has its own
    return max(available_cores, math.ceil(workers * cpus) + decode_cpus + INPUT_TASK_CPUS)
