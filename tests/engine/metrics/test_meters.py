"""metrics.jsonl stays correct across restarts; rates exclude the first step; a set of rows has one hash."""

from __future__ import annotations

import errno
import json
import mmap
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

from mmray.engine.metrics import writers
from mmray.engine.metrics.meters import model_flops, rows_sha
from mmray.engine.metrics.timers import PHASES, RECENT_STEPS, PeakMemory, PhaseTimers, Throughput
from mmray.engine.metrics.writers import MetricsLog, profiled
from mmray.engine.worker_context import InputBoundHint, input_bound_hint
from mmray.errors import StorageError, TrainingError
from tests.engine import toy


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_after_the_resumed_step_are_dropped_and_counted(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (10, 20, 30):
        log.write({"step": step, "rows_sha": "ab", "train/loss": 1 / step})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "trai')  # killed in the middle of a line
    again = MetricsLog(tmp_path, start_step=20)
    assert again.wasted_steps == 10
    again.write({"step": 25, "train/loss": 0.5})
    again.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [10, 20, 25]
    assert MetricsLog(tmp_path, start_step=25).wasted_steps == 0
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [event.step for event in events] == [10, 20, 25]


def test_line_is_flushed_immediately_as_strict_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "train/loss": float("nan"), "train/grad_norm": float("inf")})
    assert lines_of(tmp_path) == [{"step": 1, "train/loss": None, "train/grad_norm": None}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    log.close()


class Disk:
    """The log's file, on a disk with this many free bytes."""

    def __init__(self, log, room):
        self.file, self.room = log._file, room
        log._file = self

    def write(self, line):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(line[: self.room])
        self.room -= taken
        return taken

    def close(self):
        self.file.close()


def test_full_disk_is_logged_once_and_lines_are_written_later(tmp_path):
    told = []
    log = MetricsLog(tmp_path, tell=told.append)
    disk = Disk(log, room=70)
    for step in range(1, 6):
        log.write({"step": step, "train/loss": 1 / step})
    assert len(told) == 1 and "metrics.jsonl: No space left on device" in told[0] and "are kept" in told[0]
    assert (tmp_path / "metrics.jsonl").stat().st_size == 70  # two lines and a half
    disk.room = 10**6
    log.write({"step": 6, "train/loss": 0.1})
    disk.room = 0
    log.write({"step": 7, "train/loss": 0.1})
    disk.room = 10**6
    log.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert len(told) == 2  # it was full twice


def test_lines_never_written_are_counted_and_do_not_end_the_run(tmp_path):
    told = []
    log = MetricsLog(tmp_path, tell=told.append)
    Disk(log, room=0)
    for step in (1, 2):
        log.write({"step": step})
    log.close()
    assert len(told) == 2 and "its last 2 lines are lost" in told[1]


def test_tensorboard_on_full_disk_is_logged_and_starts_another_file_later(tmp_path):
    told = []
    log = MetricsLog(tmp_path, tell=told.append)
    log.write({"step": 1, "train/loss": 1.0})
    writer = log._events._get_file_writer().event_writer._async_writer
    writer._worker.exception = OSError(errno.ENOSPC, "No space left on device")
    log.write({"step": 2, "train/loss": 0.5})
    assert len(told) == 1
    log.write({"step": 3, "train/loss": 0.25})
    log.close()
    assert len(told) == 1 and len(lines_of(tmp_path)) == 3 and len(list(tmp_path.glob("events.*"))) == 2
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")[-1].step == 3


def test_unopenable_log_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl: Is a directory\. Free disk space"):
        MetricsLog(tmp_path)


def test_log_taken_over_by_another_training_gets_no_further_lines(tmp_path, monkeypatch):
    now_s, ours = [1000.0], [True]
    monkeypatch.setattr(writers.time, "time", lambda: now_s[0])

    def check():
        if not ours[0]:
            raise TrainingError("taken over")

    log = MetricsLog(tmp_path, check=check)
    log.write({"step": 1})
    ours[0] = False
    log.write({"step": 2})  # the lease file is not read in each step
    now_s[0] += writers.CHECK_EVERY_S
    for late in (lambda: log.write({"step": 3}), log.close):
        with pytest.raises(TrainingError, match="taken over"):
            late()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_rates_exclude_the_first_step():
    timers = PhaseTimers(torch.device("cpu"))
    rates = Throughput(timers)
    with timers("forward"):
        time.sleep(0.2)
    rates.add(step_s=100, wait_s=90, rows=64, tokens=9)
    assert rates.compute(world=2) == {}
    for _ in range(2):
        with timers("backward"):
            time.sleep(0.01)
    rates.add(step_s=1, wait_s=0.25, rows=64, tokens=6)
    rates.add(step_s=3, wait_s=0.75, rows=32, tokens=6)
    taken = rates.compute(world=2)
    assert 0.01 <= taken.pop("time/backward_s") < 0.1
    assert {name: taken.pop(f"time/{name}_s") for name in PHASES if name != "backward"} == {
        name: 0.0 for name in PHASES if name != "backward"
    }
    assert taken == {
        "time/step_s": 2,
        "time/step_p50_s": 2,
        "time/step_p95_s": pytest.approx(2.9),
        "time/first_step_s": 100,
        "time/data_wait_s": 0.5,
        "time/data_wait_share": 0.25,
        "throughput/samples_per_s": 24,
        "throughput/tokens_per_s": 6,
    }
    assert rates.compute(world=2) == {}


def test_phase_timers_cost_little():
    """Twenty phases per step, more than a real step has, take less than a thousandth of a step of 0.2 seconds."""
    timers = PhaseTimers(torch.device("cpu"))
    began_s = time.perf_counter()
    for _ in range(200):
        for _ in range(20):
            with timers("forward"):
                pass
        timers.pop_s()
    assert (time.perf_counter() - began_s) / 200 < 2e-3 * 0.2 * 5  # a margin of five for a busy machine


def test_flops_equal_a_count_by_hand():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    first = 2 * 5 * 8 * 16  # without gradient of its input
    assert model_flops(model, torch.ones(5, 8), toy.FP32) == 3 * forward - first
    branched, batch = toy.Branched(), toy.rows(5, 0)
    whole = model_flops(branched, batch, toy.FP32)
    for parameter in branched.image.parameters():
        parameter.requires_grad_(False)
    first, second = 2 * 5 * 3 * toy.SIDE * toy.SIDE * 16, 2 * 5 * 16 * 8
    assert whole - model_flops(branched, batch, toy.FP32) == first + 2 * second


class Adapted(torch.nn.Module):
    """Convolution, frozen layers with LoRA on one of them, attention, and a head; all matrix products are known."""

    def __init__(self):
        super().__init__()
        self.pixels = torch.nn.Conv2d(3, 8, 2, stride=2)
        self.before, self.base, self.after = (torch.nn.Linear(8, 8) for _ in range(3))
        self.down, self.up = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 8, bias=False)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, image):
        rows = self.before(self.pixels(image).flatten(2).transpose(1, 2).relu()).relu()
        rows = (self.base(rows) + self.up(self.down(rows))).relu()
        mixed = (rows @ rows.transpose(1, 2)).softmax(-1) @ rows
        return self.head(self.after(mixed).relu())


