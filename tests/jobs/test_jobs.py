"""Jobs submitted to a separate head: output files, exit codes, stopping."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_actors, list_placement_groups

from mmray import cli
from mmray.cluster import jobs
from mmray.cluster.jobs import check_upload_size, files_to_upload
from mmray.config import to_yaml
from mmray.console.reporter import ConsoleReporter
from mmray.errors import INTERRUPTED, UsageError
from tests.jobs.test_lines import submit_line
from tests.nodes import free_ports, ray_head
from tests.polling import wait_until
from tests.training.runs import config, expected_marks, make_data, marks

ROOT = Path(__file__).parents[2]
ENDED = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A separate head: its `url` for jobs, and the `env` of commands."""
    port, dashboard, agent = free_ports(3)
    url, path = (
        f"http://127.0.0.1:{dashboard}",
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "PATH": path, "RAY_API_SERVER_ADDRESS": url}
    env["RAY_JOB_STOP_WAIT_TIME_S"] = "120"
    # jobs ship the repository: they must import the shipped copy
    for name in ("PYTHONPATH", "RAY_ADDRESS", "RAY_TRAIN_ENABLE_STATE_TRACKING"):
        env.pop(name, None)
    options = [
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
    ]
    options += [f"--dashboard-agent-listen-port={agent}", "--num-cpus=6"]

    def is_ready():
        try:
            urllib.request.urlopen(f"{url}/api/version", timeout=1).close()
        except OSError:
            return False
        return True

    with ray_head(tmp_path_factory.mktemp("head"), port, options, env, is_ready):
        yield SimpleNamespace(url=url, env=env, port=port)


@pytest.fixture(scope="module")
def client(head):
    return JobSubmissionClient(head.url)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("set"))


def submit(head, job, *arguments):
    """Submit the line of the job's docstring with these arguments; return the job's id without
    waiting.
    """
    words = submit_line(job)
    at = words.index("--")
    line = [
        *words[:at],
        "--no-wait",
        "--submission-id",
        f"{job}-{time.time_ns()}",
        *words[at : at + 3],
        *arguments,
    ]
    done = subprocess.run(line, cwd=ROOT, env=head.env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return line[line.index("--submission-id") + 1]


def ended(client, job_id, within_s=300):
    """(status, exit code of the driver, log) of a job after it ended."""
    until = time.monotonic() + within_s
    while client.get_job_status(job_id) not in ENDED:
        assert time.monotonic() < until, client.get_job_logs(job_id)
        time.sleep(0.3)
    return (
        client.get_job_status(job_id),
        client.get_job_info(job_id).driver_exit_code,
        client.get_job_logs(job_id),
    )


def test_submitted_commands_keep_their_exit_codes(client, data, tmp_path, monkeypatch):
    """`mmray submit` has the exit code and the last message of its command; recipe files that are
    not tracked are uploaded.
    """
    monkeypatch.chdir(ROOT)
    (tmp_path / "empty.jsonl").write_text("")
    failing = config(data, tmp_path, "failing", callbacks=("tests.training.faults:Raise",), steps=2)
    (tmp_path / "failing.yaml").write_text(to_yaml(failing.with_cluster(workers=1)))
    commands = {
        2: ["train", "sample", "--train.stepz", "3"],
        3: ["train", str(tmp_path / "failing.yaml")],
        4: ["train", "sample", "--cluster.workers", "99", "--cluster.accelerator", "gpu"],
        5: ["prepare", str(tmp_path / "empty.jsonl"), str(tmp_path / "out")],
        0: ["train", "sample", "--print-config"],
    }
    texts = {
        2: "stepz",
        3: "raised by the test",
        4: "99 training workers of 1 CPU and 1 GPU each",
        5: "empty.jsonl has no rows",
        0: "model:",
    }
    names = {code: jobs.submit(client, words, ROOT) for code, words in commands.items()}
    for code, name in names.items():
        shown = []
        assert (jobs.follow(client, name, shown.append), code) == (code, code), "".join(shown)
        log = "".join(shown)
        assert texts[code] in log and log.count("Running entrypoint") == 1
        assert code == 3 or "Traceback" not in log


def test_tracked_files_that_a_gitignore_excludes_are_uploaded(head, client, tmp_path):
    (tmp_path / ".gitignore").write_text("*.yaml\n")
    (tmp_path / "mine.yaml").write_text("recipe: sample\ntrain: {steps: 7}\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-f", "."], cwd=tmp_path, check=True)
    name = jobs.submit(client, ["train", "mine.yaml", "--print-config"], tmp_path)
    shown = []
    assert jobs.follow(client, name, shown.append) == 0, "".join(shown)
    assert "steps: 7" in "".join(shown)


