"""What follows a failed attempt, apart from what the policy says: how the run's end is told."""

import json
from types import SimpleNamespace

import pytest

from mmray.config import Config
from mmray.errors import TrainingError
from mmray.train import attempts
from mmray.train.policy import Failure
from mmray.train.rundir import RunDir
from tests.train.runs import Silent


@pytest.fixture
def fails(monkeypatch, tmp_path):
    """fails(wish, error) has an attempt of two workers end with the error at step 7, the user having wished or not."""
    ready = SimpleNamespace(shape="16 rows a step", micro=0)
    monkeypatch.setattr(attempts, "places", lambda *_: (None, 2))

    def after(wish, error, kind="lost", tally=None):
        monkeypatch.setattr(attempts, "failure_of", lambda *_: Failure(kind, error, 7))
        guard = SimpleNamespace(watch=SimpleNamespace(wish=wish), world=2, scale_up=None)
        tally = tally or attempts.Tally(attempts=1)
        attempts._after(error, ready, RunDir(tmp_path), tally, guard, Config(), Silent())
        return tally

    return after


def test_who_asked_for_an_end_gets_no_further_attempt(fails, tmp_path):
    """A rank hangs, Ctrl-C, the group is ended before it can vote: that was the end, as the user wished."""
    assert fails(None, RuntimeError("a node is gone")).failures == 1
    with pytest.raises(KeyboardInterrupt):
        fails("user", RuntimeError("a rank hangs"))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "stopped"


def test_secrets_of_the_environment_stay_out_of_the_error_that_is_kept(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")
    with pytest.raises(TrainingError):
        fails(None, TrainingError("no answer from https://me:pass@host/?key=hush-hush"), kind="raised")
    kept = (tmp_path / "result.json").read_text()
    assert "no answer" in kept and "hush" not in kept and "pass" not in kept


def test_a_storage_that_does_not_take_the_result_hides_nothing(fails, monkeypatch):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(RunDir, "write_json", refuse)
    with pytest.raises(TrainingError, match="what happened"):
        fails(None, TrainingError("what happened"), kind="raised")
