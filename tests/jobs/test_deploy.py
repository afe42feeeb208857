"""Files of jobs/deploy: what they must have, and that their commands start clusters that train."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mmray.cluster.placement import ROLE_LABEL
from mmray.config import to_yaml
from mmray.errors import INTERRUPTED
from tests.conftest import ROOT
from tests.jobs import pods
from tests.training.runs import config, make_data, marks

DEPLOY = ROOT / "jobs" / "deploy"
KUBERAY = DEPLOY / "kuberay"
JOB = yaml.safe_load((KUBERAY / "rayjob.yaml").read_text())["spec"]
CLUSTER = yaml.safe_load((KUBERAY / "raycluster.yaml").read_text())["spec"]
QUEUED = yaml.safe_load((KUBERAY / "kueue.yaml").read_text())
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
ROLES = ["head", "data", "train"]


def test_lock_has_all_dependencies_in_allowed_versions():
    lines = (DEPLOY / "requirements.lock").read_text().splitlines()[1:]
    locked = dict(line.split("==") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"]):
        if wanted.marker is None or wanted.marker.evaluate():
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), wanted
    image = (DEPLOY / "Dockerfile").read_text()
    assert "--requirement /tmp/requirements.lock" in image and "ARG TORCH" in image
    assert CLUSTER["rayVersion"] == locked["ray"]


def test_rayjob_starts_the_cluster_of_raycluster():
    assert JOB["rayClusterSpec"] == CLUSTER
    assert CLUSTER["autoscalerOptions"]["version"] == "v2" and CLUSTER["enableInTreeAutoscaling"]
    assert CLUSTER["authOptions"] == {"mode": "token", "secretName": "mmray-token"}
    assert JOB["backoffLimit"] > 0 and JOB["ttlSecondsAfterFinished"] > 0
    assert JOB["shutdownAfterJobFinishes"]


def test_queued_job_differs_in_its_fixed_number_of_nodes():
    spec = QUEUED["spec"]
    assert spec["suspend"] and "kueue.x-k8s.io/queue-name" in QUEUED["metadata"]["labels"]
    assert "enableInTreeAutoscaling" not in spec["rayClusterSpec"]
    for group, same in zip(
        spec["rayClusterSpec"]["workerGroupSpecs"], CLUSTER["workerGroupSpecs"], strict=True
    ):
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] > 0
        assert (
            group["template"]["spec"]["containers"][0]["resources"]
            == (same["template"]["spec"]["containers"][0]["resources"])
        )


@pytest.mark.parametrize(("group", "role"), zip(GROUPS, ROLES, strict=True))
def test_pools_have_labels_resources_and_shared_memory(group, role):
    """The autoscaler reads the labels and resources of the manifest, Ray those of the command."""
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    (command,) = container["args"]
    assert group["labels"] == {ROLE_LABEL: role}
    assert f"--labels={ROLE_LABEL}={role}" in command
    cpus = int(re.search(r"--num-cpus=(\d+)", command)[1])
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"]
    if role == "head":
        assert cpus == 0 == int(group["rayStartParams"]["num-cpus"])
    else:
        assert cpus == int(limits["cpu"]) and group["replicas"] == group["minReplicas"] == 0
        assert pod["terminationGracePeriodSeconds"] >= 60
    assert ("nvidia.com/gpu" in limits) is (role == "train")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {"/shared": "shared", "/dev/shm": "shm"}


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_containers_of_the_manifest_start_a_cluster(tmp_path):
    """Started as processes with exactly their commands, arguments, environment and probes."""
    if not pods.is_supported():
        pytest.skip("needs user namespaces, and `ip` of iproute2")
    seen = pods.run_in_namespaces(KUBERAY / "rayjob.yaml", tmp_path)
    by_role = {node["role"]: node for node in seen["nodes"]}
    assert {role: node["cpus"] for role, node in by_role.items()} == {
        "head": 0,
        "data": 16,
        "train": 8,
    }
    assert seen["task"] == by_role["data"]["address"]


# Stand-ins for the commands of Slurm, on this machine: srun runs the command without its options.
SLURM_COMMANDS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then echo node1; else echo "$@" >> "$SCONTROL_LOG"; fi',
    "hostname": "echo 127.0.0.1",
}


@pytest.fixture
def slurm(tmp_path):
    """The environment of a batch script on two nodes, with a short path for the sockets of Ray."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in SLURM_COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (commands / name).chmod(0o755)
    temp = tempfile.mkdtemp(prefix="slurm-", dir="/tmp")
    env = os.environ | {
        "PATH": os.pathsep.join(
            [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "SLURM_JOB_ID": str(1000 + os.getpid() % 500),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
        "RAY_TMPDIR": temp,
    }
    env.pop("RAY_ADDRESS", None)
    yield env
    shutil.rmtree(temp)


@pytest.mark.cluster
@pytest.mark.slow  # two starts of a cluster, three minutes
@pytest.mark.timeout(400)
def test_slurm_job_writes_a_checkpoint_at_term_and_resumes(slurm, tmp_path):
    """SIGTERM to the batch script at half-time, as Slurm sends it before the limit of time."""
    recipe = tmp_path / "tiny.yaml"
    steps = 8
    faults = ("tests.training.faults:Slower",)
    recipe.write_text(
        to_yaml(config(make_data(tmp_path / "set"), tmp_path, "run", callbacks=faults, steps=steps))
    )
    log = tmp_path / "job.log"

    def start():
        words = [DEPLOY / "slurm" / "train.sbatch", recipe]
        with log.open("a") as output:
            return subprocess.Popen(words, cwd=ROOT, env=slurm, stdout=output, stderr=output)

    job = start()
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        until = time.monotonic() + 150
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            assert time.monotonic() < until and job.poll() is None, log.read_text()[-4000:]
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(120) == INTERRUPTED, log.read_text()[-4000:]
        stopped = json.loads((tmp_path / "run" / "result.json").read_text())
        assert stopped["status"] == "stopped" and 2 <= stopped["steps"] < steps
        requeued = Path(slurm["SCONTROL_LOG"]).read_text()
        assert requeued == f"requeue {slurm['SLURM_JOB_ID']}\n"
        job = start()
        assert job.wait(180) == 0, log.read_text()[-4000:]
    finally:
        if job.poll() is None:
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            job.wait()
    resumed = f"from {tmp_path}/run/checkpoints/step-{stopped['steps']}"
    assert resumed in log.read_text()
    assert [mark[0] for mark in marks(tmp_path / "run")] == list(range(1, steps + 1))
    assert list(Path(slurm["RAY_TMPDIR"]).iterdir()) == []  # no file of Ray is left
