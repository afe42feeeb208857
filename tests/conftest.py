"""Fixtures of all tests: a local Ray, an S3 server, and optional real data."""

import gc
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

import hypothesis
import pytest

from tests import forked
from tests.ray_workers import fork_workers

gc.disable()  # until all tests are collected: imports leave millions of objects, and few to free

# The same examples in each run, and no limits of time, which a loaded machine does not keep.
hypothesis.settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

# Otherwise hundreds of processes would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Set before the first Ray import: one authentication mode for heads and clients, short
# health-check intervals, and no actor that keeps the states of runs for the dashboard.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use no network: without this, each name on the hub is requested several times.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Address of the test S3 server (`s3` starts it); tests use no other one. No other process can take
# the port meanwhile.
S3_SOCKET = socket.create_server(("127.0.0.1", 0))
os.environ |= {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{S3_SOCKET.getsockname()[1]}",
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "canary-of-the-tests",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = str(ROOT)  # workers import modules of tests/
# Ray keeps the address of the last started head in this folder
if "PYTEST_XDIST_WORKER" in os.environ:
    # A short path, because that of a Unix socket has at most 107 bytes.
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
SHARED = Path(os.environ.get("MMRAY_SHARED", ROOT.parent / "shared" / "data"))


def start_ray(**options):
    """Start a Ray with 8 logical CPUs on this machine."""
    import ray

    from mmray.cluster.ray_internals import essential_processes

    fork_workers()
    options |= {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with essential_processes():
        return ray.init(address="local", num_cpus=8, **options)


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory):
    """A Ray on this machine, reused by later modules.

    A module that starts its own cluster shuts this one down first; the next module that uses it
    starts another.
    """
    import ray

    # Other tests leave the address of their head in the environment. Ray Train would ask it whether
    # its controller is alive, and wait for an answer.
    ray._common.utils.reset_ray_address()
    if not ray.is_initialized():
        # inherited by workers
        os.environ["MMRAY_TEST_FAULTS"] = str(tmp_path_factory.mktemp("faults"))
        start_ray()
    # left by fault injection in an earlier module
    for done_once in Path(os.environ["MMRAY_TEST_FAULTS"]).iterdir():
        done_once.unlink(missing_ok=True)


class Bucket:
    """A bucket of the server; `fail("PUT", "step-6", 3)` makes three such requests fail.

    pyarrow retries a 503 every 0.2 s for six seconds; `status=400` is not retried.
    """

    def __init__(self, address, faults):
        self.address, self._faults = address, faults

    def fail(self, method, text, count, status=503):
        self._faults.write_text(f"{method} {text} {count} {status}")

    @contextmanager
    def slow(self, delay_s):
        """Each request takes this much longer."""
        file = self._faults.parent / "delay_s"
        new = file.with_name("new")
        new.write_text(str(delay_s))
        new.rename(file)
        try:
            yield
        finally:
            file.unlink()

    def failures_left(self):
        return int(self._faults.read_text().split()[2])

    @contextmanager
    def requests(self):
        """Collect (method, path, bytes requested) of the requests made in the block; the list is
        filled at its end.
        """
        seen, made = self._faults.parent / "requests", []
        seen.write_text("")
        try:
            yield made
            lines = [line.split() for line in seen.read_text().splitlines()]
            made += [(method, path, int(asked)) for method, path, asked in lines]
        finally:
            seen.unlink()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """S3 server on loopback in a separate process; returns it and its fault file."""
    pytest.importorskip("moto")
    folder = tmp_path_factory.mktemp("s3")
    file = S3_SOCKET.fileno()
    with (folder / "log").open("w") as log:
        command = [
            sys.executable,
            "-m",
            "tests.storage.s3_server",
            str(file),
            str(folder / "faults"),
        ]
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, pass_fds=[file])
    while True:
        assert server.poll() is None, (folder / "log").read_text()
        with suppress(TimeoutError):  # connections wait in the socket until the server has started
            urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"], timeout=5).close()
            break
    yield folder / "faults"
    server.kill()
    server.wait()


@pytest.fixture
def s3(s3_server, tmp_path, monkeypatch):
    """A bucket for one test, with short pauses between retries."""
    from pyarrow import fs

    monkeypatch.setattr("mmray.storage.requests.MAX_WAIT_S", 0.01)
    s3_server.unlink(missing_ok=True)
    name = f"bucket-{time.time_ns()}"
    system, _ = fs.FileSystem.from_uri(f"s3://{name}?allow_bucket_creation=true")
    system.create_dir(name)
    yield Bucket(f"s3://{name}/runs", s3_server)
    s3_server.unlink(missing_ok=True)


