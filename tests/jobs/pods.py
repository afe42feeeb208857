"""Pods of a KubeRay manifest as processes of this machine, each in a network of its own.

Containers run with exactly their commands, arguments, environment and shared memory. What KubeRay
and Kubernetes add is added here: addresses, the token, and the variables with which Ray finds its
head. It needs no root, but user namespaces and `ip`.

`python -m tests.jobs.pods FOLDER MANIFEST` runs in the namespaces of `run_in_namespaces`, and
`python -m tests.jobs.pods` in the container of the head.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import ray
import yaml

from mmray.cluster.placement import ROLE_LABEL

ROOT = Path(__file__).parents[2]
_KINDS = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
NAMESPACES = ("unshare", *_KINDS)
TOKEN = "0" * 64
HEAD = "10.77.0.2"


def is_supported():
    """Whether this machine lets a user create networks."""
    has_tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    link = ("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    return has_tools and subprocess.run([*NAMESPACES, *link], capture_output=True).returncode == 0


def run_in_namespaces(manifest, folder):
    """Start the pods of a manifest, and return what a driver in the head sees.

    Args:
        manifest: Path of a RayJob.
        folder: Receives the files of Ray.

    Returns:
        `nodes`, each with `address`, `role` and `cpus`, and `task`, the address of a data node.
    """
    # Only what the image sets: none of the variables of the tests.
    env = {name: os.environ[name] for name in ("PATH", "HOME")} | {"PYTHONPATH": str(ROOT)}
    words = [*NAMESPACES, sys.executable, "-m", "tests.jobs.pods", folder, manifest]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


class Pod:
    """One container of a manifest, started in a network namespace with the address 10.77.0.N."""

    def __init__(self, group, number, folder):
        (self.container,) = group["template"]["spec"]["containers"]
        self.address = f"10.77.0.{number}"
        self.log = folder / f"{number}.log"
        temp = folder / f"tmp-{number}"
        temp.mkdir()
        volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
        shm = volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("i").lower()
        head = {"RAY_ADDRESS": f"{HEAD}:6379"} if number > 2 else {}
        self.env = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            **head,
            **{each["name"]: each["value"] for each in self.container["env"]},
        }
        self.holder = subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"])
        self._network(number)
        self._run("mount", "-t", "tmpfs", "-o", f"size={shm}", "shm", "/dev/shm")
        self._run("mount", "--bind", temp, "/tmp/ray")
        self._start_s = time.monotonic()
        words = [*self.container["command"], *self.container["args"]]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*self._enter(), *words], env=self.env, cwd=temp, stdout=log, stderr=log
            )

    def _enter(self):
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount"]

    def _run(self, *words):
        subprocess.run([*self._enter(), *words], check=True)

    def _network(self, number):
        link = f"pod{number}"
        pid = str(self.holder.pid)
        until = time.monotonic() + 10
        outer = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{pid}/ns/net").readlink() == outer:
            assert time.monotonic() < until
            time.sleep(0.01)
        for words in (
            ("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid),
            ("link", "set", link, "master", "bridge", "up"),
        ):
            subprocess.run(["ip", *words], check=True)
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self._run("ip", "link", "set", "eth0", "up")
        self._run("ip", "route", "add", "default", "via", "10.77.0.1")

    def wait_until(self, probe):
        """Probe the container as kubelet does, until it succeeds."""
        get = self.container[probe]["httpGet"]
        limits = self.container[probe]
        time.sleep(max(0, self._start_s + limits["initialDelaySeconds"] - time.monotonic()))
        for _ in range(limits["failureThreshold"]):
            try:
                url = f"http://{self.address}:{get['port']}{get['path']}"
                urllib.request.urlopen(url, timeout=limits["timeoutSeconds"]).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(limits["periodSeconds"])
        raise AssertionError(f"{probe}: {self.log.read_text()[-3000:]}")

    def run(self, *words, timeout=60):
        """Run a command in the container, and return its output."""
        done = subprocess.run(
            [*self._enter(), *words],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def start_pods(folder, manifest):
    """Start the pods, wait for their probes, and print what a driver in the head prints."""
    spec = yaml.safe_load(Path(manifest).read_text())["spec"]["rayClusterSpec"]
    Path("/tmp/ray").mkdir(exist_ok=True)
    for words in (
        "link set lo up",
        "link add bridge type bridge",
        "address add 10.77.0.1/24 dev bridge",
        "link set bridge up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    head, *workers = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    pods = [Pod(head, 2, Path(folder))]
    pods[0].wait_until("readinessProbe")  # as an init container of KubeRay does
    pods += [Pod(group, number, Path(folder)) for number, group in enumerate(workers, 3)]
    for probe in ("readinessProbe", "livenessProbe"):
        for pod in pods:
            pod.wait_until(probe)
    print(pods[0].run(sys.executable, "-m", "tests.jobs.pods").strip())


@ray.remote(num_cpus=1, label_selector={ROLE_LABEL: "data"})
def address_of_data_node():
    return ray.util.get_node_ip_address()


def drive():
    """Print the nodes and where a task for data ran, as JSON."""
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    nodes = [
        {
            "address": node["NodeManagerAddress"],
            "role": node["Labels"][ROLE_LABEL],
            "cpus": node["Resources"].get("CPU", 0),
        }
        for node in ray.nodes()
    ]
    print(json.dumps({"nodes": nodes, "task": ray.get(address_of_data_node.remote())}))


if __name__ == "__main__":
    start_pods(*sys.argv[1:]) if sys.argv[1:] else drive()
