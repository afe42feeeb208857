"""Runs on an object store: checkpoints count only when they are whole, a lease has one holder, files grow."""

import threading
import time
from functools import partial

import pytest
import torch

from mmray.config import Config, Run
from mmray.engine.checkpoint import files as checkpoint
from mmray.engine.checkpoint import manager as keeping
from mmray.engine.checkpoint.manager import CheckpointManager
from mmray.engine.metrics import writers
from mmray.engine.metrics.writers import LogUploader
from mmray.engine.worker import _closing
from mmray.errors import StorageError, TrainingError
from mmray.storage import paths, storage
from mmray.storage.lease import Lease, check_fence
from mmray.storage.paths import temp_dir, to_path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(storage, "MAX_WAIT_S", 0.01)


def put(folder, step, **metrics):
    state = {"optimizer": {"m": torch.arange(4.0) * step}, "progress": {"step": step}}
    return checkpoint.save(folder, step, {"w": torch.full((5,), float(step))}, state, {"metrics": metrics})


def test_a_checkpoint_comes_back_and_old_ones_go(s3):
    folder = to_path(s3.address) / "checkpoints"
    assert checkpoint.latest_valid(folder) is None and checkpoint.latest_complete(folder) is None
    for step, recall in ((3, 0.5), (6, 0.9), (9, 0.1), (12, 0.2)):
        put(folder, step, recall=recall)
        checkpoint.prune(folder, 2, "recall")
    assert checkpoint.list_names(folder) == ["step-12", "step-6", "step-9"]
    newest = checkpoint.latest_valid(folder)
    assert checkpoint.step_of(newest) == 12 and checkpoint.load_meta(newest)["metrics"] == {"recall": 0.2}
    loaded = checkpoint.load(newest)
    assert torch.equal(loaded["model"]["w"], torch.full((5,), 12.0))
    assert torch.equal(loaded["optimizer"]["m"], torch.arange(4.0) * 12)


def test_what_does_not_verify_is_named_and_set_aside(s3):
    folder, told = to_path(s3.address) / "checkpoints", []
    for step in (1, 2, 3, 4):
        put(folder, step)
    (folder / "step-4" / checkpoint.SUMS).unlink()  # killed before its last object
    (folder / "step-3" / checkpoint.MODEL).write_bytes(b"cut short")
    (folder / "step-2" / checkpoint.STATE).unlink()
    assert checkpoint.step_of(checkpoint.latest_valid(folder, told.append)) == 1
    assert "not written to its end" in told[0] and "is not as it was written (9 bytes now)" in told[1]
    assert "state.pt is missing; it is now step-2.damaged" in told[2]
    assert checkpoint.list_names(folder) == ["step-1", "step-2.damaged", "step-3.damaged", "step-4"]
    put(folder, 3)
    assert checkpoint.step_of(checkpoint.latest_valid(folder)) == 3


def test_an_upload_that_fails_for_good_leaves_nothing_that_counts(s3, monkeypatch):
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    folder = to_path(s3.address) / "checkpoints"
    put(folder, 3)
    s3.fail("PUT", "step-6/state.pt", 1000, status=400)
    with pytest.raises(StorageError, match=r"cannot write the checkpoint s3://.*/step-6: .*Older checkpoints"):
        put(folder, 6)
    assert checkpoint.step_of(checkpoint.latest_valid(folder)) == 3
    assert checkpoint.list_names(folder) == ["step-3"]


def keeper_of(run, told, world=1):
    wanted = Config(recipe="sample", run=Run(storage=str(run.parent), name=run.name))
    held = Lease(run)
    return held, CheckpointManager(
        run, held.acquire(), wanted, {"world": world}, lambda label, text: told.append((label, text))
    )


def state(step):
    return {"model": {"w": torch.full((5,), float(step))}, "progress": {"step": step}}


def test_a_store_that_fails_for_a_while_costs_a_checkpoint_and_not_the_run(s3, monkeypatch):
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    run, told = to_path(s3.address) / "mine", []
    held, keeper = keeper_of(run, told)
    s3.fail("PUT", "step-6/", 1000, status=400)
    for step in (3, 6, 9):
        keeper.save(step, step, state(step), {}, last=False)
    keeper.close()
    held.release()
    assert checkpoint.list_names(run / "checkpoints") == ["step-3", "step-9"]
    ((label, text),) = told
    assert label == "checkpoint" and "step-6" in text and "The run goes on" in text