LEARNING = {
    "everything": ("pixels", "before", "base", "after", "down", "up", "head"),
    "adapters": ("down", "up"),
    "head": ("head",),
    "first": ("pixels",),
    "nothing before the middle": ("base", "head"),
}


@pytest.mark.parametrize("name", LEARNING)
def test_flops_equal_those_of_a_real_forward_and_backward(name):
    model, image = Adapted(), torch.rand(4, 3, 8, 8)
    for part, layer in model.named_children():
        layer.requires_grad_(part in LEARNING[name])
    with FlopCounterMode(display=False) as counter:
        model(image).sum().backward()
    assert model_flops(model, image, toy.FP32) == counter.get_total_flops()


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, rows):
        return torch.nn.functional.scaled_dot_product_attention(self.query(rows), self.key(rows), self.value(rows))


@pytest.mark.parametrize(("frozen", "backward"), [((), 4), (("query", "key"), 1), (("value",), 3), (("key",), 3)])
def test_attention_flops_are_two_products_and_their_backward(frozen, backward):
    """The input has no gradient. torch's own count includes recomputed scores of the backward."""
    model, rows = Attending(), torch.rand(4, 2, 6, 8)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    linear, product = 2 * 48 * 8 * 8, 2 * 8 * 6 * 6 * 8
    expected = (3 + 3 - len(frozen)) * linear + (2 + backward) * product
    assert model_flops(model, rows, toy.FP32) == expected


