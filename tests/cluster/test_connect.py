"""Connecting to Ray: addresses, the environment of jobs, authentication."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray.exceptions
from ray._private.worker import _merge_runtime_env

from mmray.cluster import connect
from mmray.cluster.connect import check_reachable
from mmray.config import Cluster
from mmray.errors import ResourceError, UsageError


def test_working_directory_does_not_replace_modules_of_python(tmp_path):
    (tmp_path / "my_parts.py").touch()
    assert connect.python_path(tmp_path, "/a:/b") == f"{tmp_path}:/a:/b"
    assert connect.python_path(tmp_path, "") == str(tmp_path)
    for name in ("random.py", "queue.py", "ray/__init__.py"):
        folder = tmp_path / name.partition(".")[0].replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
        assert connect.python_path(folder, "/a:/a") == "/a"


def test_a_shared_cluster_is_not_said_to_start(monkeypatch):
    monkeypatch.setattr(connect, "is_connected", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert connect.session_title(Cluster()) == "starting Ray"
    assert connect.session_title(Cluster(address="head:6379")) == "connecting to Ray"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert connect.session_title(Cluster()) == "connecting to Ray"


@pytest.mark.parametrize("name", ["numpy.py", "yaml.py", "torch/__init__.py"])
def test_file_that_replaces_a_package_in_workers_is_refused(tmp_path, name):
    (tmp_path / "train.py").touch()
    connect.check_working_dir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"would replace the package .* rename it"):
        connect.check_working_dir(tmp_path)


def test_ray_gets_a_short_folder_for_its_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr(connect.tempfile, "gettempdir", lambda: "/t" * 30)
    monkeypatch.setenv("RAY_TMPDIR", "")  # so that it is restored
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(connect, "_SHORT_TEMP_DIR", str(tmp_path / "none"))
    with pytest.raises(ResourceError, match="Set RAY_TMPDIR to a folder of at most"):
        connect._shorten_temp_dir()
    monkeypatch.setattr(connect, "_SHORT_TEMP_DIR", str(tmp_path))
    connect._shorten_temp_dir()
    assert os.environ["RAY_TMPDIR"] == str(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", "/mine")
    connect._shorten_temp_dir()
    assert os.environ["RAY_TMPDIR"] == "/mine"


def test_ray_gets_a_token_without_a_writable_home(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    connect._set_auth_token()
    assert "RAY_AUTH_TOKEN" not in os.environ and (tmp_path / ".ray").is_dir()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    connect._set_auth_token()
    assert "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.delenv("RAY_AUTH_MODE")
    connect._set_auth_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_unreachable_address_fails_within_seconds():
    start_s = time.monotonic()
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ResourceError, match=f"no response from Ray at {address}"):
            check_reachable(address)
        head.listen()
        check_reachable(address)
    assert time.monotonic() - start_s < 60
    check_reachable("auto")  # resolved by Ray


CONNECTING = """
import sys
from mmray.cluster.connect import ray_session
from mmray.config import Cluster
from mmray.errors import ResourceError
try:
    with ray_session(Cluster(address=sys.argv[1])):
        pass
except ResourceError as error:
    print(error)
"""


def test_missing_token_is_one_line(tmp_path):
    own = os.environ | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        words = [sys.executable, "-c", CONNECTING, address]
        done = subprocess.run(words, env=own, capture_output=True, text=True)
    [line] = done.stdout.splitlines()
    assert line.startswith(f"cannot connect to Ray at {address}: Token authentication is enabled")
    assert "RAY_AUTH_TOKEN" in line and done.stderr == ""


def test_ray_client_address_suggests_job_submission():
    with pytest.raises(UsageError, match="ray job submit"):
        check_reachable("ray://head:10001")


def test_environment_of_submitted_job_is_kept(monkeypatch):
    """Ray copies a job's variables into the driver's environment, and by default refuses a name set
    in both.
    """
    job = {"AWS_ENDPOINT_URL": "http://store:9000", "TOKENIZERS_PARALLELISM": "true", "MINE": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", raising=False)
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    arguments = {}
    monkeypatch.setattr("ray.init", lambda **given: arguments.update(given))
    connect._start("auto", Cluster(), 1)
    override = os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1"
    monkeypatch.delenv("RAY_OVERRIDE_JOB_RUNTIME_ENV")
    merged = _merge_runtime_env({"env_vars": job}, arguments["runtime_env"], override=override)
    assert merged["env_vars"].items() >= job.items()
    assert merged["env_vars"]["RAY_TRAIN_ENABLE_PRINT_PATCH"] == "0"


def test_error_of_ray_outside_a_task_names_ray(monkeypatch):
    """For example the head ends while nodes are counted; an error inside a task is a bug and keeps
    its type.
    """
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(connect, "_start", lambda *_: None)
    for error, expected in (
        (ray.exceptions.RaySystemError("the head does not answer"), ResourceError),
        (
            ray.exceptions.RayTaskError("work", "traceback", ValueError("x")),
            ray.exceptions.RayTaskError,
        ),
    ):
        with pytest.raises(expected), connect.ray_session(Cluster()):
            raise error


STARTED = """
import ray
from mmray.cluster.connect import ray_session
from mmray.config import Cluster
with ray_session(Cluster(workers=1)):
    print(ray.get_runtime_context().gcs_address, flush=True)
    input()
"""


@pytest.mark.cluster
def test_local_cluster_requires_the_users_token(tmp_path):
    """The token file is private, a client without the token is rejected, and only the processes
    run that a run on this machine needs: no dashboard, autoscaler and monitor of log files.
    """
    own = os.environ | {"HOME": str(tmp_path)}
    del own["RAY_AUTH_MODE"]
    cluster = subprocess.Popen(
        [sys.executable, "-c", STARTED],
        env=own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = cluster.stdout.readline().strip()
        processes = psutil.Process(cluster.pid).children(recursive=True)
        files = {Path(word).name for each in processes for word in each.cmdline()}
        assert "raylet" in files and files.isdisjoint(
            {"dashboard.py", "monitor.py", "log_monitor.py"}
        )
        token = tmp_path / ".ray" / "auth_token"
        assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) >= 32
        asked = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        with_it = subprocess.run(
            asked, env=own | {"RAY_AUTH_MODE": "token"}, capture_output=True, text=True
        )
        assert with_it.returncode == 0, with_it.stderr
        without = subprocess.run(
            asked, env=own | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True
        )
        assert without.returncode != 0 and "nauthenticated" in without.stdout + without.stderr
    finally:
        cluster.communicate("", timeout=180)
