"""Joining a cluster: what does not answer is said at once."""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from ray._private.worker import _merge_runtime_env

from mmray.cluster import connect
from mmray.cluster.connect import check_reachable, forget_dead_cluster
from mmray.config import Cluster
from mmray.errors import ResourceError, UsageError


def test_an_address_where_nothing_listens_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began_s = time.monotonic()
    with pytest.raises(ResourceError, match=f"nothing answers at the Ray address .*{port}"):
        check_reachable(f"127.0.0.1:{port}")
    assert time.monotonic() - began_s < 10


def test_an_address_where_something_listens_passes():
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        check_reachable(f"127.0.0.1:{head.getsockname()[1]}")


def test_an_address_of_ray_client_says_what_to_do():
    with pytest.raises(UsageError, match="ray job submit"):
        check_reachable("ray://head:10001")


def test_what_a_job_brings_in_its_environment_is_no_conflict_and_stays(monkeypatch):
    """Ray puts a job's variables into the driver's environment, and refuses a name that both bring."""
    brought = {"AWS_ENDPOINT_URL": "http://store:9000", "TOKENIZERS_PARALLELISM": "true", "MINE": "1"}
    for name, value in brought.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", raising=False)
    asked = {}
    connect._start(SimpleNamespace(init=lambda **given: asked.update(given)), "auto", Cluster(), 1)
    override = os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1"
    monkeypatch.delenv("RAY_OVERRIDE_JOB_RUNTIME_ENV")
    merged = _merge_runtime_env({"env_vars": brought}, asked["runtime_env"], override=override)
    assert merged["env_vars"].items() >= brought.items()
    assert merged["env_vars"]["RAY_TRAIN_ENABLE_PRINT_PATCH"] == "0"


def test_ray_resolves_its_own_words():
    check_reachable("auto")


STARTED = """
import ray
from mmray.cluster.connect import ray_session
from mmray.config import Cluster
with ray_session(Cluster(workers=1)):
    print(ray.get_runtime_context().gcs_address, ray._private.worker._global_node.webui_url or None, flush=True)
    input()
"""


@pytest.mark.cluster
def test_a_cluster_started_here_wants_the_token_of_its_user(tmp_path):
    """Its file is for the user alone, and who has none, or another, is turned away; the dashboard is on loopback."""
    own = os.environ | {"HOME": str(tmp_path)}
    del own["RAY_AUTH_MODE"]
    cluster = subprocess.Popen(
        [sys.executable, "-c", STARTED], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        address, dashboard = cluster.stdout.readline().split()
        token = tmp_path / ".ray" / "auth_token"
        assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) >= 32
        assert dashboard == "None" or dashboard.startswith("127.0.0.1:")
        asked = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        with_it = subprocess.run(asked, env=own | {"RAY_AUTH_MODE": "token"}, capture_output=True, text=True)
        assert with_it.returncode == 0, with_it.stderr
        without = subprocess.run(asked, env=own | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True)
        assert without.returncode != 0 and "nauthenticated" in without.stdout + without.stderr
    finally:
        cluster.communicate("", timeout=60)


def test_a_note_of_a_dead_cluster_is_removed_and_a_living_one_stays(tmp_path):
    note = tmp_path / "ray_current_cluster"
    forget_dead_cluster(note)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        note.write_text(address)
        head.listen()
        forget_dead_cluster(note)
        assert note.read_text() == address
    forget_dead_cluster(note)
    assert not note.exists()
