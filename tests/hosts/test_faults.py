"""Faults of hosts and their links: the run takes the steps of an undisturbed one.

`pytest -m "" -n 0 -s tests/hosts` prints the rows of the table in mmray/cluster/README.md.
"""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from mmray.cluster.ray_internals import KEEPALIVE_MS, KEEPALIVE_VARIABLE
from mmray.config import Cluster, to_yaml
from tests.hosts.hosts import SHARED, RayOnHosts, can_make_hosts, hosts
from tests.hosts.test_storage import assert_undisturbed
from tests.polling import wait_until
from tests.training.runs import config, in_double, make_data

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, unshare and ip"),
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
]
ENV = {KEEPALIVE_VARIABLE: str(KEEPALIVE_MS)}  # as cluster.yaml and jobs/deploy set it
STEPS = 60  # with Slowly: longer than a fault of 20 s
WATCHED_STEPS = 420  # with Slower: Ray used to lose a worker 290 to 391 s after a fault
FAULT_STEP = 5  # after a checkpoint
RANKS = "ray::"  # titles of Ray's worker processes
MAX_REPEATED = 10
LOST = re.compile(r"rank [01] \(process \d+, node (one|two) at 10\.77\.0\.[23]\)")


@dataclass
class Fault:
    """What happens to hosts for some time.

    Args:
        hosts: `head`, on which the driver is, `one` or `two`, each with a rank.
        begin: Called with each host.
        down_s: Seconds from begin to end.
        max_repeated: Highest number of repeated steps.
        steps: Length of the run.
        clocks_s: Seconds that clocks of hosts are ahead, from the start.
    """

    hosts: tuple[str, ...]
    begin: Callable
    end: Callable
    down_s: float
    max_repeated: int = MAX_REPEATED
    steps: int = WATCHED_STEPS
    clocks_s: dict[str, int] = field(default_factory=dict)


def link(host, down_s, **limit):
    return Fault(
        (host,),
        lambda each: each.set_link("down"),
        lambda each: each.set_link("up"),
        down_s,
        **limit,
    )


def stopped(host, down_s, **limit):
    return Fault(
        (host,),
        lambda each: each.signal(RANKS, signal.SIGSTOP),
        lambda each: each.signal(RANKS, signal.SIGCONT),
        down_s,
        **limit,
    )


def slow_link(host, down_s, **limit):
    return Fault(
        (host,),
        lambda each: each.slow_link(0.05, 0.01),
        lambda each: each.mend_link(),
        down_s,
        **limit,
    )


def none(host):
    """No event."""


FAULTS = {
    "link of the head down for 20 s": link("head", 20, max_repeated=0, steps=STEPS),
    "link of the head down for 20 s, watched": link("head", 20, max_repeated=0),
    "link of the head down for 30 s": link("head", 30),
    "link of the head down for 150 s": link("head", 150, steps=240),
    "link of a rank down for 20 s": link("one", 20, max_repeated=0, steps=STEPS),
    "link of a rank down for 150 s": link("one", 150, steps=STEPS),
    "link of a rank with a delay of 50 ms and a loss of 1 % for 60 s": slow_link(
        "one", 60, max_repeated=0, steps=STEPS
    ),
    "workers of a host stopped for 20 s": stopped("one", 20, max_repeated=0, steps=STEPS),
    "clocks of the ranks 5 minutes ahead and behind": Fault(
        (), none, none, 0, max_repeated=0, steps=STEPS, clocks_s={"one": 300, "two": -300}
    ),
}
FAST = "link of the head down for 20 s"


def settings(fault):
    """A run of two ranks in double precision, with half a second and more for each step."""
    pause = "Slower" if fault.steps > STEPS else "Slowly"
    wanted = config(
        SHARED / "set",
        SHARED / "runs",
        "run",
        [f"tests.training.faults:{pause}"],
        steps=fault.steps,
    )
    cluster = Cluster(workers=2, resources_per_worker={"slot": 1.0}, address="10.77.0.1:6379")
    return in_double(wanted.replace(cluster=cluster, evaluate=wanted.evaluate.replace(every=0)))


class Steps:
    """The steps of a run, from its log, and the longest time without a new one."""

    def __init__(self, run):
        self._file = run / "metrics.jsonl"
        self.latest = 0
        self.longest_s, self._since_s = 0.0, None

    def poll(self):
        """Read the log; it may be of a storage that is away."""
        text = self._file.read_text() if self._file.exists() else ""
        done = [
            json.loads(line)["step"] for line in text.splitlines(keepends=True) if line[-1:] == "\n"
        ]
        now_s = time.monotonic()
        if done and done[-1] > self.latest:
            self.latest, self._since_s = done[-1], now_s
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._since_s)


def disturb(fault, by_name, driver, steps):
    """Begin and end the fault while the run trains, and wait until the command has ended."""

    def has_ended():
        steps.poll()
        return driver.poll() is not None

    wait_until(lambda: has_ended() or steps.latest >= FAULT_STEP, 900, 0.2)
    steps.longest_s = 0.0
    for name in fault.hosts:
        fault.begin(by_name[name])
    end_s = time.monotonic() + fault.down_s
    while time.monotonic() < end_s:
        steps.poll()
        time.sleep(0.2)
    for name in fault.hosts:
        fault.end(by_name[name])
    wait_until(has_ended, 900, 0.2)


def run_with(fault, folder):
    """Train on hosts that have the fault; return the copied run folder, seconds, and the log."""
    with ExitStack() as stack:
        by_name, shared = stack.enter_context(hosts(folder, ["head", "one", "two"]))
        for name, ahead_s in fault.clocks_s.items():
            by_name[name].set_clock(ahead_s)
        make_data(shared / "set")
        (shared / "recipe.yaml").write_text(to_yaml(settings(fault)))
        steps = Steps(shared / "runs" / "run")
        driver = RayOnHosts(by_name, ENV).start(
            "python", "-m", "mmray", "train", str(SHARED / "recipe.yaml")
        )
        disturb(fault, by_name, driver, steps)
        log = by_name["head"].log("python")
        assert driver.returncode == 0, log
        shutil.copytree(shared / "set", folder / "set")
        shutil.copytree(shared / "runs" / "run", folder / "run")
    return folder / "run", max(0.0, steps.longest_s - fault.down_s), log


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in FAULTS]
)
def test_run_takes_the_steps_of_an_undisturbed_one(name, tmp_path):
    fault = FAULTS[name]
    run, beyond_s, log = run_with(fault, tmp_path)
    result = json.loads((run / "result.json").read_text())
    repeated = result["wasted_steps"]
    print(f"| {name} | {beyond_s:.0f} | {result['restarts']} | {repeated} |")
    assert_undisturbed(tmp_path, settings(fault))
    assert repeated <= fault.max_repeated, log
    assert result["restarts"] == 0 or fault.max_repeated, log
    lost = re.findall(r"worker lost after step \d+: (.*)", log)
    assert all(LOST.match(cause) for cause in lost), lost
