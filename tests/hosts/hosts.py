"""Hosts of their own on one machine: Linux namespaces with own network, mounts, processes and host
name, own /tmp, /dev/shm and HOME, and one shared storage. Needs root and `ip`.

Each host has one cable to a switch, a bridge in a namespace that is no host. Addresses and mounts
exist in these namespaces only, and all ends with their first processes.
"""

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.polling import wait_until

SHARED = Path("/mnt/shared")  # on each host
SERVER = Path("/mnt/server")  # the same file system, as its server has it
STORAGE_BYTES = 64 << 20
ROOT = Path(__file__).parents[2]
RELAY = Path(__file__).with_name("relay.py")
# Imported by each Python process; the kernel has one clock.
CLOCK = """import time
real = time.time
time.time = lambda: real() + {0}
real_ns = time.time_ns
time.time_ns = lambda: real_ns() + {0} * 10**9
"""
ISOLATED = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


@cache
def can_make_hosts():
    """Whether this process may create namespaces, and network devices in them."""
    tools = ("unshare", "nsenter", "setpriv", "ip", "mount")
    if os.getuid() or not all(shutil.which(name) for name in tools):
        return False
    probe = ["unshare", *ISOLATED, "ip", "link", "add", "probe", "type", "bridge"]
    return subprocess.run(probe, capture_output=True).returncode == 0


class Namespaces:
    """Namespaces that exist as long as their first process, which ends all others of them.

    Args:
        outer: Namespaces whose mounts are inherited; None: those of this process.
    """

    def __init__(self, outer=None):
        # They end with this process, however it ends. A first process that ignores SIGCHLD reaps
        # orphans; for `ray job stop` a zombie would be a process that runs.
        first = ["env", "--ignore-signal=CHLD", "sleep", "infinity"]
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", *ISOLATED, *first]
        if outer is not None:
            words = ["nsenter", "--target", str(outer.pid), "--mount", "--", *words]
        self._holder = subprocess.Popen(words)
        wait_until(self._find_first)
        self.pid = self._find_first()

    def _find_first(self):
        """The process ID of `sleep`, which starts when the mounts are complete."""
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        for pid in children.read_text().split():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                    return int(pid)
        return None

    @property
    def root(self):
        """The root of their file system, as this machine can open it."""
        return Path(f"/proc/{self.pid}/root")

    def words(self, *command):
        """The command that runs a command in the namespaces."""
        return ["nsenter", "--target", str(self.pid), "--all", f"--wdns={ROOT}", "--", *command]

    def run(self, *command):
        subprocess.run(self.words(*command), check=True, capture_output=True)

    def close(self):
        self._holder.kill()
        self._holder.wait()


