"""While data is prepared one worker tries the model: a mistake ends the prepare, and what is prepared stays."""

from __future__ import annotations

import threading
import time

import pytest

from mmray.config import Batch, Objective, Prepare, Train
from mmray.data.prepare import Progress, prepare
from mmray.errors import MmrayError, OutOfMemoryError, TrainingError, UsageError
from mmray.train import early, rehearsal
from mmray.train.early import tried_meanwhile
from tests.data.test_prepare import make_source
from tests.train import real_models
from tests.train.made_up_gpu import made_up_gpus
from tests.train.runs import Silent, config

LIMIT_S = 60


def wanted(tmp_path, **sections):
    return config("made", tmp_path, "tried").model_copy(update=sections)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", real_models.MODELS)
def test_every_kind_is_tried_on_a_cpu_and_on_a_gpu(monkeypatch, tmp_path, kind):
    spec, objective = real_models.MODELS[kind]
    asked = wanted(tmp_path, model=spec, objective=Objective(kind=objective), batch=Batch(micro=2, global_=8))
    rehearsal.try_alone(asked, on_gpu=False)
    with made_up_gpus(monkeypatch):
        rehearsal.try_alone(asked, on_gpu=True)
        rehearsal.try_alone(asked.model_copy(update={"batch": Batch(micro="auto", global_=8)}), on_gpu=True)


@pytest.mark.usefixtures("one_thread")
def test_what_only_gpus_have_is_left_out_on_a_cpu(tmp_path):
    spec = wanted(tmp_path).model
    resnet = spec.model_copy(
        update={"image": spec.image.model_copy(update={"name": "resnet18"}), "batch_norm": "synced"}
    )
    asked = wanted(tmp_path, model=resnet, train=Train(steps=1, parallel="fsdp", compile="inductor"))
    rehearsal.try_alone(asked, on_gpu=False)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": Objective(kind="matching")}, "reads `match`"),
        ({"model": real_models.MODELS["clip"][0].model_copy(update={"weights": "/nowhere"})}, "/nowhere"),
    ],
)
def test_mistakes_are_those_that_the_run_would_name(tmp_path, sections, said):
    with pytest.raises(UsageError, match=said):
        rehearsal.try_alone(wanted(tmp_path, **sections), on_gpu=False)


def listened(asked, listener):
    """A prepare that goes on until the trial is over."""
    with tried_meanwhile(asked, listener, after_s=0) as told:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and not any(label == "rehearsed" for label, _ in listener.notes):
            told.preparing(Progress("pack", 1, 2))
            time.sleep(0.1)


@pytest.mark.usefixtures("local_ray")
def test_a_mistake_comes_out_of_the_prepare(tmp_path):
    with pytest.raises(UsageError, match="reads `match`"):
        listened(wanted(tmp_path, objective=Objective(kind="matching")), Silent())


@pytest.mark.usefixtures("local_ray")
def test_a_step_that_went_through_is_told(tmp_path):
    listener = Silent()
    listened(wanted(tmp_path), listener)
    told = dict(note for note in listener.notes if note[0] == "rehearsed")
    assert told["rehearsed"].startswith("a step on made-up rows passed the model, on a CPU")
    assert ("preparing", "pack") in listener.notes


@pytest.mark.usefixtures("local_ray")
def test_a_short_prepare_is_not_kept_waiting(tmp_path):
    listener, began_s = Silent(), time.monotonic()
    with tried_meanwhile(wanted(tmp_path, objective=Objective(kind="matching")), listener, after_s=0) as told:
        told.preparing(Progress("scan", 0, 0))
        told.preparing(Progress("pack", 1, 1))
    assert time.monotonic() - began_s < 3
    with tried_meanwhile(wanted(tmp_path), listener) as told:
        told.preparing(Progress("pack", 1, 1))
    assert [label for label, _ in listener.notes] == ["preparing"] * 3


@pytest.mark.parametrize("as_trained", [False, True])
def test_memory_of_another_device_says_nothing(monkeypatch, tmp_path, as_trained):
    """The host of a run on GPUs may be too small for the model."""
    trial = early._Early(wanted(tmp_path), Silent(), 0)
    trial._as_trained = as_trained
    for error, counts in ((OutOfMemoryError("no room"), as_trained), (TrainingError("shape"), True)):
        monkeypatch.setattr(early.ray, "get", lambda _, error=error: (error, 0.0))
        raised = None
        try:
            trial._judge()
        except MmrayError as found:
            raised = found
        assert (raised is error) == counts


@pytest.mark.usefixtures("local_ray")
def test_a_prepare_that_is_ended_so_leaves_no_job_and_goes_on(tmp_path):
    source, out = make_source(tmp_path / "raw", 400), str(tmp_path / "out")
    settings = Prepare(rows_per_shard=8, vocab_size=100)
    reported = []

    def refused(progress):
        reported.append(progress)
        if progress.stage == "pack" and progress.done_rows > 0:
            raise UsageError("a mistake")

    with pytest.raises(UsageError, match="a mistake") as held:  # with its frames, and what is open in them
        prepare(str(source), out, settings, refused)
    until_s = time.monotonic() + 10
    while (left := executors()) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert held and not left
    assert 0 < reported[-1].done_rows < 400
    again = []
    assert prepare(str(source), out, settings, again.append).num_rows == 400
    assert again[-1].done_rows == 400 and max(progress.kept_rows for progress in again) >= 8


def executors():
    """Threads in which Ray Data runs a job."""
    return [thread for thread in threading.enumerate() if "StreamingExecutor" in thread.name and thread.is_alive()]
