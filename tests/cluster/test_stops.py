"""The command is stopped with Ctrl-C, then killed without notice, then runs to its end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import ray
from ray._private.state import actors

from mmray.config import to_yaml
from mmray.training.driver import train
from tests.made import png
from tests.training.runs import TRAINS, Silent, config, expected_marks, make_data, marks

# two minutes each; run by hand
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
CANARY = "canary-5f1d0c"  # a secret that no file of a run may contain
COMMAND = [sys.executable, "-c", "from mmray.cli import main; main()"]


def start(recipe, *words):
    """The command (`train` with this recipe, or the given words) in a new process; its output is in
    the file `log`.
    """
    secrets = {"AWS_SECRET_ACCESS_KEY": CANARY, "WANDB_API_KEY": CANARY, "HF_TOKEN": CANARY}
    log = recipe.with_name(f"{time.time_ns()}.log")
    words = words or ("train", str(recipe))
    with log.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, *words], env=os.environ | secrets, stdout=file, stderr=subprocess.STDOUT
        )
    process.log = log
    return process


def logged(run):
    """The complete lines of metrics, as text."""
    file = run / "metrics.jsonl"
    return (
        [line for line in file.read_text().splitlines(True) if line.endswith("\n")]
        if file.exists()
        else []
    )


def wait_for_step(process, run, step, earlier=(), timeout_s=300.0):
    """Wait until this process logged `step` or a later one;

    `earlier`: the lines of other processes.
    """
    end_s = time.monotonic() + timeout_s
    while not TRAINS.search(process.log.read_text()) or not any(
        json.loads(line)["step"] >= step for line in logged(run) if line not in earlier
    ):
        assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < end_s, f"step {step} never came"
        time.sleep(0.1)


def left_on(address, within_s=60.0):
    """Remaining actors and placement groups, without the detached ones of Ray itself."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        end_s = time.monotonic() + within_s
        while True:
            alive = [
                a["ActorClassName"]
                for a in actors().values()
                if a["State"] == "ALIVE" and not a["IsDetached"]
            ]
            groups = [
                group
                for group in ray.util.placement_group_table().values()
                if group["state"] == "CREATED"
            ]
            if (not alive and not groups) or time.monotonic() > end_s:
                return alive, groups
            time.sleep(0.5)
    finally:
        ray.shutdown()


def test_stop_then_kill_then_finish_is_one_run(nodes, data, tmp_path):
    """Exit code 130 with nothing left on the cluster; a kill loses at most one interval; no secret
    is stored.
    """
    nodes.reset([(4, 2)])
    made = config(data, tmp_path, "run", ("tests.training.faults:Slowly",), nodes.address, steps=20)
    recipe, run = tmp_path / "mine.yaml", tmp_path / "run"
    recipe.write_text(to_yaml(made))

    stopped = start(recipe)
    wait_for_step(stopped, run, 2)
    stopped.send_signal(signal.SIGINT)
    stopped.wait(timeout=180)
    output = stopped.log.read_text()
    assert stopped.returncode == 130, output
    assert "to resume from step" in output and "Traceback" not in output and "raylet" not in output
    assert left_on(nodes.address) == ([], [])

    page = (run / "report.html").stat().st_mtime_ns
    earlier = logged(run)
    at_once = start(recipe)
    wait_for_step(at_once, run, 5, earlier)
    # so that both signals arrive before the workers answer the first
    at_once.send_signal(signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        at_once.send_signal(number)
    at_once.wait(timeout=30)
    output = at_once.log.read_text()
    assert at_once.returncode == 130, output
    assert (
        "interrupted" in output
        and "Traceback" not in output
        and (run / "report.html").stat().st_mtime_ns == page
    )

    earlier = logged(run)
    killed = start(recipe)
    wait_for_step(killed, run, 7, earlier)
    killed.kill()
    killed.wait()

    done = start(recipe)
    done.wait(timeout=300)
    output = done.log.read_text()
    assert done.returncode == 0, output
    assert marks(run) == list(expected_marks(20))
    kept = [
        file for file in run.rglob("*") if file.is_file() and CANARY.encode() in file.read_bytes()
    ]
    assert not kept and CANARY not in output


def test_waiting_commands_end_within_five_seconds(nodes, tmp_path):
    """After Ctrl-C, or the SIGTERM of `ray job stop`, while someone else has all CPUs."""
    nodes.reset([(2, 2)])
    prepared = make_data(tmp_path / "set")
    local = config(prepared, tmp_path, "trained", steps=3).with_cluster(workers=1)
    trained = train(local, Silent())
    waits = config(prepared, tmp_path, "waits", (), nodes.address)
    recipe = tmp_path / "waits.yaml"
    recipe.write_text(to_yaml(waits))
    (tmp_path / "raw.csv").write_text("image,text\na.png,a\n")
    (tmp_path / "a.png").write_bytes(png(3))
    at = ("--address", nodes.address)
    commands = {
        "train": (),
        "tune": ("tune", str(recipe), "--run.name", "sweep"),
        "evaluate": ("evaluate", str(trained.path), "--workers", "2", *at),
        "prepare": ("prepare", str(tmp_path / "raw.csv"), str(tmp_path / "out"), *at),
    }
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        ray.get(ray.util.placement_group([{"CPU": 2.0}]).ready())
        for number, (name, words) in enumerate(commands.items()):
            process = start(recipe, *words)
            end_s = time.monotonic() + 120
            while "waiting " not in process.log.read_text():
                assert process.poll() is None and time.monotonic() < end_s, process.log.read_text()
                time.sleep(0.2)
            process.send_signal((signal.SIGINT, signal.SIGTERM)[number % 2])
            stopped_s = time.monotonic()
            process.wait(timeout=60)
            took_s = time.monotonic() - stopped_s
            print(f"{name}: ended after {took_s:.1f} s")
            output = process.log.read_text()
            assert process.returncode == 130 and "Traceback" not in output, output
            assert took_s < 5, (name, output)
    finally:
        ray.shutdown()