def pytest_xdist_make_scheduler(config, log):
    """Run the tests of a file in one process. One process takes files from the start of the order
    below, one from its end and others from its middle, so that only one starts Ray and only one a
    fork server.

    Tests marked `cluster` start their own Ray, so files of those are taken from the start only.
    """
    config.option.loadscopereorder = False  # by the number of tests
    if "not cluster" not in config.option.markexpr:
        return None
    from xdist.scheduler import LoadFileScheduling

    class FromEndsAndMiddle(LoadFileScheduling):
        def _assign_work_unit(self, node):
            files = list(self.workqueue)
            index = {0: 0, 1: -1}.get(self.nodes.index(node), len(files) // 2)
            self.workqueue.move_to_end(files[index], last=False)
            super()._assign_work_unit(node)

    return FromEndsAndMiddle(config, log)


fixtures_of_file = defaultdict(set)


def uses_ray(item):
    return "local_ray" in fixtures_of_file[item.path]


@pytest.hookimpl(trylast=True)  # after the deselection of tests by their marks
def pytest_collection_modifyitems(items):
    """Start with the files that have the longest limits of time, then with those that fork
    processes, whose server imports for seconds; end with those that use the local Ray.
    """
    limits_s = defaultdict(int)
    for item in items:
        limits_s[item.path] = max(
            [limits_s[item.path], *(mark.args[0] for mark in item.iter_markers("timeout"))]
        )
        fixtures_of_file[item.path].update(item.fixturenames)

    def rank(item):
        used = fixtures_of_file[item.path]
        ranks = used & {"two", "four"}  # of the session, so in one process
        forks = ranks or "forked_children" in used or hasattr(item.module, "spawn_ranks")
        in_data = item.path.is_relative_to(ROOT / "tests" / "data")
        return -limits_s[item.path], uses_ray(item), not ranks, not forks, in_data

    items.sort(key=rank)


def pytest_collection_finish():
    """Take the objects of imported modules and of collected tests out of garbage collections, each
    of which would visit some million objects, and switch off traces of torch's compiler.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(700, 10, 50)  # full collections five times as rarely as by default
    # torch writes traces of each compilation to this logger if it has a handler, and pytest adds
    # handlers to loggers that do not propagate.
    logging.getLogger("torch.__trace").propagate = True
    if "transformers" in sys.modules:
        # Otherwise it writes each config that it reads or checks as JSON, for messages that are
        # not logged: 5 % of the time of tests/models.
        sys.modules["transformers"].PreTrainedConfig.__repr__ = object.__repr__


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let a test draw the same random numbers whichever tests ran before, unless it is the first
    that needs a fixture of its module, which draws before it.
    """
    forked.start_server()
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Without a GPU, torch.manual_seed would keep a stack trace of each call.
        seeds = torch if torch.cuda.is_initialized() else torch.default_generator
        seeds.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Shut Ray down before a file that does not use it: its idle processes take 5 % of a core."""
    if uses_ray(item) and nextitem is not None and not uses_ray(nextitem) and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def pytest_sessionfinish():
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


@pytest.fixture
def one_thread():
    """Limit torch to one thread: tiny models run faster, above all if other processes use the
    cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def forked_children():
    """Fork the workers of runs without Ray, and the processes of benchmarks, from the server of the
    rank scenarios; spawned ones import torch for seconds.
    """
    with forked.forked_children():
        yield


@pytest.fixture(scope="module")
def forked_data_processes(forked_children):
    """Fork also the data processes of workers, which import transformers for seconds; in other
    modules they are spawned, without torch.
    """
    with forked.forked_grandchildren():
        yield


@pytest.fixture
def without_ray(monkeypatch, forked_children):
    """Run commands of one worker without Ray, which other tests may have started, in forked
    processes.
    """
    monkeypatch.setattr("mmray.cluster.connect.is_connected", lambda: False)


@pytest.fixture
def prepares_here(monkeypatch):
    """Prepare sets in this process, because others take seconds to start."""

    def run_here(run_item, items, runs_model, hint):
        yield from map(run_item, items)

    monkeypatch.setattr("mmray.data.prepare.tasks._map_in_processes", run_here)


@pytest.fixture(scope="session")
def shared_data():
    """Folder of real images next to the checkout; skip without one."""
    if not SHARED.is_dir():
        pytest.skip("needs the data folder beside the checkout (or MMRAY_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def shared_cases():
    """Folder of inputs as people have them, next to the shared data; skip without one."""
    cases = SHARED.parent / "cases"
    if not cases.is_dir():
        pytest.skip("needs the folder of cases next to the shared data (or MMRAY_SHARED)")
    return cases
