"""Cost of a training step beyond the model, counted on a CPU: the table "Hot path" of
mmray/engine/README.md.

Run `python -m tests.benchmarks.hot_path`. Copies and host synchronizations are those on a simulated
GPU, collectives those of one of two ranks without the buckets of DDP.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine.collectives import Group
from mmray.engine.memory_probe import FakeGroup
from mmray.engine.metrics import writers
from mmray.engine.metrics.writers import MetricsLog
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from tests.engine import fake_cuda, toy

MICRO, ACCUMULATION = 4, 4
FIRST, STEPS = 3, 8  # steps before FIRST are not counted
GPU = fake_cuda.DEVICES[0]


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count calls of Python functions in this thread: `all`, and `mmray` of the package."""
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls["all"] += 1
            calls["mmray"] += "/mmray/" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def train(device: torch.device, on_step: Callable[[int], None]) -> None:
    """A run that logs nothing; `on_step` is called after each step."""
    rows = MICRO * ACCUMULATION
    plan = SamplePlan(
        num_rows=10 * rows, global_batch_size=rows, world_size=1, seed=1, steps=STEPS + 1
    )
    callback = SimpleNamespace(on_step=lambda step, metrics: on_step(step))
    settings = toy.train_settings(log_every=0, checkpoint_every=0)
    toy.run(
        toy.Branched().to(device),
        plan,
        Group(device=device),
        micro=MICRO,
        callbacks=(callback,),
        train=settings,
    )


def python_calls() -> dict[str, float]:
    """Calls of Python functions by the training thread, per micro-batch."""
    with counted_calls() as calls:
        counts: dict[int, Counter[str]] = {}
        train(fake_cuda.CPU, lambda step: counts.update({step: calls.copy()}))
    spent = counts[STEPS] - counts[FIRST]
    return {f"Python calls, {name}": spent[name] / (STEPS - FIRST) / ACCUMULATION for name in spent}


def device_traffic() -> dict[str, float]:
    """Copies between host and device, allocations of pinned memory, and waits of the host, per
    step.
    """
    counts, at = Counter[str](), {}
    original = fake_cuda.dispatch

    def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
        out = original(func, args, kwargs)
        if func in fake_cuda.COPIES:
            to, origin = (
                (args[0], args[1]) if func is fake_cuda.aten.copy_.default else (out, args[0])
            )
            counts["copies to the device"] += (origin.device.type, to.device.type) == (
                "cpu",
                "cuda",
            )
            counts["copies to the host"] += (origin.device.type, to.device.type) == ("cuda", "cpu")
        return out

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        counts["pinned allocations"] += 1
        return tensor

    with pytest.MonkeyPatch.context() as patch, fake_cuda.fake_gpus(patch) as syncs:
        patch.setattr(fake_cuda, "dispatch", dispatch)
        patch.setattr(torch.Tensor, "pin_memory", pin)
        train(
            GPU,
            lambda step: at.update(
                {step: dict(counts) | {"host waits for the device": syncs.count}}
            ),
        )
    return {
        name: (at[STEPS][name] - at[FIRST].get(name, 0)) / (STEPS - FIRST) for name in at[STEPS]
    }


class CountingGroup(FakeGroup):
    """Two ranks with equal rows."""

    calls: ClassVar[Counter[str]] = Counter()


for _name in ("all_reduce_min", "all_reduce_sum", "all_gather", "reduce_scatter"):

    def _counted(self: Any, *args: Any, name: str = _name) -> Any:
        CountingGroup.calls[name] += 1
        return getattr(FakeGroup, name)(self, *args)

    setattr(CountingGroup, _name, _counted)


def collectives() -> dict[str, float]:
    """Collectives of a step that can recover from OOM, by objective and micro-batches."""
    counts: dict[str, float] = {}
    for name, objective in (
        ("contrastive", toy.objective("contrastive")),
        ("row-wise", toy.Regression()),
    ):
        for micro in (MICRO, MICRO * ACCUMULATION):
            state = toy.train_state(
                toy.Branched(), CountingGroup(0, 2), objective, parallel="branches"
            )
            batch = make_local_batch(toy.cut(toy.rows(MICRO * ACCUMULATION, 0), micro))
            CountingGroup.calls.clear()
            optimizer_step(state, batch, lambda index: index)
            several = "accumulated" if micro == MICRO else "one micro-batch"
            counts[f"collectives, {name}, {several}"] = CountingGroup.calls.total()
    return counts


def logging() -> dict[str, float]:
    """Work of the training thread for a logged line of 40 metrics."""
    in_thread, training = Counter[str](), threading.current_thread()

    def count(name: str) -> None:
        in_thread[name] += threading.current_thread() is training

    writers.CHECK_EVERY_S = 0.0
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsLog(Path(folder), check_lease=lambda: count("storage calls"))
        file, line = log._file, {"step": 1} | {f"train/value_{number}": 0.5 for number in range(40)}
        write = lambda data: (count("storage calls"), file.write(data))[1]  # noqa: E731
        log._file = SimpleNamespace(write=write, close=file.close)
        log.write(line)  # imports TensorBoard
        getattr(log, "flush", lambda: None)()
        in_thread.clear()
        with counted_calls() as calls:
            log.write(line)
        log.close()
    return {
        "storage calls in a logged line": in_thread["storage calls"],
        "Python calls in a logged line": calls["all"],
    }


def main() -> None:
    for measure in (python_calls, device_traffic, collectives, logging):
        for name, count in measure().items():
            print(f"| {name} | {count:g} |", flush=True)


if __name__ == "__main__":
    main()
