"""A separate Ray head, started with `ray start` on loopback and free ports, and stopped by its process id."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

START_S = 60
END_S = 35  # draining takes up to 30 s


class Head:
    """Context manager: `with Head(folder) as head`: head.address for Ray, head.url for jobs."""

    def __init__(self, folder: Path, cpus: int = 6):
        self.folder, self.cpus = folder, cpus
        self.port, self.dashboard, self.agent = free_ports(3)
        self.address, self.url = f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self.dashboard}"
        bin_folder = Path(sys.executable).parent
        self.env = {**os.environ, "RAY_AUTH_MODE": "disabled", "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
        # Jobs ship the repository: they must import the shipped copy.
        for name in ("PYTHONPATH", "RAY_ADDRESS"):
            self.env.pop(name, None)
        self.env |= {"RAY_API_SERVER_ADDRESS": self.url, "RAY_JOB_STOP_WAIT_TIME_S": "30"}

    def __enter__(self) -> "Head":
        words = ["ray", "start", "--head", "--block", f"--port={self.port}", "--node-ip-address=127.0.0.1"]
        words += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}", f"--num-cpus={self.cpus}"]
        words += [f"--dashboard-agent-listen-port={self.agent}", "--num-gpus=0", "--object-store-memory=200000000"]
        log = self.folder / "head.log"
        with log.open("w") as file:
            # Started in a separate folder, because workers import from the folder of the head.
            self.process = subprocess.Popen(
                words, cwd=self.folder, env=self.env, stdout=file, stderr=file, start_new_session=True
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/api/version", timeout=1).close()
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        self.__exit__()
        raise RuntimeError(f"the head did not start: {log.read_text()[-800:]}")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_ports(count: int) -> list[int]:
    """Free ports above those (10002-19999) that Ray gives to its workers."""
    found: list[int] = []
    candidate = 20000 + os.getpid() % 5000
    while len(found) < count:
        candidate += 1
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", candidate)):
                found.append(candidate)
    return found