def test_files_of_submodules_are_uploaded(tmp_path):
    def git(folder, *words):
        options = ("protocol.file.allow=always", "user.name=a", "user.email=a@b.c")
        flags = [flag for option in options for flag in ("-c", option)]
        subprocess.run(["git", *flags, *words], cwd=folder, check=True, capture_output=True)

    library, own = tmp_path / "library", tmp_path / "own"
    for folder in (library, own):
        folder.mkdir()
        (folder / "code.py").touch()
        git(folder, "init")
        git(folder, "add", "code.py")
        git(folder, "commit", "-m", "code")
    git(own, "submodule", "add", str(library), "lib")
    assert files_to_upload(own, ["train"]) == [".gitmodules", "code.py", "lib/code.py"]


def test_submit_refuses_large_folders_and_names_the_biggest(tmp_path):
    (tmp_path / "large.bin").write_bytes(bytes(51 << 20))
    (tmp_path / "other.bin").write_bytes(bytes(7 << 20))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert files_to_upload(tmp_path, ["train", "other.bin"]) == ["other.bin"]
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    files = files_to_upload(tmp_path, ["train"])
    with pytest.raises(UsageError, match=r"58 MiB.* other.bin \(7.0 MiB\), large.bin \(51.0 MiB\)"):
        check_upload_size(tmp_path, files)


@pytest.mark.parametrize("shipped", [True, False])
def test_mmray_is_imported_from_working_dir_or_installation(head, client, shipped):
    """A working directory takes precedence over an installed mmray, in the driver and in the
    workers.
    """
    runtime_env = {"working_dir": str(ROOT)} if shipped else {}
    job_id = client.submit_job(
        entrypoint=f"python {ROOT}/tests/jobs/where.py", runtime_env=runtime_env
    )
    status, _, log = ended(client, job_id)
    assert status == JobStatus.SUCCEEDED, log
    found = dict(
        line.split(" ", 1) for line in log.splitlines() if line.startswith(("driver ", "worker "))
    )
    assert set(found) == {"driver", "worker"} and len(set(found.values())) == 1
    assert all(("working_dir_files" in place) is shipped for place in found.values())


def test_stopped_training_cleans_up_and_same_command_resumes(
    head, client, data, tmp_path, monkeypatch, capsys
):
    """Ctrl-C in `mmray submit` and `ray job stop` write a checkpoint. Before, the run is listed,
    and the prints of its workers are in the log with their ranks, once
    each, although the connection is lost meanwhile.
    """
    monkeypatch.chdir(ROOT)
    recipe = tmp_path / "tiny.yaml"
    faults = ("tests.training.faults:Slower", "tests.training.faults:Print")
    recipe.write_text(to_yaml(config(data, tmp_path, "run", callbacks=faults, steps=100)))
    seen = {}
    with LostConnection(head, monkeypatch) as connection:
        connected = jobs.connect(connection.url)
        first = jobs.submit(connected, ["train", str(recipe)], ROOT)
        shown = []

        def show(text):
            shown.append(text)
            if connection.num_refused == 0 and "printed at step 1" in text:
                connection.lose()
            if connection.num_refused == 2:
                seen["jobs"] = jobs.list_jobs(client)
                seen["torch"] = processes_with_torch(head)
                seen["runs"] = train_runs(head)
                connection.num_refused += 1
                raise KeyboardInterrupt

        assert jobs.follow(connected, first, show) == INTERRUPTED == 130
    log = "".join(shown)
    stopped = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stopped["status"] == "stopped" and stopped["steps"] > 0
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped['steps']}" / "SHA256SUMS").exists()
    assert "run the same command to resume from step" in log
    for rank in (0, 1):
        printed = re.findall(rf"^rank {rank} +printed at step (\d+)$", log, re.M)
        assert printed == [str(step + 1) for step in range(stopped["steps"])], log
    assert not re.search("raylet|Ignoring upload|worker processes", log), log
    (job,) = [each for each in seen["jobs"] if each["name"] == first]
    assert (job["status"], job["run"]) == ("running", str(tmp_path / "run"))
    assert job["command"] == f"mmray train {recipe}"
    assert seen["torch"] == {"ray::TrainController.run": False, "ray::TrainStateActor": False}
    assert "run-attempt-1" in seen["runs"]
    assert left_behind(head) == []

    job_id = submit(head, "train", str(recipe))
    line = f"printed at step {stopped['steps'] + 2}\n"
    wait_until(lambda: line in client.get_job_logs(job_id), 120, pause_s=0.3)
    stop_job(head, job_id)
    assert client.get_job_status(job_id) == JobStatus.STOPPED
    log = client.get_job_logs(job_id)
    resumed = json.loads((tmp_path / "run" / "result.json").read_text())
    assert resumed["status"] == "stopped" and resumed["steps"] > stopped["steps"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{resumed['steps']}" / "SHA256SUMS").exists()
    assert marks(tmp_path / "run") == list(expected_marks(resumed["steps"]))
    assert "\x1b" not in log and "\r" not in log  # plain lines, because a log is not a terminal
    assert "/100" in log and "recall" not in log.splitlines()[0]
    # The log of the newest job of a run, by the name of the run.
    assert cli.run(["logs", "--address", head.url, "run"], ConsoleReporter()) == INTERRUPTED
    assert f"resume from step {resumed['steps']}" in capsys.readouterr().out


def test_waiting_job_has_only_its_driver_and_ends_at_once(head, client, data, tmp_path):
    """No process of Ray Train is on the head while a run waits for nodes."""
    recipe = tmp_path / "tiny.yaml"
    waits = config(data, tmp_path, "waits").with_cluster(cpus_per_worker=50, wait_for_nodes=True)
    recipe.write_text(to_yaml(waits))
    job_id = submit(head, "train", str(recipe))
    wait_until(lambda: [each.state for each in reservations(head)] == ["PENDING"], 120, pause_s=0.3)
    assert processes_with_torch(head).keys() <= {"ray::TrainStateActor"}
    assert own_actors(head) == []
    stop_job(head, job_id)
    assert client.get_job_status(job_id) == JobStatus.STOPPED
    assert "Traceback" not in client.get_job_logs(job_id)
    assert left_behind(head) == []


class LostConnection:
    """Forwards connections to the dashboard of a head, until `lose()` closes them all; the next two
    are refused.
    """

    def __init__(self, head, monkeypatch):
        self.target = ("127.0.0.1", int(head.url.rpartition(":")[2]))
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.num_refused = 0
        self._sockets = []
        monkeypatch.setattr(jobs, "time", SimpleNamespace(**vars(time) | {"sleep": self._sleep}))

    def __enter__(self):
        self._listen()
        return self

    def __exit__(self, *_):
        self.lose()

    def lose(self):
        for each in self._sockets:
            with suppress(OSError):  # the other side has closed it
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _sleep(self, duration_s):
        """The pause of `jobs.follow`, which comes after each refused connection."""
        if not self._sockets:
            self.num_refused += 1
            if self.num_refused == 2:
                self._listen()
        time.sleep(duration_s)

    def _listen(self):
        server = socket.create_server(("127.0.0.1", self.port))
        self._sockets.append(server)
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def _accept(self, server):
        with suppress(OSError):  # lost
            while True:
                client, _ = server.accept()
                upstream = socket.create_connection(self.target)
                self._sockets += [client, upstream]
                for source, sink in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source, sink):
        with suppress(OSError):  # lost
            while piece := source.recv(1 << 16):
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)


