"""Storage of a host that vanishes while a run without Ray trains on it."""

import json
import re
import shutil

import pytest

from mmray.config import to_yaml
from tests.cluster.test_faults import losses_of_one_worker
from tests.hosts.hosts import SHARED, STORAGE_BYTES, can_make_hosts, hosts
from tests.polling import wait_until
from tests.training.runs import config, expected_marks, in_double, lines, make_data, marks

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, unshare and ip"),
    pytest.mark.cluster,
]
STEPS = 60


def remount(host):
    host.unmount_storage()
    host.mount_storage()


def protect(host):
    host.unmount_storage()
    host.mount_storage("ro")


def fill(host):
    """Leave no block free."""
    filler = SHARED / "filler"
    host.run("sh", "-c", f"head -c {STORAGE_BYTES} /dev/zero > {filler} || true")


FAULTS = [
    (lambda host: host.unmount_storage(), lambda host: host.mount_storage()),
    (protect, remount),
    (fill, lambda host: host.run("rm", str(SHARED / "filler"))),
]


def settings():
    wanted = config(
        SHARED / "set", SHARED / "runs", "run", ["tests.training.faults:Slowly"], steps=STEPS
    )
    return in_double(wanted.with_cluster(workers=1, cpus_per_worker=1))


def assert_undisturbed(folder, wanted):
    """The run in a folder has the rows and losses of the same one by one worker without faults.

    Args:
        folder: Has the run in `run` and its prepared set in `set`.
    """
    assert marks(folder / "run") == list(expected_marks(wanted.train.steps))
    wanted = wanted.replace(data=wanted.data.replace(train=str(folder / "set")))
    calm = losses_of_one_worker(wanted, folder / "calm")
    losses = [line["train/loss"] for line in lines(folder / "run")]
    assert losses == pytest.approx(calm, rel=1e-9)


def test_run_goes_on_and_writes_the_next_checkpoint_when_storage_is_back(tmp_path):
    """The storage is unmounted, read-only and full, one after the other."""
    with hosts(tmp_path, ["gpu-1"]) as (by_name, shared):
        host = by_name["gpu-1"]
        make_data(shared / "set")
        (shared / "recipe.yaml").write_text(to_yaml(settings()))
        run = shared / "runs" / "run"
        driver = host.start("python", "-m", "mmray", "train", str(SHARED / "recipe.yaml"))

        def wait_for(is_reached):
            """Wait until `is_reached()`; fail if the command has ended."""
            wait_until(lambda: is_reached() or driver.poll() is not None, 200, 0.1)
            assert is_reached(), host.log("python")

        def checkpoints():
            return {path.name for path in (run / "checkpoints").glob("step-*")}

        for begin, end in FAULTS:
            saved, lost = checkpoints(), num_lost(host)
            wait_for(lambda saved=saved: checkpoints() - saved)
            begin(host)
            wait_for(lambda lost=lost: num_lost(host) > lost)
            end(host)
            wait_for(lambda: num_back(host) == num_lost(host))
        wait_until(lambda: driver.poll() is not None, 200, 0.1)
        assert driver.returncode == 0, host.log("python")
        shutil.copytree(shared / "set", tmp_path / "set")
        shutil.copytree(run, tmp_path / "run")
    assert_undisturbed(tmp_path, settings())
    assert json.loads((tmp_path / "run" / "result.json").read_text())["restarts"] == 0


def num_lost(host):
    """How often the log has a folder of the storage that cannot be used."""
    return len(re.findall(rf"{SHARED}/\S+ cannot be used on gpu-1 for 0 s", host.log("python")))


def num_back(host):
    return host.log("python").count("can be used again on gpu-1")
