"""The GPU benchmark: it needs few packages, a failure is a line of the result, and gaps are those
between kernels.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from mmray import machine
from mmray.bench import device_checks, gpu, gpu_stages, stand_ins
from mmray.bench.gpu_stages import STAGES, largest_gaps, run_stage
from mmray.config import recipes
from mmray.config.base import Section

CPU = torch.device("cpu")
ABSENT = ("ray", "pydantic", "orjson", "psutil", "rich", "simplejpeg", "tenacity", "tyro", "pytest")
RECIPES = """
from mmray.bench import stand_ins
print(stand_ins.install())
import json
from mmray.config import recipes
def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return {name: plain(item) for name, item in value} if hasattr(value, "model_fields") else value
print(json.dumps({name: plain(recipe()) for name, recipe in recipes.RECIPES.items()}))
"""


@pytest.fixture
def few_packages(tmp_path: Path) -> dict[str, str]:
    """An environment in which the import of other packages than those of the GPU benchmark
    fails.
    """
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no package {name}')")
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}


def plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {name: plain(item) for name, item in value} if isinstance(value, Section) else value


def test_recipes_are_the_same_without_pydantic(few_packages: dict[str, str]) -> None:
    output = subprocess.check_output([sys.executable, "-c", RECIPES], env=few_packages, text=True)
    missing, read = output.splitlines()
    assert missing == "['pydantic', 'psutil', 'orjson', 'simplejpeg', 'tenacity', 'tyro']"
    assert json.loads(read) == {name: plain(recipe()) for name, recipe in recipes.RECIPES.items()}


def test_stand_in_of_psutil_finds_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = machine.network_interface(machine.LOOPBACK)
    monkeypatch.setattr(machine, "psutil", SimpleNamespace(**stand_ins.STAND_INS["psutil"]))
    assert machine.network_interface(machine.LOOPBACK) == expected


def test_stages_run_with_few_packages(few_packages: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mmray.bench.gpu",
        "--device",
        "cpu",
        "--stages",
        "environment",
        "gaps",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], env=few_packages, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    stages = {stage["stage"]: stage["rows"] for stage in summary["stages"]}
    assert list(stages) == ["environment", "gaps"] and "pydantic" in summary["stand_ins"]
    assert stages["environment"][0]["torch"] == torch.__version__
    assert [row["case"] for row in stages["gaps"][:2]] == ["resnet50-bert", "resnet50-bert, gap 1"]
    assert json.loads((tmp_path / "out" / "gaps.json").read_text())["rows"] == stages["gaps"]
    passed = sum(map(len, stages.values()))
    assert summary["counts"] == {"passed": passed, "failed": 0, "skipped": 0}
    assert (
        "resnet50-bert, gap 1" in done.stdout
        and (f"{passed} passed, 0 failed, 0 skipped") in done.stdout
    )


def test_failed_case_is_a_line_and_late_cases_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s, written = [0.0], []

    def fail() -> dict[str, Any]:
        raise RuntimeError("no kernel image\nis available")

    def last_in_time() -> list[dict[str, Any]]:
        now_s[0] = 11.0
        return [{"case": "one", "value": 1}, {"case": "two", "value": 2}]

    monkeypatch.setattr(gpu_stages.time, "monotonic", lambda: now_s[0])
    monkeypatch.setitem(
        STAGES, "gaps", lambda _: iter([("bad", fail), ("good", last_in_time), ("late", fail)])
    )
    run_stage("gaps", CPU, lambda rows: written.append(list(rows)), end_s=10.0)
    assert [len(rows) for rows in written] == [1, 3, 4]
    bad, one, two, late = written[-1]
    assert (bad["case"], bad["seconds"]) == ("bad", 0.0) and bad["error"].startswith(
        "RuntimeError: no kernel image"
    )
    assert "no kernel image\nis available" in capsys.readouterr().err  # with its traceback
    assert (one["value"], one["seconds"], two) == (1, 11.0, {"case": "two", "value": 2})
    assert late == {"case": "late", "skipped": "time limit of the stage"}


def test_stage_that_crashes_or_hangs_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = (
        "import os, sys, time; open(sys.argv[2] + '/gaps.json', 'w').write('{\"rows\": "
        '[{"case": "kept"}]}\'); '
    )
    for end, expected in (
        ("print('bad GPU', flush=True); os.abort()", "ended with -6: bad GPU"),
        ("time.sleep(60)", "limit of 5 s"),
    ):
        monkeypatch.setattr(gpu, "COMMAND", [sys.executable, "-c", f"{child}{end}"])
        stage = gpu.run_stage("gaps", "cpu", tmp_path, limit_s=5)
        rows = stage["rows"]
        assert [row["case"] for row in rows] == ["kept", "stage"] and expected in rows[1]["error"]
        assert stage["counts"] == {"passed": 1, "failed": 1, "skipped": 0}


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
        ([], list(gpu.LIMITS_S.values())),
        (["models"], [480]),
        (["gaps", "syncs"], [480 * 5 / 9, 480]),
    ],
)
def test_chosen_stages_share_eight_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: list[str], limits: list[float]
) -> None:
    """A stage leaves its time to the next; the summary is complete after each."""
    given: list[float] = []

    def run(name: str, device_type: str, folder: Path, limit_s: float) -> dict[str, Any]:
        summary = folder / "summary.json"
        assert len(json.loads(summary.read_text())["stages"] if given else []) == len(given)
        given.append(limit_s)
        return {"stage": name, "seconds": 0.0, "counts": gpu.count_outcomes([]), "rows": []}

    monkeypatch.setattr(gpu, "run_stage", run)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main(["--out", str(tmp_path), *(["--stages", *stages] if stages else [])]) == 0
    assert set(gpu.LIMITS_S) == set(STAGES)
    assert given == pytest.approx(limits if stages else list(accumulate(limits)))
    assert given[-1] == pytest.approx(480)


def test_stopped_command_stops_its_stage(tmp_path: Path) -> None:
    child = (
        "import os, pathlib, time; pathlib.Path('pid').write_text(f'{os.getpid()};'); "
        "time.sleep(60)"
    )
    script = (
        f"from mmray.bench import gpu; gpu.COMMAND = [{sys.executable!r}, '-c', {child!r}]; "
        "gpu.main()"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", script, "--out", ".", "--stages", "gaps"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().endswith(";")):
        assert command.poll() is None
        time.sleep(0.05)
    command.terminate()
    assert command.wait() != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()[:-1]), 0)


def test_memory_probe_is_kept_if_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot compile")

    monkeypatch.setattr(gpu_stages.Bench, "train", fail)
    written: list[dict[str, Any]] = []
    run_stage("memory", CPU, lambda rows: written.extend(rows[-1:]), end_s=math.inf)
    rows = {row["case"]: row for row in written}
    assert list(rows) == [
        f"{name}, {part}" for part in ("probe", "run") for name in gpu_stages.RECIPES
    ]
    for name in gpu_stages.RECIPES:
        assert rows[f"{name}, probe"]["micro"] == gpu_stages.TINY_GLOBAL_ROWS
        assert rows[f"{name}, run"]["error"].startswith("RuntimeError: cannot compile")


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
    assert gpu_stages.ProfiledSteps(torch.device("cuda")).profile.activities == {
        ProfilerActivity.CUDA
    }