def stop_job(head, job_id):
    """Run `ray job stop`, which returns when the job has ended, at the latest after 120 s."""
    words = ["ray", "job", "stop", job_id]
    done = subprocess.run(words, env=head.env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def train_runs(head):
    """Names on the page Train of the dashboard."""
    with urllib.request.urlopen(f"{head.url}/api/train/v2/runs/v1", timeout=10) as answer:
        return {run["name"] for run in json.load(answer)["train_runs"]}


def processes_with_torch(head):
    """Whether the processes of Ray Train on the head have loaded torch, which takes 300 MiB."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            name = next(iter(process.cmdline()), "").strip()  # kernel threads have none
            parent = process.parent()  # None: it has ended
            words = parent.cmdline() if parent is not None else []
            if name.startswith(("ray::TrainController", "ray::TrainStateActor")) and any(
                re.search(rf":{head.port}\b", word) for word in words
            ):
                found[name] = any("libtorch" in each.path for each in process.memory_maps())
    return found


def own_actors(head):
    """Actors of jobs on the cluster; detached ones are Ray's own."""
    actors = list_actors(head.url, detail=True)
    return [actor for actor in actors if actor.state != "DEAD" and not actor.is_detached]


def reservations(head):
    return [group for group in list_placement_groups(head.url) if group.state != "REMOVED"]


def left_behind(head, within_s=60):
    """Actors and placement groups of ended jobs, after a short wait."""
    until = time.monotonic() + within_s
    while True:
        left = [actor.class_name for actor in own_actors(head)]
        left += [group.name for group in reservations(head)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.5)


def test_a_recipe_file_is_the_base_of_a_sweep_in_a_job(head, client, data, tmp_path, monkeypatch):
    """With two workers, unchanged; the other tests train one."""
    monkeypatch.chdir(ROOT)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(to_yaml(config(data, tmp_path, None, steps=2, checkpoint_every=0)))
    words = ["tune", str(recipe), "--goal", "loss", "--space", "optimizer.lr=2e-3"]
    sweep = jobs.submit(client, [*words, "--run.storage", str(tmp_path / "sweep")], ROOT)
    shown = []
    assert jobs.follow(client, sweep, shown.append) == 0, "".join(shown)[-4000:]
    (best,) = (tmp_path / "sweep").rglob("best.yaml")
    assert "lr:" in best.read_text()
    # Ray's dashboard has no page for Tune: the trials are runs on its page Train, and actors.
    name = best.parent.name
    assert f"{name}-t001-attempt-1" in train_runs(head)
    actors = list_actors(head.url, detail=True, filters=[("class_name", "=", "ImplicitFunc")])
    assert {actor.repr_name for actor in actors} == {name}