@pytest.mark.parametrize(("world", "scores"), [(1, {}), (2, {}), (2, {"evaluate/loss": 0.5})])
def test_while_a_write_stalls_other_ranks_are_not_kept_waiting_and_the_last_checkpoint_is_written(
    tmp_path, monkeypatch, world, scores
):
    """What was scored waits as long as the others bear: it may be the best."""
    run, told, answers = tmp_path / "mine", [], threading.Event()
    run.mkdir()
    monkeypatch.setattr(keeping, "MAX_WAIT_S", 0.05)
    plain = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given: answers.wait(20) and plain(*given))
    held, keeper = keeper_of(run, told, world)
    keeper.save(3, 3, state(3), {}, last=False)
    timer = threading.Timer(0.5, answers.set)
    timer.start()
    began_s = time.monotonic()
    keeper.save(6, 6, state(6), scores, last=False)
    left_out = world > 1 and not scores
    assert (time.monotonic() - began_s < 0.4) == left_out  # alone nobody stands in a collective
    keeper.save(9, 9, state(9), {}, last=True)
    keeper.close()
    held.release()
    kept = ["step-3", "step-9"] if left_out else ["step-6", "step-9"]
    assert checkpoint.list_names(run / "checkpoints") == kept
    assert [(label, text[:26]) for label, text in told] == [("checkpoint", "step 6 has no checkpoint: ")] * left_out


def test_a_store_that_fails_at_the_end_is_an_error_and_the_checkpoint_before_stands(s3, monkeypatch):
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    run, told = to_path(s3.address) / "mine", []
    held, keeper = keeper_of(run, told)
    keeper.save(3, 3, state(3), {}, last=False)
    s3.fail("PUT", "checkpoints/step-6/", 1000, status=400)
    keeper.save(6, 6, state(6), {}, last=False)
    with pytest.raises(StorageError, match=r"step-6: .*start the same command again"):
        keeper.close()
    held.release()
    assert checkpoint.step_of(checkpoint.latest_valid(run / "checkpoints")) == 3


def test_files_that_grow_are_carried_whole_and_go_on(s3, monkeypatch):
    monkeypatch.setattr(writers, "EVERY_S", 0.2)
    folder, told = to_path(s3.address) / "mine", []
    for text in ("one\n", "two\n"):
        files = LogUploader(folder, told.append)
        with (files.here / "metrics.jsonl").open("a") as file:
            file.write(text)
        (files.here / "profile").mkdir()
        (files.here / "profile" / "rank-0.json").write_text(text)
        files.push()
        assert (folder / "metrics.jsonl").read_text().endswith(text)
        with (files.here / "metrics.jsonl").open("a") as file:
            file.write("last\n")
        files.close()
    assert (folder / "metrics.jsonl").read_text() == "one\nlast\ntwo\nlast\n"
    assert (folder / "profile" / "rank-0.json").read_text() == "two\n" and not files.here.exists() and not told


def test_files_that_grow_are_not_carried_over_those_of_another_training(s3):
    folder = to_path(s3.address) / "mine"
    held = Lease(folder)
    files = LogUploader(folder, print, partial(check_fence, folder, held.acquire()))
    (files.here / "metrics.jsonl").write_text("one\n")
    files.push()
    held.advance()
    (files.here / "metrics.jsonl").write_text("one\nof the orphan\n")
    for late in (files.push, files.close):
        with pytest.raises(TrainingError, match="taken over"):
            late()
    held.release()
    assert (folder / "metrics.jsonl").read_text() == "one\n" and not files.here.exists()


def test_files_that_grow_are_swept_like_uploads_though_not_while_their_process_lives(s3, monkeypatch):
    monkeypatch.setattr(paths, "STALE_AFTER_S", -1.0)
    files = LogUploader(to_path(s3.address) / "mine", print)
    with temp_dir():  # sweeps
        assert files.here.exists() and files.here.name.startswith(paths.PREFIX)
    files.close()
    assert not files.here.exists()


def test_what_ended_a_run_is_not_hidden_by_a_write_that_failed_before(s3, monkeypatch):
    """The policy has to see it: a store that failed a while ago must not make a lost worker final."""
    monkeypatch.setattr(checkpoint, "save", refuse)
    held, keeper = keeper_of(to_path(s3.address) / "mine", [])
    keeper.save(1, 4, state(1), {}, last=False)
    with pytest.raises(RuntimeError, match="connection closed by peer"), _closing(None, keeper):
        raise RuntimeError("connection closed by peer")
    held.release()
    assert not keeper.growing.here.exists()


def refuse(*_):
    raise StorageError("no room")
