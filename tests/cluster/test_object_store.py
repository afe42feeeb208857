"""Runs whose folder is on an object store (an S3 server on loopback): it has the same files as on a
disk.
"""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import mmray
from mmray import api
from mmray.storage.paths import copy_file, list_files, to_path
from mmray.training.driver import train
from mmray.training.evaluate_export import evaluate_model, export_model
from tests.data.prepare.test_pipeline import make_source
from tests.training.runs import (
    STEPS,
    Silent,
    Stopping,
    config,
    make_data,
    marks,
    same_weights,
    weights,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("set"))


def in_blocks(config, cache=None):
    """The same shuffle of blocks on a disk as on the store."""
    chosen = {"shuffle_blocks": "2x8x2", "local_cache": cache}
    return config.model_copy(update={"data": config.data.model_copy(update=chosen)})


@pytest.fixture(scope="module")
def calm(local_ray, data, tmp_path_factory):
    """An undisturbed run on a disk."""
    return train(in_blocks(config(data, tmp_path_factory.mktemp("runs"), "calm")), Silent())


def copied(run, folder):
    """Copy the parts of a run that tests compare to a disk."""
    files = ("shard-1-of-1.safetensors", "state.json", "SHA256SUMS")
    for name in ("metrics.jsonl", *(f"checkpoints/step-{STEPS}/{file}" for file in files)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(to_path(f"{run}/{name}"), folder / name)
    return folder


class FailingLoad(Silent):
    """Makes the store fail while the first workers load the checkpoint: with the 5 attempts of each
    of 2 ranks.
    """

    def __init__(self, store):
        super().__init__()
        self.store, self.fail_left = store, 10

    def status(self, title):
        super().status(title)
        if title == "starting 2 workers":
            self.store.fail("GET", "state.json", self.fail_left, status=400)
            self.fail_left = 0


def test_run_on_object_store_resumes_after_kill_stop_and_failing_load(calm, data, s3, tmp_path):
    """A rank is killed after step 5, SIGINT follows; data is on the store too: bitwise equal to a
    run on a disk.
    """
    place = to_path(f"{s3.address}/set")
    for name in list_files(data):
        copy_file(data / name, place / name)
    faults = ("tests.training.faults:KillRankOneOnce", "tests.training.faults:AwaitStop")
    cache = str(tmp_path / "cache")
    killed = in_blocks(config(str(place), s3.address, "remote", callbacks=faults), cache)
    stopped = train(killed, Stopping(6))
    assert (stopped.result["restarts"], stopped.result["status"]) == (1, "stopped")
    assert stopped.result["steps"] == 8
    reporter = FailingLoad(s3)
    outcome = train(in_blocks(config(str(place), s3.address, "remote"), cache), reporter)
    assert outcome.result["status"] == "finished" and str(outcome.path) == f"{s3.address}/remote"
    checkpoint = f"{s3.address}/remote/checkpoints/step-{stopped.result['steps']}"
    assert [text for label, text in reporter.notes if label == "resume"] == [
        f"from {checkpoint}"
    ] * 2
    (failure,) = [text for label, text in reporter.notes if label == "failure"]
    assert (
        f"storage failed after step {stopped.result['steps']}: cannot read {checkpoint}/state.json"
    ) in failure
    assert ("shuffle", "2 lanes, 8 adjacent rows per block, 2 blocks per window") in reporter.notes
    assert len([file for file in Path(cache).iterdir() if file.is_file()]) >= 50 // 8 + 20 // 8
    copy = copied(outcome.path, tmp_path / "copy")
    assert marks(copy) == marks(calm.path) and same_weights(weights(copy), weights(calm.path))
    scores = evaluate_model(outcome.path, None, "test", None, None, reporter)
    assert ("prepare", "evaluate") in reporter.notes
    told = {
        name: outcome.result["metrics"][name]
        for name in scores
        if name in outcome.result["metrics"]
    }
    assert {
        "recall_at_1/image_to_text",
        "median_rank/text_to_image",
        "rows",
    } <= told.keys() and scores["rows"] == 20
    assert {name: scores[name] for name in told} == pytest.approx(told)
    exported = mmray.load(str(export_model(outcome.path, tmp_path / "exported")))
    assert exported.embed_texts(["a red one"]).shape == (1, 16)
    names = list_files(outcome.path)
    assert {"config.yaml", "result.json", "examples.json", "report.html"} <= set(names)
    assert any(name.startswith("events.") for name in names)
    assert not [
        name for name in names if b"canary-of-the-tests" in (outcome.path / name).read_bytes()
    ]


class SlowFrom(Silent):
    """From the second step to the report each request to the store takes 2 s longer."""

    def __init__(self, store):
        super().__init__()
        self._store, self._stack = store, ExitStack()

    def step(self, metrics, total_steps):
        if metrics["step"] == 2:
            self._stack.enter_context(self._store.slow(2.0))
        super().step(metrics, total_steps)

    def phase(self, title):
        super().phase(title)
        if title == "writing the report":
            self.close()

    def close(self):
        self._stack.close()


@pytest.mark.slow  # four minutes
def test_slow_store_costs_no_restart_and_no_step(calm, data, s3, tmp_path):
    """Requests make a save take half a minute, so some are skipped."""
    wanted = in_blocks(config(data, s3.address, "slow", ["tests.training.faults:Slowly"]))
    with closing(SlowFrom(s3)) as reporter:
        outcome = train(wanted, reporter)
    assert (outcome.result["status"], outcome.result["restarts"]) == ("finished", 0)
    assert reporter.steps == list(range(1, STEPS + 1))
    copy = copied(outcome.path, tmp_path / "copy")
    assert marks(copy) == marks(calm.path) and same_weights(weights(copy), weights(calm.path))


def test_all_commands_read_and_write_a_bucket(local_ray, s3, tmp_path):
    """Prepare, two workers, evaluate, export and report, with no file of a set or a run on disk."""
    source = make_source(tmp_path / "raw", 40)
    raw = to_path(f"{s3.address}/raw")
    for name in list_files(source.parent):
        copy_file(source.parent / name, raw / name)
    place = f"{s3.address}/prepared"
    manifest = api.prepare(f"{raw}/rows.jsonl", place, holdout=0.2, reporter=Silent())
    assert manifest.num_rows == 40 and set(manifest.splits) == {"train", "test"}
    tiny = config(place, f"{s3.address}/runs", "all", steps=4)
    run = api.train(tiny, data={"local_cache": None}, reporter=Silent())
    assert run.result["status"] == "finished" and len(run.history) == 4
    scores = api.evaluate(run, place, split="test", reporter=Silent())
    assert scores["rows"] == manifest.splits["test"]
    page = run.report(f"{s3.address}/report.html")
    assert b"<html" in to_path(str(page)).read_bytes()[:2000]
    exported = api.export(run, f"{s3.address}/exported")
    assert {"config.json", "model.safetensors"} <= set(list_files(to_path(str(exported))))
