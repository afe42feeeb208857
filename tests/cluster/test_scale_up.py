"""Growing clusters: a run and a submitted sweep that start with no worker node, and get the nodes
that they request.
"""

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_nodes

from mmray.cluster.placement import ROLE_LABEL
from mmray.config import Cluster, to_yaml
from mmray.training.driver import train
from tests.cluster.fake_autoscaler import fake_autoscaler
from tests.conftest import ROOT
from tests.jobs.test_jobs import ENDED, ended
from tests.nodes import free_ports
from tests.polling import wait_until
from tests.training.runs import Silent, config, expected_marks, make_data, marks

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]  # three minutes
POOLS = {
    "train": {
        "resources": {"CPU": 1, "slot": 1},
        "labels": {ROLE_LABEL: "train"},
        "max_workers": 2,
    },
    "data": {"resources": {"CPU": 2}, "labels": {ROLE_LABEL: "data"}, "max_workers": 2},
}

NUM_RUNS = 10
WAITING = re.compile(
    r"^waiting +\d+ s for [12] training workers? of \d CPU each; free: \d+ CPU of \d+ CPU on", re.M
)


def test_elastic_run_scales_up_from_zero_nodes(data, tmp_path):
    if ray.is_initialized():
        ray.shutdown()
    made = config(data, tmp_path, "grown", ("tests.training.faults:Slowly",), steps=60)
    with fake_autoscaler(POOLS, tmp_path) as address:
        labels = {"train_label": f"{ROLE_LABEL}=train", "data_label": f"{ROLE_LABEL}=data"}
        section = Cluster(
            workers="1-2",
            resources_per_worker={"slot": 1.0},
            address=address,
            wait_for_nodes=True,
            **labels,
        )
        reporter = Silent()
        outcome = train(made.replace(cluster=section), reporter)
    starts = [
        text
        for kind, text in reporter.notes
        if kind == "status" and re.match(r"starting \d+ worker", text)
    ]
    assert starts[-1] == "starting 2 workers" and outcome.result["status"] == "finished"
    assert outcome.result["wasted_steps"] == 0 and marks(outcome.path) == list(expected_marks(60))


def job_server():
    """Ports of the dashboard and its agent, the address of the former, and the environment of a
    head with them.
    """
    if ray.is_initialized():
        ray.shutdown()
    ports = free_ports(2)
    url = f"http://127.0.0.1:{ports[0]}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "RAY_API_SERVER_ADDRESS": url}
    env.pop("RAY_ADDRESS", None)
    return ports, url, env


def test_submitted_sweep_gets_its_nodes_and_they_go_after_it(tmp_path):
    """A node for the worker of each trial; data is decoded there, unless training waits for it.

    Limits are unknown, so --concurrency counts.
    """
    ports, url, env = job_server()
    cluster = Cluster(
        resources_per_worker={"slot": 1.0},
        wait_for_nodes=True,
        train_label=f"{ROLE_LABEL}=train",
        data_label=f"{ROLE_LABEL}=data",
    )
    recipe = config(make_data(tmp_path / "set"), tmp_path, "sweep").replace(cluster=cluster)
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    with fake_autoscaler(POOLS, tmp_path, ports, idle_minutes=0.2, env=env):
        client = JobSubmissionClient(url)

        def wait_for_nodes(count):
            until = time.monotonic() + 60
            while (
                len(alive := [node for node in list_nodes(url) if node.state == "ALIVE"]) != count
            ):
                assert time.monotonic() < until, alive
                time.sleep(1)

        wait_for_nodes(1)  # the head
        options = [
            "--goal",
            "loss",
            "--space",
            "optimizer.lr=1e-3,1e-4",
            "--train.samples",
            "64",
            "--concurrency",
            "2",
        ]
        # Without a working directory to ship: nodes of one machine would replace each other's copy.
        words = [
            sys.executable,
            str(ROOT / "jobs" / "tune.py"),
            str(tmp_path / "recipe.yaml"),
            *options,
        ]
        job_id = client.submit_job(
            entrypoint=shlex.join(words), runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}
        )
        status, code, log = ended(client, job_id)
        assert (status, code) == (JobStatus.SUCCEEDED, 0), log
        assert len(list_nodes(url)) >= 3  # all that ever were, with the head
        wait_for_nodes(1)
    summary = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert (summary["status"], summary["concurrency"]) == ("finished", 2)
    rows = [
        json.loads(line) for line in (tmp_path / "sweep" / "trials.jsonl").read_text().splitlines()
    ]
    assert [row["status"] for row in rows] == ["finished", "finished"]


@pytest.mark.timeout(1200)
def test_ten_submitted_runs_wait_for_two_nodes_and_all_finish(data, tmp_path):
    """Every third run needs both nodes that the autoscaler may start."""
    ports, url, env = job_server()
    made = config(data, tmp_path, "waiting", ("tests.training.faults:AwaitDriver",), steps=3)
    made = made.replace(evaluate=made.evaluate.replace(every=0))
    env_vars = {"PYTHONPATH": str(ROOT), "MMRAY_TEST_FAULTS": str(tmp_path)}
    names = [f"run-{number}" for number in range(NUM_RUNS)]
    folders = [tmp_path / name for name in names]
    pool = {"resources": {"CPU": 2}, "labels": {}, "max_workers": 2}
    with fake_autoscaler({"cpu": pool}, tmp_path, ports, env=env):
        client = JobSubmissionClient(url)
        for number, name in enumerate(names):
            workers = 2 if number % 3 == 0 else 1
            section = Cluster(workers=workers, wait_for_nodes=True, hang_timeout_s=600)
            recipe = tmp_path / f"{name}.yaml"
            recipe.write_text(
                to_yaml(made.replace(cluster=section, run=made.run.replace(name=name)))
            )
            client.submit_job(
                submission_id=name,
                entrypoint=shlex.join([sys.executable, "-m", "mmray", "train", str(recipe)]),
                runtime_env={"env_vars": env_vars},
            )

        def num_waiting():
            logs = {name: client.get_job_logs(name) for name in names}
            early = [logs[name] for name in names if client.get_job_status(name) in ENDED]
            assert not early, early[0]
            return sum(bool(WAITING.search(log)) for log in logs.values())

        wait_until(lambda: num_waiting() >= NUM_RUNS - 2, 600, 2.0)  # at most two train
        (tmp_path / "acted").touch()
        logs = {name: ended(client, name, 900) for name in names}
    for name, (status, code, log) in logs.items():
        assert (status, code) == (JobStatus.SUCCEEDED, 0), f"{name}: {log}"
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        assert (result["status"], result["restarts"]) == ("finished", 0)
        assert marks(folder) == list(expected_marks(3))
    order = sorted(names, key=lambda name: (tmp_path / name / "result.json").stat().st_mtime)
    print(f"order of ends: {order}")
