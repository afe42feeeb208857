"""What a run on a GPU waits for is measured from events, and is a sentence of its report."""

from __future__ import annotations

import html
import itertools
import re
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine import step
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import IDLE
from mmray.report.run import RunRecord
from mmray.report.summary import find_limit
from mmray.report.write import write_report
from tests.engine import toy
from tests.engine.fake_cuda import DEVICES, fake_gpus
from tests.report.factories import make_run

PLAN = SamplePlan(num_rows=24, global_batch_size=8, world_size=1, seed=1, steps=9)
KERNELS = 100  # of a step


@dataclass
class Machine:
    """A host that launches kernels, and a device that runs them, with the time of each."""

    host_s: float = 0.0
    device_s: float = 0.0  # when it has run all kernels that were launched

    def spend(self, host_s: float) -> None:
        self.host_s += host_s

    def launch(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + device_s

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.device_s)


@dataclass
class Event:
    """An event with the time at which the device of a machine reaches it."""

    machine: Machine
    reached_s: float = -1.0
    waited: bool = False  # a thread has waited for it, whose time is not the host's of the machine

    def record(self, stream=None) -> None:
        self.reached_s = max(self.machine.host_s, self.machine.device_s)

    def query(self) -> bool:
        return self.reached_s <= self.machine.host_s

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: Event) -> float:
        assert other.waited or other.query(), "the host has not waited for these events"
        assert self.reached_s <= other.reached_s
        return 1000 * (other.reached_s - self.reached_s)


def train(
    folder, monkeypatch, launch_s=0.0002, kernel_s=0.001, wait_s=0.001, after_s=0.001, rows_s=0.02
):
    """Run the loop on a fake GPU; return the record of the run.

    Args:
        folder: Gets the files of the run that a report reads.
        launch_s: The host launches one of the KERNELS of a step in this time.
        kernel_s: The device runs it.
        wait_s: The host waits for the rows of a step.
        after_s: The host does other work after a step.
        rows_s: CPU time of the prefetch thread for the rows of a step.
    """
    machine, log, grad_norm, read_later = Machine(), toy.Lines(), step.grad_norm, Group.read_later
    model = toy.Toy().double()

    def launch_kernels(*_):
        if machine.host_s == 0:
            machine.spend(60)  # the first step compiles
        for _ in range(KERNELS):
            machine.launch(launch_s, kernel_s)

    def launch_norm(weights):
        machine.launch(0.001, 0.0)
        return grad_norm(weights)

    def wait_and_read(group, tensor):
        read = read_later(group, tensor)
        return lambda: (machine.wait(), read())[1]

    stream = SimpleNamespace(
        record_event=lambda: Event(machine), wait_event=lambda _: machine.spend(wait_s)
    )
    with fake_gpus(monkeypatch) as syncs, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Event", lambda **_: Event(machine))
        patch.setattr(torch.cuda, "current_stream", lambda _: stream)
        patch.setattr(time, "perf_counter", lambda: machine.host_s)
        patch.setattr(time, "thread_time", itertools.count(0.0, rows_s).__next__)
        patch.setattr(step, "grad_norm", launch_norm)
        patch.setattr(Group, "read_later", wait_and_read)
        model.to(DEVICES[0]).register_forward_pre_hook(launch_kernels)
        callback = SimpleNamespace(on_step=lambda *_: machine.spend(after_s))
        group, settings = Group(device=DEVICES[0]), toy.train_settings(log_every=4)
        toy.run(model, PLAN, group, micro=8, log=log, train=settings, callbacks=(callback,))
        assert syncs.count > 0
    return RunRecord(make_run(folder, log))


@pytest.mark.parametrize(
    ("times", "idle", "limit"),
    [
        ({}, "2%", None),
        (
            {"wait_s": 0.15},
            "60%",
            "Data-bound: the GPU was idle 60% of the time between steps (60% for data). "
            "To change it, use more data processes (data.workers)",
        ),
        (
            {"after_s": 0.1, "wait_s": 0.006, "rows_s": 0.18},
            "51%",
            "idle 51% of the time between steps (3% for data) and launch-bound for another 0%: "
            "the training process is busy moving rows (87% of a CPU core)",
        ),
        (
            {"launch_s": 0.001, "kernel_s": 0.0002},
            "2%",
            "idle 2% of the time between steps (1% for data) and launch-bound for another 97%: "
            "the training process launches kernels too slowly",
        ),
        (
            {"launch_s": 0.0022, "rows_s": 0.18},
            "1%",
            "launch-bound for another 99%: the training process is busy moving rows (81% of",
        ),
        ({"after_s": 0.1}, "50%", "other work between steps, such as callbacks"),
    ],
)
def test_report_says_what_the_device_waited_for(monkeypatch, tmp_path, times, idle, limit):
    run = train(tmp_path / "run", monkeypatch, **times)
    found = find_limit(run)
    assert (found.level == "warning") == (limit is not None)
    page = html.unescape(write_report(run.folder).read_text())
    assert (f"{found.observed}. To change it, {found.fix}." in page) == (limit is not None)
    assert limit is None or limit in page
    assert re.search(f"<dt>GPU idle, median</dt><dd class=.value.>{idle}</dd>", page)


def test_nothing_is_measured_on_a_cpu(tmp_path):
    log = toy.Lines()
    toy.run(toy.Toy(), PLAN, log=log)
    assert not any(f"time/{name}_share" in log[-1] for name in IDLE)
    page = write_report(make_run(tmp_path / "run", log)).read_text()
    assert "GPU idle" not in page and "Data wait, median" in page
