"""Commands whose host is lost, that are stopped, or that train on several hosts at once."""

import json
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from mmray.config import to_yaml
from tests.hosts.hosts import SHARED, RayOnHosts, can_make_hosts, hosts
from tests.hosts.test_faults import ENV, FAULT_STEP, FAULTS, MAX_REPEATED, Steps, settings
from tests.hosts.test_storage import assert_undisturbed
from tests.polling import wait_until
from tests.training.runs import make_data

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, unshare and ip"),
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
FAULT = FAULTS["link of a rank down for 20 s"]  # for the settings of its run
RECIPE = str(SHARED / "recipe.yaml")
TRAIN = ("python", "-m", "mmray", "train", RECIPE)


class Setting:
    """A head and two hosts for ranks, with data and a recipe on their storage."""

    def __init__(self, stack, folder, wanted, **options):
        self.by_name, self.shared = stack.enter_context(hosts(folder, ["head", "one", "two"]))
        make_data(self.shared / "set")
        (self.shared / "recipe.yaml").write_text(to_yaml(wanted))
        self.steps = Steps(self.shared / "runs" / "run")
        self.ray = RayOnHosts(self.by_name, ENV | {"RAY_JOB_STOP_WAIT_TIME_S": "60"}, **options)

    def wait_for_steps(self):
        def have():
            self.steps.poll()
            return self.steps.latest >= FAULT_STEP

        wait_until(have, 900, 0.2)

    def wait_for_end(self, command):
        """Wait for the end of a command, and measure the longest time without a new step."""

        def has_ended():
            self.steps.poll()
            return command.poll() is not None

        self.steps.longest_s = 0.0
        wait_until(has_ended, 900, 0.2)

    def copy_run(self, folder):
        shutil.copytree(self.shared / "set", folder / "set")
        shutil.copytree(self.shared / "runs" / "run", folder / "run")
        return json.loads((folder / "run" / "result.json").read_text())


def test_run_whose_head_and_driver_are_lost_resumes_by_the_same_command(tmp_path):
    """Ray ends the workers a minute later, after about half of the steps."""
    wanted = settings(replace(FAULT, steps=120))
    with ExitStack() as stack:
        setting = Setting(stack, tmp_path, wanted)
        driver = setting.ray.start(*TRAIN)
        setting.wait_for_steps()
        new = setting.by_name["head"].replace()
        stack.callback(new.close)
        assert driver.wait(60)
        setting.ray.start_head(new)
        driver = setting.ray.start(*TRAIN, "--cluster.wait-for-nodes", "true")
        setting.wait_for_end(driver)
        assert driver.returncode == 0, new.log("python")
        assert "resume     from" in new.log("python")
        result = setting.copy_run(tmp_path)
    longest_s = setting.steps.longest_s
    print(f"| head lost | {longest_s:.0f} | {result['restarts']} | {result['wasted_steps']} |")
    assert_undisturbed(tmp_path, wanted)
    assert result["wasted_steps"] <= MAX_REPEATED


def test_job_that_is_stopped_saves_and_the_next_one_resumes(tmp_path):
    with ExitStack() as stack:
        setting = Setting(stack, tmp_path, settings(FAULT), dashboard=True)

        def job(action, *words):
            words = ("ray", "job", action, "--address=http://10.77.0.1:8265", *words)
            command = setting.by_name["one"].start(*words, log="jobs")
            setting.wait_for_end(command)
            assert command.returncode == 0, setting.by_name["one"].log("jobs")

        submit = ("submit", "--no-wait", "--submission-id")
        job(*submit, "first", "--", *TRAIN)
        setting.wait_for_steps()
        job("stop", "first")
        run = setting.shared / "runs" / "run"
        assert json.loads((run / "result.json").read_text())["status"] == "stopped"
        job("submit", "--submission-id", "second", "--", *TRAIN)
        result = setting.copy_run(tmp_path)
    longest_s = setting.steps.longest_s
    print(f"| job stopped | {longest_s:.0f} | {result['restarts']} | {result['wasted_steps']} |")
    assert result["wasted_steps"] == 0
    assert_undisturbed(tmp_path, settings(FAULT))


def test_sweep_trains_on_both_hosts_and_survives_a_link_that_fails(tmp_path):
    wanted = settings(FAULT)
    wanted = wanted.replace(cluster=wanted.cluster.replace(workers=1))
    with ExitStack() as stack:
        setting = Setting(stack, tmp_path, wanted)
        words = ("--goal", "loss", "--space", "optimizer.lr=1e-3,2e-3", "--concurrency", "2")
        sweep = setting.ray.start("python", "-m", "mmray", "tune", RECIPE, *words)
        runs = setting.shared / "runs"
        wait_until(lambda: len([*runs.rglob("metrics.jsonl")]) == 2, 900, 0.5)
        head = setting.by_name["head"]
        head.set_link("down")
        time.sleep(20)
        head.set_link("up")
        wait_until(lambda: sweep.poll() is not None, 900, 0.5)
        assert sweep.returncode == 0, head.log("python")
        results = [json.loads(path.read_text()) for path in runs.rglob("result.json")]
        print(head.log("python")[-3000:])
    assert [result["restarts"] for result in results] == [0, 0]