@pytest.mark.parametrize(
    ("wait", "workers", "prepared", "said"),
    [
        (0.62, 2, 0, "input-bound 62%: 4 more CPU workers or --prepare.image-side 256 would feed this GPU"),
        (0.2, 2, 256, "input-bound 20%: 1 more CPU worker would feed this GPU"),
        (0.1, 2, 0, None),
    ],
)
def test_advice(wait, workers, prepared, said):
    assert input_bound_hint(wait, workers, prepared, 224, "GPU") == said


def test_advice_is_periodic_and_covers_steps_since_the_last():
    said = []
    advising = InputBoundHint(said.append)
    for step in range(10, 310, 10):
        advising.on_step(step, {"time/data_wait_share": 0.5 if step <= 100 else 0.1})
        advising.on_step(step + 1, None)
    assert said == pytest.approx([0.5, 0.1, 0.1])


def test_profile_of_requested_steps_is_written(tmp_path):
    file = tmp_path / "profile" / "rank-0.json"
    with profiled(2, file, torch.device("cpu")) as step_done:
        for _ in range(6):
            torch.ones(3) + 1
            step_done()
    trace = json.loads(file.read_text())
    assert sum(event.get("name") == "aten::add" for event in trace["traceEvents"]) == 2
    with profiled(0, tmp_path / "none.json", torch.device("cpu")) as step_done:
        step_done()
    assert not (tmp_path / "none.json").exists()


def test_percentiles_cover_recent_steps_over_log_intervals():
    rates = Throughput(PhaseTimers(torch.device("cpu")))
    for step in range(1 + RECENT_STEPS + 100):
        rates.add(step_s=50 if step <= 100 else step % 100 + 1, wait_s=0, rows=1, tokens=1)
        taken = rates.compute(world=1)
    assert (taken["time/step_p50_s"], taken["time/step_p95_s"]) == (50.5, pytest.approx(95.05, abs=0.05))


def test_rows_hash_does_not_depend_on_order():
    keys = torch.tensor([3, -5, 2**62])
    known = "f3fbe98ff7a73904"  # hashlib over struct.pack("<3q", -5, 3, 2**62)
    assert rows_sha(keys) == rows_sha(keys.flip(0)) == known
    assert rows_sha(keys) != rows_sha(keys[:2])


def test_peak_memory_includes_start_of_backward():
    timers = PhaseTimers(torch.device("cpu"))
    before_gib = timers.memory.compute_gib(torch.device("cpu"))
    # 0.25 GiB directly from the system, because the allocator may reuse memory of earlier tests.
    activations = mmap.mmap(-1, 2**28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, 2**28, mmap.PAGESIZE):
        activations[page] = 1
    with timers("backward"):
        activations.close()
    assert timers.memory.compute_gib(torch.device("cpu")) > before_gib + 0.2


def test_peak_memory_is_of_this_process():
    held = torch.ones(2**26)  # 0.25 GiB
    assert held.nbytes / 2**30 < PeakMemory().compute_gib(torch.device("cpu")) < 64
