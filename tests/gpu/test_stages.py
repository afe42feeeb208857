"""The GPU benchmark: a failure is a line of the result, and gaps are those between kernels."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from mmray.processes import Channel, ChildProcess
from tests.gpu import command, device_checks, stages, workload
from tests.gpu.kernels import ProfiledSteps, largest_gaps
from tests.gpu.stages import STAGES, run_stage
from tests.polling import wait_until

CPU = torch.device("cpu")


def test_stages_write_their_rows_and_a_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    # The process of the stage, with short measurements.
    run = "from tests.gpu import command, workload; workload.MAX_TIMING_S = 0.05; command.main()"
    monkeypatch.setattr(command, "COMMAND", [sys.executable, "-c", run])
    arguments = ["--device", "cpu", "--stages", "environment", "--out", str(tmp_path / "out")]
    status = command.main(arguments)
    printed = capsys.readouterr().out
    assert status == 0, printed
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    stages = {stage["stage"]: stage["rows"] for stage in summary["stages"]}
    assert list(stages) == ["environment"]
    machine, *rates = stages["environment"]
    assert machine["torch"] == torch.__version__ and rates
    written = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert written["rows"] == stages["environment"]
    passed = len(stages["environment"])
    assert summary["counts"] == {"passed": passed, "failed": 0, "skipped": 0}
    assert rates[-1]["case"] in printed
    assert f"{passed} passed, 0 failed, 0 skipped" in printed


def rows_of_stage(_: Channel | None, name: str) -> list[dict[str, Any]]:
    written: list[list[dict[str, Any]]] = []
    run_stage(name, CPU, lambda rows: written.append(list(rows)), math.inf)
    return written[-1]


@pytest.mark.usefixtures("one_thread")
def test_kernels_and_gaps_between_them_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "MAX_TIMING_S", 0.05)
    rows = rows_of_stage(None, "kernels")
    cases = [row["case"] for row in rows]
    assert cases[:2] == ["clip, 8 rows", "clip, 8 rows, kernel 1"]
    assert "clip, 8 rows, gap 1" in cases
    skipped = [row["case"] for row in rows if "skipped" in row]
    assert command.count_outcomes(rows)["failed"] == 0, rows
    # attention with two backends and layouts, and blocks, of both encoders
    assert len(skipped) == 2 * (4 + 1) and {"ms", "lowest", "highest"} <= rows[-3].keys()


def test_float8_is_skipped_by_name_on_a_device_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert stages.measure_float8(CPU)["skipped"].startswith("train.float8 tensorwise needs GPUs")
    # The rest, in float32 and eager.
    monkeypatch.setattr(stages, "VIT_L", workload.TINY["clip"])
    monkeypatch.setattr(stages, "VIT_L_ROWS", workload.TINY_ROWS)
    monkeypatch.setattr(stages, "FLOAT8_STEPS", 2)
    built = stages.build_bench

    def build_plain(config: Any, *arguments: Any) -> Any:
        plain = {"precision": "fp32", "compile": "none", "float8": "none"}
        return built(config.replace(train=config.train.replace(**plain)), *arguments)

    monkeypatch.setattr(stages, "build_bench", build_plain)
    ratio, float8, bf16 = stages.measure_float8(CPU)
    assert (
        ratio["float8_vs_bf16_lowest"] <= ratio["float8_vs_bf16"] <= ratio["float8_vs_bf16_highest"]
    )
    assert (float8["case"], bf16["case"]) == ("ViT-L/14, 4 rows, float8", "ViT-L/14, 4 rows, bf16")
    assert float8["lowest"] <= float8["samples_per_s"] <= float8["highest"]
    assert float8["loss"] == bf16["loss"] > 0


def test_time_of_a_kernel_has_a_spread() -> None:
    """A call takes as long as the attention of a step on a GPU."""
    times = workload.time_calls(lambda: time.sleep(0.005)).times
    assert len(times) > 1 and min(times) < max(times)


def test_distributed_code_runs_in_a_group_of_one(forked_children: None) -> None:
    """In a process of its own, because the stage starts the process group."""
    child = ChildProcess("nccl", rows_of_stage, "nccl")
    rows = {row["case"]: row for row in child.result()}
    child.close()
    assert not any("error" in row for row in rows.values()), rows
    assert max(rows[name]["from_module"] for name in ("ddp", "fsdp", "evaluation")) < 1e-9
    assert rows["checkpoint staging"]["largest_difference"] == 0


@pytest.mark.slow
def test_run_stage_trains_with_commands_locally_and_through_ray() -> None:
    written: list[list[dict[str, Any]]] = []
    run_stage("run", CPU, lambda rows: written.append(list(rows)), math.inf)
    rows = {row["case"]: row for row in written[-1]}
    assert not any("error" in row for row in rows.values()), rows
    kinds = ("", " loop", " through Ray")
    assert set(rows) == {
        "photos",
        "sample-vlm",
        "sample-av",
        *(f"{name}{kind}" for name in ("sample", "clip") for kind in kinds),
    }
    for recipe in ("sample", "clip"):
        for case in (recipe, f"{recipe} through Ray"):
            ratio = rows[case]["samples_per_s"] / rows[f"{recipe} loop"]["samples_per_s"]
            assert rows[case]["run_vs_loop"] == pytest.approx(ratio)


def test_failed_case_is_a_line_and_late_cases_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s, written = [0.0], []

    def fail() -> dict[str, Any]:
        raise RuntimeError("no kernel image\nis available")

    def last_in_time() -> list[dict[str, Any]]:
        now_s[0] = 11.0
        return [{"case": "one", "value": 1}, {"case": "two", "value": 2}]

    monkeypatch.setattr(stages.time, "monotonic", lambda: now_s[0])
    monkeypatch.setitem(
        STAGES, "kernels", lambda _: iter([("bad", fail), ("good", last_in_time), ("late", fail)])
    )
    run_stage("kernels", CPU, lambda rows: written.append(list(rows)), end_s=10.0)
    assert written[0] == [{"case": "bad", "running": True}]
    assert [len(rows) for rows in written] == [1, 1, 2, 3, 4]
    bad, one, two, late = written[-1]
    assert (bad["case"], bad["seconds"]) == ("bad", 0.0) and bad["error"].startswith(
        "RuntimeError: no kernel image"
    )
    assert "no kernel image\nis available" in capsys.readouterr().err  # with its traceback
    assert (one["value"], one["seconds"], two) == (1, 11.0, {"case": "two", "value": 2})
    assert late == {"case": "late", "skipped": "time limit of the stage"}


def test_crash_fails_the_running_case_and_the_time_limit_skips_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Popen(subprocess.Popen):
        """Its time limit starts when it has written its results."""

        def wait(self, timeout: float | None = None) -> int:
            wait_until((tmp_path / "kernels.json").exists)
            return super().wait(timeout)

    monkeypatch.setattr(command.subprocess, "Popen", Popen)
    child = (
        "import os, sys, time; os.chdir(sys.argv[2]); open('new', 'w').write('{\"rows\": "
        '[{"case": "kept"}, {"case": "last", "running": true}]}\'); '
        "os.rename('new', 'kernels.json'); "
    )
    ends = {
        "print('bad GPU', flush=True); os.abort()": (60, "error", "ended with -6: bad GPU"),
        "time.sleep(600)": (1, "skipped", "stopped at the limit of 1 s"),
    }
    for end, (limit_s, outcome, expected) in ends.items():
        monkeypatch.setattr(command, "COMMAND", [sys.executable, "-c", f"{child}{end}"])
        stage = command.run_stage("kernels", "cpu", tmp_path, limit_s)
        kept, last = stage["rows"]
        assert (kept, last["case"]) == ({"case": "kept"}, "last") and expected in last[outcome]
        failed = int(outcome == "error")
        assert stage["counts"] == {"passed": 1, "failed": failed, "skipped": 1 - failed}


def test_largest_gaps_are_between_spans_that_do_not_overlap() -> None:
    spans = [
        (30.0, 40.0, "c"),
        (0.0, 10.0, "a"),
        (5.0, 8.0, "inside a"),
        (10.0, 12.0, "b"),
        (45.0, 50.0, "d"),
    ]
    busy_share, rows = largest_gaps(spans, count=1)
    assert busy_share == pytest.approx(1 - 23 / 50)
    assert rows == [{"gap_us": 18.0, "after": "b", "before": "c"}]


@pytest.mark.parametrize(
    ("stages", "limits"),
    [
        ([], [seconds for name, seconds in command.LIMITS_S.items() if name != "peers"]),
        (["models"], [command.TOTAL_S]),
        (["kernels", "nccl"], [command.TOTAL_S * 4 / 5, command.TOTAL_S]),
    ],
)
def test_chosen_stages_share_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: list[str], limits: list[float]
) -> None:
    """A stage leaves its time to the next; the summary is complete after each."""
    given: list[float] = []

    def run(name: str, device_type: str, folder: Path, limit_s: float) -> dict[str, Any]:
        summary = folder / "summary.json"
        assert len(json.loads(summary.read_text())["stages"] if given else []) == len(given)
        given.append(limit_s)
        return {"stage": name, "seconds": 0.0, "counts": command.count_outcomes([]), "rows": []}

    monkeypatch.setattr(command, "run_stage", run)
    monkeypatch.setattr(command.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["--out", str(tmp_path), *(["--stages", *stages] if stages else [])]) == 0
    assert set(command.LIMITS_S) == set(STAGES)
    assert given == pytest.approx(limits if stages else list(accumulate(limits)))
    assert given[-1] == pytest.approx(command.TOTAL_S)


def test_stopped_command_stops_its_stage(tmp_path: Path) -> None:
    child = (
        "import os, pathlib, time; pathlib.Path('pid').write_text(f'{os.getpid()};'); "
        "time.sleep(60)"
    )
    script = (
        "from tests.gpu import command; "
        f"command.COMMAND = [{sys.executable!r}, '-c', {child!r}]; command.main()"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", script, "--out", ".", "--stages", "kernels"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith(";"))
    command.terminate()
    assert command.wait() != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()[:-1]), 0)


def test_memory_probe_is_kept_if_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot compile")

    monkeypatch.setattr(stages.Bench, "train", fail)
    written: list[dict[str, Any]] = []
    run_stage("memory", CPU, lambda rows: written.extend(rows[-1:]), end_s=math.inf)
    rows = {row["case"]: row for row in written}
    assert list(rows) == ["clip, probe", "clip, run"]
    assert rows["clip, probe"]["micro"] == workload.TINY_GLOBAL_BATCH_SIZE
    assert rows["clip, run"]["error"].startswith("RuntimeError: cannot compile")


def test_failed_check_reports_its_values() -> None:
    class Syncs:
        values = count(1)

        @property
        def count(self) -> int:
            return next(self.values)

    with pytest.raises(
        AssertionError, match=r"fp32: host synchronizations by step \[1\], not \[0\]"
    ):
        device_checks.check_half_precision("clip", CPU, Syncs())


def test_gaps_are_measured_without_the_recording_of_operators() -> None:
    assert ProfiledSteps(torch.device("cuda")).profile.activities == {ProfilerActivity.CUDA}
