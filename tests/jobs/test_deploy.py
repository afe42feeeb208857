"""Files of jobs/deploy: what they must have, and that their commands start clusters that train."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mmray.cluster.placement import ROLE_LABEL
from tests.conftest import ROOT
from tests.jobs import pods

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
