"""Batch shape benchmark: each row runs in its own processes; out of memory is a row, not an error."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from mmray.bench import batch_shapes, spawn
from mmray.bench.batch_shapes import MIN_STEPS, StepTimes, bench_shapes, peak_resident_bytes
from mmray.bench.spawn import WorkerFailed, is_out_of_memory, spawn_workers
from mmray.bench.step import WARM_STEPS
from mmray.cli.bench import shapes_table
from mmray.cli.console import Terminal
from mmray.config.model import CustomModel
from mmray.errors import UsageError
from tests.bench.test_step import tiny


class Hungry(torch.nn.Module):
    """A model that runs out of memory for micro-batches larger than 4."""

    def __init__(self, spec: object, vocab_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = len(batch["image"])
        if rows > 4:
            torch.empty(2**60)
        embed = self.weight.expand(rows, 8) * batch["input_ids"][:, :1]
        return {"image_embed": embed, "text_embed": embed, "logit_scale": self.weight[0]}


def test_rows_cover_the_space_and_record_out_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    spec = CustomModel(kind="tests.bench.test_batch_shapes:Hungry", inputs=tiny().model.inputs, vocab_size=32)
    said = []
    result = bench_shapes(tiny(model=spec), ["batch.micro=4,8"], window_s=0.02, notify=said.append)
    fits, fails = result["rows"]
    assert said == ["1 of 2, batch.micro=4: measured", "2 of 2, batch.micro=8: out of memory"]
    assert (fits["status"], fails["status"]) == ("measured", "out_of_memory")
    assert fits["samples_per_s"] > 0 and fits["step_p50_s"] <= fits["step_p95_s"] and 0.05 < fits["peak_gib"] < 4
    assert fits["settings"] == {"batch.micro": 4} and (fits["micro"], fits["global"]) == (4, 4)
    assert fails["samples_per_s"] is None and "allocate" in fails["reason"]
    json.dumps(result)
    Terminal().console.print(shapes_table(result["rows"]))
    assert "out of memory" in capsys.readouterr().out


def test_global_batch_follows_searched_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        batch_shapes, "spawn_workers", lambda measure, config: asked.append(measure.keywords["shape"]) or {}
    )
    spaces = ["batch.micro=2,4", "batch.accumulation=1,3"]
    rows = bench_shapes(tiny(batch={"micro": 8, "global": 64}), spaces)["rows"]  # not the recipe's global batch
    assert [shape.global_rows for shape in asked] == [row["global"] for row in rows] == [2, 6, 4, 12]
    rows = bench_shapes(tiny(), ["batch.micro=4", "batch.global=16", "batch.accumulation=3"])["rows"]
    assert rows[0]["status"] == "infeasible" and "needs accumulation 4" in rows[0]["reason"]


def test_memory_excludes_the_parent_process() -> None:
    held = bytearray(os.urandom(1) * 600_000_000)  # ru_maxrss of a child includes its parent
    row = bench_shapes(tiny(), ["batch.micro=2"], window_s=0.01)["rows"][0]
    assert len(held) and row["peak_gib"] * 2**30 < peak_resident_bytes() - 200_000_000


def test_step_count_covers_warm_up_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(batch_shapes.time, "perf_counter", lambda: float(next(clock)))
    times = StepTimes(torch.device("cpu"), window_s=8.0)
    step = 0
    while not times.enough():
        step += 1
        times.on_step(step)
    assert step == WARM_STEPS + 8 and times.times_s == [1.0] * 8
    short = StepTimes(torch.device("cpu"), window_s=0.0)
    for number in range(1, WARM_STEPS + MIN_STEPS):
        assert not short.enough()
        short.on_step(number)
    assert short.enough()


def test_settings_without_effect_on_steps_are_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.workers: this setting does not affect a step"):
        bench_shapes(tiny(), ["data.workers=1,2"])
    with pytest.raises(UsageError, match=r"batch\.micr: unknown setting; did you mean `micro`"):
        bench_shapes(tiny(), ["batch.micr=1,2"])


def test_model_execution_settings_are_searchable() -> None:
    rows = bench_shapes(tiny(), ["train.channels_last=false,true", "train.activation_checkpointing=[],[image]"], 0.01)[
        "rows"
    ]
    assert [row["status"] for row in rows] == ["measured"] * 4
    assert rows[3]["settings"] == {"train.channels_last": True, "train.activation_checkpointing": ["image"]}


@pytest.mark.parametrize(
    ("have", "accelerator", "said"),
    [
        (0, "auto", []),
        (1, "auto", []),
        (1, "cpu", []),
        (3, "auto", ["2 of 3 GPUs are idle: cluster.workers is 1"]),
    ],
)
def test_idle_gpus_are_reported(monkeypatch: pytest.MonkeyPatch, have: int, accelerator: str, said: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: have)
    assert spawn.idle_gpu_notes(tiny().with_cluster(accelerator=accelerator, workers=1)) == said


def _dies(config: object, group: object, folder: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_counts_as_oom_and_exception_does_not() -> None:
    with pytest.raises(WorkerFailed, match="SIGKILL") as killed:
        spawn_workers(_dies, tiny())
    assert killed.value.out_of_memory
    assert is_out_of_memory(torch.OutOfMemoryError()) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match")) and not is_out_of_memory(ValueError())
    assert spawn.device_of(tiny()).type == "cpu"