class Host(Namespaces):
    """A host with one network interface.

    Args:
        number: 1 to 9, the last part of its address.
        folder: Logs of its commands.
    """

    def __init__(self, number, name, folder, switch):
        super().__init__(switch)
        self.name, self.address = name, f"10.77.0.{number}"
        self._folder, self._switch, self._port = folder, switch, f"port{number}"
        self._relay = None
        self._env = {"HOME": "/tmp/home", "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)}
        folder.mkdir()
        cable = ["ip", "link", "add", self._port, "netns", str(switch.pid), "type", "veth"]
        subprocess.run([*cable, "peer", "name", "eth0", "netns", str(self.pid)], check=True)
        # The code may be below /tmp.
        code = {path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")}
        lines = [
            f"hostname {name}",
            *(f"mkdir -p /mnt/code{path} && mount --bind {path} /mnt/code{path}" for path in code),
            "mount -t tmpfs none /tmp && mkdir /tmp/home",
            *(f"mkdir -p {path} && mount --bind /mnt/code{path} {path}" for path in code),
            "mount -t tmpfs none /dev/shm",
            "ip link set lo up",
            f"ip address add {self.address}/24 dev eth0 && ip link set eth0 up",
            f"{sys.executable} {RELAY} eth0",
            "ip route add default via 10.77.0.254",  # no such host: Ray reads its address from it
        ]
        self.run("sh", "-ec", "\n".join(lines))
        switch.run("ip", "link", "set", self._port, "master", "switch", "up")

    def start(self, *command, log=None, env=None):
        """Start a command; its output goes to a log with its name, or another one."""
        own = self._env | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        own |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self._log_of(log or command[0]).open("a") as output:
            return subprocess.Popen(
                self.words(*command), stdout=output, stderr=output, env=kept | own | (env or {})
            )

    def log(self, program):
        """What the commands of a program wrote."""
        return self._log_of(program).read_text()

    def _log_of(self, program):
        return self._folder / f"{program}.log"

    def replace(self):
        """End all its processes, and return a new host with its address."""
        self.close()
        port = [*self._switch.words("ip", "link", "show", self._port)]
        wait_until(lambda: subprocess.run(port, capture_output=True).returncode)
        name = f"{self.name}-2"
        number = int(self.address.rpartition(".")[2])
        return Host(number, name, self._folder.with_name(name), self._switch)

    def set_link(self, state):
        """Pull the cable out of the switch (`down`) or plug it in (`up`)."""
        self._switch.run("ip", "link", "set", self._port, state)

    def slow_link(self, delay_s, loss):
        """Delay frames in both directions, and lose a fraction of them, until `mend_link()`."""
        ends = f"slow{self._port}", f"mid{self._port}"
        lines = [
            f"ip link add {ends[0]} type veth peer name {ends[1]}",
            f"ip link set {self._port} nomaster promisc on",
            f"ip link set {ends[0]} promisc on up",
            f"ip link set {ends[1]} master switch up",
        ]
        self._switch.run("sh", "-ec", "\n".join(lines))
        words = [sys.executable, str(RELAY), self._port, ends[0], str(delay_s), str(loss)]
        self._relay = subprocess.Popen(self._switch.words(*words))

    def mend_link(self):
        self._switch.run("ip", "link", "del", f"slow{self._port}")
        self._relay.wait()
        self._switch.run("ip", "link", "set", self._port, "master", "switch")

    def set_clock(self, ahead_s):
        """Let Python processes that are started later take another time for the present one."""
        folder = self.root / "tmp" / "clock"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(CLOCK.format(ahead_s))
        self._env["PYTHONPATH"] = f"/tmp/clock:{ROOT}"

    def signal(self, text, number):
        """Send a signal to the processes of the host whose commands start with a text."""
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_text()
                if (process / "ns/pid").readlink() == own and command.startswith(text):
                    os.kill(int(process.name), number)

    def unmount_storage(self):
        """Unmount the storage, also below open files: an empty folder is in its place."""
        self.run("umount", "--lazy", str(SHARED))

    def mount_storage(self, options="rw"):
        self.run("mount", "--bind", "-o", options, str(SERVER), str(SHARED))


@contextmanager
def hosts(folder, names):
    """Hosts by name, and the storage that they share as this machine can open it.

    Args:
        folder: For logs.
    """
    with ExitStack() as stack:
        switch = Namespaces()
        stack.callback(switch.close)
        lines = [
            "ip link add switch type bridge && ip link set switch up",
            "mount -t tmpfs none /mnt",
            f"mkdir {SERVER} {SHARED}",
            f"mount -t tmpfs -o size={STORAGE_BYTES} none {SERVER}",
            f"mount --bind {SERVER} {SHARED}",
        ]
        switch.run("sh", "-ec", "\n".join(lines))
        by_name = {}
        for number, name in enumerate(names, start=1):
            by_name[name] = Host(number, name, folder / name, switch)
            stack.callback(by_name[name].close)
        yield by_name, switch.root / SERVER.relative_to("/")


class RayOnHosts:
    """Ray with a head without CPUs, and a worker with a place for a rank on each other host.

    A service manager starts Ray again where it has ended, as KubeRay and systemd do.

    Args:
        env: Environment variables of all processes; Ray's settings are otherwise its defaults.
        dashboard: Whether the head takes jobs (port 8265).
    """

    def __init__(self, by_name, env=None, dashboard=False):
        head, *workers = by_name.values()
        self._env = env or {}
        self._dashboard = "--dashboard-host=0.0.0.0" if dashboard else "--include-dashboard=false"
        self.address = f"{head.address}:6379"
        self.start_head(head)
        for worker in workers:
            slot = '--resources={"slot": 1}'
            self._start_node(worker, f"--address={self.address}", "--num-cpus=2", slot)
        for worker in workers:
            self._wait(worker)

    def start_head(self, host):
        """Start the head on a host, which has the address of the head before."""
        self._head = host
        self._start_node(host, "--head", "--port=6379", "--num-cpus=0", self._dashboard)

    def _start_node(self, host, *options):
        memory = "--object-store-memory=100000000"
        address = f"--node-ip-address={host.address}"
        words = shlex.join(["ray", "start", "--block", address, memory, *options])
        service = f"while true; do {words}; sleep 1; done"
        host.start("sh", "-c", service, log="ray", env=self._env)
        if "--head" in options:
            self._wait(host)

    def _wait(self, host):
        wait_until(lambda: "Ray runtime started" in host.log("ray"), 180, 0.2)

    def start(self, *command, log=None):
        """Start a driver on the head."""
        return self._head.start(*command, log=log, env=self._env)
