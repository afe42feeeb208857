"""Checkpoints beside the training: what is written is the state as it was, and how often is no more than it costs."""

import threading
import time

import pytest
import torch

from mmray.engine.checkpoint import files
from mmray.engine.checkpoint.async_saver import AsyncSaver
from mmray.engine.checkpoint.manager import COST_SHARE, CheckpointSchedule, steps_between_checkpoints
from mmray.errors import StorageError, TrainingError


def test_what_is_written_aside_is_the_state_at_the_call_to_the_byte(tmp_path):
    weights = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": {"a": weights, "tied": weights},
        "optimizer": {"state": {0: {"m": weights * 2}}, "betas": (0.9, 1)},
    }
    there, gate = tmp_path / "aside", threading.Event()

    def write(copied):
        gate.wait(5)
        files.save(there, 3, copied.pop("model"), copied, {})

    writer = AsyncSaver()
    plain = {key: value for key, value in state.items() if key != "model"}
    files.save(tmp_path / "at-once", 3, state["model"], plain, {})
    writer.submit(state, write)
    weights.add_(100)  # the next step
    gate.set()
    writer.close()
    for name in (files.MODEL, files.STATE):
        assert (there / "step-3" / name).read_bytes() == (tmp_path / "at-once" / "step-3" / name).read_bytes()
    assert writer.cost_s > 0


def test_one_write_at_a_time():
    writer, gate, order = AsyncSaver(), threading.Event(), []
    writer.submit({}, lambda _: (gate.wait(5), order.append("first")))
    threading.Timer(0.1, gate.set).start()
    writer.submit({}, lambda _: order.append("second"))
    assert order[0] == "first"
    writer.close()
    assert order == ["first", "second"]


def failing(error):
    def write(_):
        raise error

    return write


def done(writer):
    while not writer._under_way.done():
        time.sleep(0.001)


def test_what_the_storage_does_not_take_is_told_and_the_next_write_makes_it_good():
    told = []
    writer = AsyncSaver(told.append)
    writer.submit({}, failing(StorageError("no space for step 3")))
    writer.submit({}, failing(StorageError("no space for step 6")))
    assert [text[:19] for text in told] == ["no space for step 3"]
    done(writer)
    writer.check()
    assert "no space for step 6" in told[1] and "The run goes on" in told[1]
    writer.submit({}, lambda _: None)
    writer.close()
    assert len(told) == 2


@pytest.mark.parametrize("looked_at", [False, True])
def test_the_last_write_has_to_succeed(looked_at):
    writer = AsyncSaver()
    writer.submit({}, failing(StorageError("no space for the last step")))
    done(writer)
    if looked_at:
        writer.check()
    with pytest.raises(StorageError, match="the last step"):
        writer.close()


def test_a_lost_lease_ends_the_training_at_the_next_look():
    writer = AsyncSaver()
    writer.submit({}, failing(TrainingError("taken over")))
    done(writer)
    with pytest.raises(TrainingError, match="taken over"):
        writer.check()
    writer.close()


def test_checkpoints_cost_less_than_their_share_once_measured():
    for step_s, cost_s in [(0.1, 1.0), (2.0, 0.5), (0.3, 60.0)]:
        steps = steps_between_checkpoints(step_s, cost_s, 10)
        assert cost_s / (steps * step_s) <= COST_SHARE + 1e-9


def test_an_automatic_rhythm_begins_early_doubles_until_measured_and_then_follows_the_cost():
    rhythm, taken = CheckpointSchedule("auto", begin=100), []
    for step in range(101, 400):
        if rhythm.due(step):
            taken.append(step)
            rhythm.written(step, steps_between_checkpoints(0.1, None if len(taken) < 3 else 0.2, step - 100))
    assert taken == [110, 120, 140, 240, 340]


def test_a_set_rhythm_is_kept_and_nought_is_never():
    assert [step for step in range(1, 10) if CheckpointSchedule(3, 0).due(step)] == [3, 6, 9]
    assert not any(CheckpointSchedule(0, 0).due(step) for step in range(1, 10))
