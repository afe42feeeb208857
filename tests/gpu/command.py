"""`python -m tests.gpu --out DIR`: what a machine with a GPU shows about mmray, in at most 15
minutes.

Each stage of stages.py runs in its own process with a time limit and writes DIR/STAGE.json
before and after each case, so that a crash of the GPU, or a stop, loses one case. DIR/summary.json
has the stages that have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from mmray.storage.paths import write_atomic

TOTAL_S = 900.0  # limit of a command, whatever its stages
# The stages by value, and their shares of TOTAL_S. Time that a stage leaves is for the next. On a
# new machine with an H200 the first imports take 20 s, compiling `clip` 20 s, and `resnet50-bert`
# 85 s.
LIMITS_S = {
    "environment": 45,
    "run": 270,
    "step": 180,
    "kernels": 60,
    "nccl": 15,
    "checks": 100,
    "memory": 60,
    "resnet": 110,
    "models": 60,
    "peers": 250,
}
OPTIONAL = ("peers",)  # only if named: it needs open_clip

COMMAND = [sys.executable, "-m", "tests.gpu"]
CPU_FACTOR = 3  # longer limits: a run on a CPU measures nothing, and may share its cores
LAST_CASE_S = 15  # no case of a stage starts later than this before its limit


def main(argv: list[str] | None = None) -> int:
    """Run stages (groups of GPU measurements), each in a process with a time limit, and write their
    results.

    Writes STAGE.json and STAGE.log per stage and summary.json into the folder of `--out`, and
    prints a line per measurement (case).

    Args:
        argv: Arguments such as `["--out", "results", "--stages", "step"]`; None: those of this
            process. The stages are `environment`, `run`, `step`, `kernels`, `nccl`, `checks`,
            `memory`, `resnet`, `models` and `peers`.

    Returns:
        Exit status: 1 if a case failed, otherwise 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same with tiny models"
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=tuple(LIMITS_S),
        default=[name for name in LIMITS_S if name not in OPTIONAL],
        help="only these",
    )
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="limit of all stages")
    # run one stage in this process
    parser.add_argument("--child-limit-s", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    if args.child_limit_s is not None:
        run_child(args.stages[0], args.device, args.out, start_s + args.child_limit_s)
        os._exit(0)  # the end of an interpreter with compile workers takes seconds
    # SIGTERM becomes an exception, so that the process of the stage is killed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    factor = (
        args.seconds
        / sum(LIMITS_S[name] for name in args.stages)
        * (1 if args.device == "cuda" else CPU_FACTOR)
    )
    result: dict[str, Any] = {"device": args.device, "stages": []}
    end_s = start_s
    for name in args.stages:
        end_s += LIMITS_S[name] * factor
        stage = run_stage(name, args.device, args.out, end_s - time.monotonic())
        result["stages"].append(stage)
        counts = count_outcomes([row for each in result["stages"] for row in each["rows"]])
        result |= {"seconds": time.monotonic() - start_s, "counts": counts}
        write_json(args.out / "summary.json", result)
        print("\n".join(format_table(stage)))
        print(f"{name}: {format_counts(stage['counts'])} in {stage['seconds']:.0f} s", flush=True)
    print(
        f"{format_counts(counts)} in {result['seconds']:.0f} s; results in "
        f"{args.out / 'summary.json'}"
    )
    return int(counts["failed"] > 0)


def run_child(name: str, device_type: str, folder: Path, end_s: float) -> None:
    """Run the cases (measurements or checks) of a stage, a group of them, in this process, and
    write STAGE.json.

    Args:
        name: Name of the stage: `environment`, `run`, `step`, `kernels`, `nccl`, `checks`,
            `memory`, `resnet` or `models`.
        device_type: `cuda`, or `cpu` for the same code with tiny models.
        folder: Folder of the results.
        end_s: time.monotonic() after which no further case starts.

    Raises:
        SystemExit: torch has no GPU.
    """
    import torch

    from tests.gpu import stages

    if device_type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "torch sees no GPU: install a CUDA build of torch and a driver, or pass --device cpu"
        )
    if device_type == "cpu":
        # tiny models are faster, above all if other processes use the cores
        torch.set_num_threads(1)
    file = folder / f"{name}.json"
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    stages.run_stage(name, device, lambda rows: write_json(file, {"rows": rows}), end_s)


