"""What the board keeps, without Ray: it is a plain class until it becomes an actor."""

from types import SimpleNamespace

from mmray.engine.bad_samples import load_bad_rows
from mmray.train import coordinator
from mmray.train.coordinator import Coordinator, RunMonitor


def test_a_bad_row_counts_once_on_whatever_rank_epoch_and_attempt():
    actor = Coordinator({7})  # named by an attempt before
    assert [actor.bad_row(row) for row in (7, 3, 3, 9)] == [0, 2, 0, 3]


def test_rows_named_by_earlier_attempts_are_read_back_and_a_line_cut_off_is_none(tmp_path):
    assert load_bad_rows(tmp_path) == set()
    (tmp_path / "quarantine.jsonl").write_text('{"row": 7, "key": "a"}\n{"row": 12}\n{"ro')
    assert load_bad_rows(tmp_path) == {7, 12}


def test_a_heartbeat_grows_old_and_a_rank_that_ended_is_forgotten():
    actor = Coordinator(set())
    assert actor.beat({"rank": 0, "step": 3}) is False
    actor.beat({"rank": 1, "step": 3})
    actor.ask_for_stacks()
    assert actor.beat({"rank": 1, "ended": True}) is True
    news, (beat,) = actor.take()
    assert news == [] and beat["rank"] == 0 and beat["age_s"] >= 0


def test_an_attempt_counts_its_own_steps_and_keeps_what_was_measured(monkeypatch):
    """Else the same words at another step would pass for the same error at the same step."""
    news = [{"step": 120, "time/step_s": 0.5}]
    monkeypatch.setattr(coordinator.ray, "get", lambda *_, **__: (news, []))
    asked = SimpleNamespace(take=SimpleNamespace(remote=lambda: None))
    reporter = SimpleNamespace(step=lambda *_: None)
    first = RunMonitor(asked, reporter, 200).over(asked, 0)
    assert (first.last_step, first.logged) == (0, False)
    first.look()
    first.stop_reason = "resize"
    second = first.over(asked, 20)
    assert (second.last_step, second.logged, second.step_s, second.stop_reason) == (20, True, 0.5, None)
    news[0]["step"] = 40
    second.look()
    assert second.last_step == 40
