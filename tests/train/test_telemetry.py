"""metrics.jsonl stays a true record across restarts; rates leave the first step out; a row set has one name."""

from __future__ import annotations

import json

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmray.train.telemetry import MetricsLog, PeakMemory, Rates, rows_sha


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_beyond_the_start_are_dropped_and_counted(tmp_path):
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


def test_a_line_is_on_disk_at_once_and_is_strict_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "train/loss": float("nan"), "train/grad_norm": float("inf")})
    assert lines_of(tmp_path) == [{"step": 1, "train/loss": None, "train/grad_norm": None}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    log.close()


def test_rates_leave_the_first_step_out():
    rates = Rates()
    rates.add(step_s=100, wait_s=90, rows=64)
    assert rates.take() == {}
    rates.add(step_s=1, wait_s=0.25, rows=64)
    rates.add(step_s=3, wait_s=0.75, rows=32)
    assert rates.take() == {
        "time/step_s": 2,
        "time/data_wait_s": 0.5,
        "time/data_wait_share": 0.25,
        "throughput/samples_per_s": 24,
    }
    assert rates.take() == {}


def test_rows_sha_names_the_set_and_not_its_order():
    keys = torch.tensor([3, -5, 2**62])
    known = "f3fbe98ff7a73904"  # hashlib over struct.pack("<3q", -5, 3, 2**62)
    assert rows_sha(keys) == rows_sha(keys.flip(0)) == known
    assert rows_sha(keys) != rows_sha(keys[:2])


def test_peak_memory_is_of_this_process():
    held = torch.ones(2**26)  # 0.25 GiB
    assert held.nbytes / 2**30 < PeakMemory().look_gib(torch.device("cpu")) < 64