def run_stage(name: str, device_type: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a stage (a group of measurements or checks) in a new process, and kill it at its time
    limit.

    Args:
        name: Name of the stage: `environment`, `run`, `step`, `kernels`, `nccl`, `checks`,
            `memory`, `resnet` or `models`.
        device_type: `cuda`, or `cpu` for the same code with tiny models.
        folder: Folder of the results, in which STAGE.json and STAGE.log are written.
        limit_s: Time limit in seconds.

    Returns:
        `stage` (name), `seconds`, `counts` (cases by outcome: passed, failed, skipped) and `rows`
        (a dict per case: `case`, its measurements, or `error` or `skipped` with the reason).
    """
    file = folder / f"{name}.json"
    log = folder / f"{name}.log"
    start_s = time.monotonic()
    file.unlink(missing_ok=True)
    options = ["--out", str(folder), "--device", device_type, "--stages", name]
    command = [*COMMAND, *options, "--child-limit-s", str(limit_s - min(LAST_CASE_S, limit_s / 2))]
    with log.open("w") as output:
        # A session of its own, so that the processes that it spawns end with it.
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        outcome: dict[str, str] = {}
        try:
            if child.wait(limit_s) != 0:
                lines = log.read_text(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "no output")
                outcome = {"error": f"the process ended with {child.returncode}: {last} ({log})"}
        except subprocess.TimeoutExpired:
            outcome = {"skipped": f"stopped at the limit of {limit_s:.0f} s"}
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    if outcome:
        running = [row for row in rows if row.pop("running", False)]
        for row in running:
            row |= outcome
        if not running:
            rows.append({"case": "stage"} | outcome)
    stage = {
        "stage": name,
        "seconds": time.monotonic() - start_s,
        "counts": count_outcomes(rows),
        "rows": rows,
    }
    write_json(file, stage)
    return stage


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file in one step, so that a reader sees a whole file.

    Args:
        file: The file, which is replaced.
        value: JSON data; NaN and infinity are written as null.
    """
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    write_atomic(file, orjson.dumps(value, option=options))


def count_outcomes(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many cases (measurements or checks) `passed`, `failed` and were `skipped`.

    Args:
        rows: A dict per case; a failed one has the key `error`, a skipped one `skipped`.
    """
    failed, skipped = (sum(key in row for row in rows) for key in ("error", "skipped"))
    return {"passed": len(rows) - failed - skipped, "failed": failed, "skipped": skipped}


def format_counts(counts: dict[str, int]) -> str:
    """Format numbers of cases (measurements or checks) by outcome as `5 passed, 1 failed, 0
    skipped`.

    Args:
        counts: Number of cases by outcome: `passed`, `failed` and `skipped`.
    """
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def format_table(stage: dict[str, Any]) -> list[str]:
    """Return a line per case (measurement) of a stage, such as `step  clip, 1024 rows  loop_vs_bare
    0.98`.

    Args:
        stage: `stage` (name) and `rows` (a dict per case: `case`, its measurements, or `error` or
            `skipped`).
    """
    width = max((len(row["case"]) for row in stage["rows"]), default=0)
    return [
        f"{stage['stage']}  {row['case']:{width}}  {format_result(row)}" for row in stage["rows"]
    ]


def format_result(row: dict[str, Any]) -> str:
    """Format the result of a case as `name value, ...`, or as `ERROR: reason` or `SKIPPED: reason`.

    Args:
        row: `case` (name), and measurements by name, or `error` or `skipped`.
    """
    for key in ("error", "skipped"):
        if key in row:
            return f"{key.upper()}: {row[key]}"
    values = {name: value for name, value in row.items() if name != "case" and value is not None}
    return ", ".join(
        f"{n} {value:.4g}" if isinstance(value, float) else f"{n} {value}"
        for n, value in values.items()
    )
