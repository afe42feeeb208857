"""jobs/deploy/slurm/train.sbatch on a real Slurm: two nodes of this machine, with daemons that the
tests start.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mmray.config import to_yaml
from tests.cluster.test_faults import losses_of_one_worker
from tests.conftest import ROOT
from tests.nodes import free_ports
from tests.polling import wait_until
from tests.training.runs import (
    TRAINS,
    config,
    expected_marks,
    in_double,
    lines,
    make_data,
    marks,
)

pytestmark = pytest.mark.slurm

SCRIPT = ROOT / "jobs" / "deploy" / "slurm" / "train.sbatch"
STEPS = 10
LIMIT_S = 300.0  # ends a broken test only
# A requeued job waits for 120 s, in which its credential expires. A new one is refused if it is as
# old, in seconds, as the end of the job.
START = "StartTime=now+3"

CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmUser=root
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=240
ReturnToService=2
SlurmdTimeout=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=2 RealMemory=100
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=low Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=240
PartitionName=high Nodes=node[1-2] PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """Commands of Slurm with the configuration of the tests."""

    def __init__(self, folder):
        self.folder = folder
        self.env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "RAY_TMPDIR": str(folder),
            "MMRAY_TEST_FAULTS": str(folder / "faults"),
        }
        self.env.pop("RAY_ADDRESS", None)

    def run(self, *words):
        """Run a command and return what it printed."""
        done = subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *words):
        return Job(self, self.run("sbatch", "--parsable", *map(str, words)))


class Job:
    def __init__(self, slurm, number):
        self.slurm, self.number = slurm, number
        self.log_file = slurm.folder / f"slurm-{number}.out"

    def field(self, name):
        """A field of `scontrol show job`, such as `JobState`."""
        words = self.slurm.run("scontrol", "show", "job", self.number).split()
        return dict(word.partition("=")[::2] for word in words)[name]

    def update(self, *fields):
        self.slurm.run("scontrol", "update", f"JobId={self.number}", *fields)

    def wait(self, is_reached):
        """Wait until `is_reached()`; fail if the job has failed."""

        def check():
            return is_reached() or self.field("JobState") in ("FAILED", "NODE_FAIL")

        wait_until(check, LIMIT_S, pause_s=0.2)
        assert is_reached(), self.log()

    def wait_for_state(self, *states):
        self.wait(lambda: self.field("JobState") in states)

    def log(self):
        """The job's log, and the last lines of Slurm's daemons."""
        daemons = (self.slurm.folder / "daemons.log").read_text()
        return f"{self.log_file.read_text()}\n{daemons[-4000:]}"

    def ray_folder(self):
        return self.slurm.folder / f"ray-{self.number}"


@contextmanager
def daemon(folder, *words, env=None):
    """A process that runs in the foreground until the end of the block."""
    with (folder / "daemons.log").open("a") as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def slurm():
    """A Slurm with two nodes; its jobs are cancelled at the end."""
    for command in ("slurmctld", "slurmd", "munged"):
        if shutil.which(command) is None:
            pytest.skip(f"needs {command} (apt-get install slurm-wlm munge)")
    if os.geteuid() or not os.access("/sys/fs/cgroup/freezer", os.W_OK):
        pytest.skip("needs root and a freezer of cgroups v1 that can be written")
    # Ray's sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    for name in ("state", "node1", "node2", "faults"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    text = CONFIG.format(folder=folder, host=host, ports=free_ports(3))
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)  # munged requires it
    slurm = Slurm(folder)
    with ExitStack() as stack:
        munge = ["socket", "pid-file", "log-file", "seed-file"]
        options = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in munge]
        words = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
        stack.enter_context(daemon(folder, *words))
        wait_until((folder / "munge.socket").exists, LIMIT_S)
        stack.enter_context(daemon(folder, "slurmctld", "-D", env=slurm.env))
        for node in ("node1", "node2"):
            stack.enter_context(daemon(folder, "slurmd", "-D", "-N", node, env=slurm.env))
        sinfo = ["sinfo", "--noheader", "--partition=low", "--format=%D %T"]
        try:
            wait_until(lambda: slurm.run(*sinfo) == "2 idle", LIMIT_S, pause_s=0.2)
            yield slurm
        finally:
            slurm.run("scancel", "--user=root", "--signal=KILL", "--full")
            slurm.run("scancel", "--user=root")
            wait_until(lambda: not slurm.run("squeue", "--noheader"), LIMIT_S, pause_s=0.2)
    shutil.rmtree(folder)


def test_time_limit_that_leaves_no_time_to_train_is_refused(slurm):
    job = slurm.submit("--nodes=2", "--time=3", SCRIPT, "clip")
    wait_until(lambda: job.field("JobState") == "FAILED", LIMIT_S, pause_s=0.2)
    assert job.field("ExitCode") == "2:0" and job.field("Restarts") == "0"
    assert "use --time 5 (minutes) or more" in job.log()


@pytest.mark.timeout(900)
def test_run_stopped_by_slurm_takes_the_steps_of_an_undisturbed_run(slurm, tmp_path):
    """It is stopped by the time limit, a preemption and scancel; the first two queue it again."""
    data = make_data(tmp_path / "set")
    faults = ("tests.training.faults:AwaitStops",)
    disturbed = in_double(config(data, tmp_path, "run", callbacks=faults, steps=STEPS))
    disturbed = disturbed.with_cluster(hang_timeout_s=2 * LIMIT_S)  # steps wait for Slurm
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(to_yaml(disturbed))
    words = ["--nodes=2", "--time=60", "--partition=low", SCRIPT, recipe]
    job = slurm.submit(*words)

    def wait_for_step(step, attempt):
        waits = slurm.folder / "faults" / f"awaits-stop-{step}"
        job.wait(lambda: waits.exists() and len(TRAINS.findall(job.log())) == attempt)

    def check_stopped(after_step):
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert (result["status"], result["steps"]) == ("stopped", after_step), job.log()
        assert not job.ray_folder().exists()

    wait_for_step(2, attempt=1)
    assert job.ray_folder().exists()
    job.update("EndTime=now+130")
    job.wait_for_state("PENDING")
    check_stopped(after_step=3)

    job.update("TimeLimit=60", START)
    wait_for_step(5, attempt=2)
    preempting = slurm.submit("--nodes=2", "--time=1", "--partition=high", "--wrap=true")
    job.wait_for_state("PENDING")
    check_stopped(after_step=6)
    preempting.wait_for_state("COMPLETED")

    job.update(START)
    wait_for_step(8, attempt=3)
    assert job.field("Restarts") == "2"
    slurm.run("scancel", job.number)
    job.wait_for_state("CANCELLED")
    check_stopped(after_step=9)
    assert job.field("Restarts") == "2"

    job = slurm.submit(*words)
    job.wait_for_state("COMPLETED")
    assert not job.ray_folder().exists()
    assert marks(tmp_path / "run") == list(expected_marks(STEPS))
    losses = [line["train/loss"] for line in lines(tmp_path / "run")]
    undisturbed = losses_of_one_worker(disturbed, tmp_path / "undisturbed")
    assert losses == pytest.approx(undisturbed, rel=1e-9)
