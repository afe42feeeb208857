"""While data is prepared one worker tries the model: a mistake ends the prepare, and what is prepared stays."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import ray
import ray.exceptions

from mmray.cluster.capacity import Demand, Node
from mmray.config import Batch, Objective, Prepare, Train
from mmray.data.prepare.pipeline import Progress, prepare
from mmray.data.text.tokenizer import TextEncoder, train_tokenizer
from mmray.engine import dry_run
from mmray.errors import OutOfMemoryError, ResourceError, TrainingError, UsageError
from mmray.train import early_dry_run
from mmray.train.early_dry_run import tried_meanwhile
from tests.data.test_prepare import make_source
from tests.made import CAPTIONS
from tests.train import real_models
from tests.train.made_up_gpu import made_up_gpus
from tests.train.runs import Silent, config

LIMIT_S = 180
CLIP = real_models.MODELS["clip"][0]


def wanted(tmp_path, **sections):
    return config("made", tmp_path, "tried").model_copy(update=sections)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", real_models.MODELS)
def test_every_kind_is_tried_on_a_cpu_and_on_a_gpu(monkeypatch, tmp_path, kind):
    spec, objective = real_models.MODELS[kind]
    asked = early_dry_run.known(
        wanted(tmp_path, model=spec, objective=Objective(kind=objective), batch=Batch(micro=2, global_=8))
    )
    assert asked.model.vocab_size == early_dry_run.FEW_TOKENS  # its tokenizer is still to be trained
    dry_run.try_alone(asked, on_gpu=False)
    with made_up_gpus(monkeypatch):
        dry_run.try_alone(asked, on_gpu=True)
        dry_run.try_alone(asked.model_copy(update={"batch": Batch(micro="auto", global_=8)}), on_gpu=True)


@pytest.mark.usefixtures("one_thread")
def test_what_the_ranks_or_a_compiler_do_is_left_out(tmp_path):
    asked = wanted(tmp_path, train=Train(steps=1, parallel="fsdp", compile="inductor"))
    dry_run.try_alone(early_dry_run.known(asked), on_gpu=False)


def test_a_named_tokenizer_is_read_where_the_command_is_typed(tmp_path):
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(CAPTIONS, 60))
    spec = wanted(tmp_path).model
    for token in ("", "[{}]"):
        inputs = spec.inputs.model_copy(update={"tokenizer": str(tmp_path / "tokenizer.json"), "language_token": token})
        asked = early_dry_run.known(wanted(tmp_path, model=spec.model_copy(update={"inputs": inputs})))
        assert asked.model.vocab_size == TextEncoder(train_tokenizer(CAPTIONS, 60), 8).vocab_size


def test_there_is_no_trial_of_what_is_not_known(tmp_path):
    regions = wanted(tmp_path).model.model_copy(update={"regions": True})
    weights = CLIP.model_copy(update={"weights": str(tmp_path)})
    assert [early_dry_run.known(wanted(tmp_path, model=model)) for model in (regions, weights)] == [None, None]
    (tmp_path / "tried").mkdir()  # a run that may go on, or be done
    assert early_dry_run.known(wanted(tmp_path)) is None


def test_a_trial_is_where_the_run_will_be(monkeypatch, tmp_path):
    gpus, labels = {"CPU": 1.0, "GPU": 1.0}, {"role": "train"}
    node = Node({"GPU": 1.0}, {"role": "train"})
    for per_worker, wished, free, place in (
        ({"CPU": 1.0}, {}, [], {"num_cpus": 1}),
        ({"CPU": 1.0}, labels, [], {"num_cpus": 1, "label_selector": labels}),
        (gpus, {}, [node], {"num_cpus": 0, "num_gpus": 1}),
        (gpus, labels, [node], {"num_cpus": 0, "num_gpus": 1, "label_selector": labels}),
        (gpus, {"role": "other"}, [node], None),
        (gpus, {}, [Node({"CPU": 8.0})], None),
    ):
        demand = Demand(1, per_worker, 1, wished)
        monkeypatch.setattr(early_dry_run, "demand_of", lambda *_, demand=demand, **__: demand)
        monkeypatch.setattr(early_dry_run.placement, "free_nodes", lambda free=free: free)
        assert early_dry_run.free_place(wanted(tmp_path)) == place


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": Objective(kind="matching")}, "reads `match`"),
        (
            {"model": real_models.MODELS["clip"][0].model_copy(update={"weights": "/nowhere", "vocab_size": 9})},
            "/nowhere",
        ),
        ({"objective": Objective(kind="classification")}, "class_logits"),
    ],
)
def test_mistakes_are_those_that_the_run_would_name(tmp_path, sections, said):
    with pytest.raises(UsageError, match=said):
        dry_run.try_alone(early_dry_run.known(wanted(tmp_path, **sections)), on_gpu=False)


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
    """A trial that is not over is ended."""
    listener = Silent()
    with tried_meanwhile(wanted(tmp_path), listener, after_s=0) as told:
        told.preparing(Progress("scan", 0, 0))
        until_s = time.monotonic() + LIMIT_S
        while told._trial is None and time.monotonic() < until_s:
            time.sleep(0.01)
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.WorkerCrashedError)):
        ray.get(told._trial, timeout=LIMIT_S)
    with tried_meanwhile(wanted(tmp_path), listener) as told:
        told.preparing(Progress("pack", 1, 2))
    assert told._trial is None
    assert [label for label, _ in listener.notes] == ["preparing"] * 2


def no_nodes(*_, **__):
    raise ResourceError("no such nodes")


def test_what_goes_wrong_at_its_begin_is_left_to_the_run(monkeypatch, tmp_path):
    trial = early_dry_run._Early(wanted(tmp_path), Silent(), 0)
    monkeypatch.setattr(early_dry_run, "demand_of", no_nodes)
    trial._begin()
    assert trial._trial is None


@pytest.mark.parametrize(("error", "counts"), [(OutOfMemoryError("no room"), False), (TrainingError("shape"), True)])
def test_memory_alone_ends_nothing(monkeypatch, tmp_path, error, counts):
    """The trial is of a whole model on one device, while a prepare goes on beside it."""
    listener = Silent()
    trial = early_dry_run._Early(wanted(tmp_path), listener, 0)
    monkeypatch.setattr(early_dry_run.ray, "get", lambda _: (error, 0.0))
    with pytest.raises(TrainingError, match="shape") if counts else nullcontext():
        trial._judge()
    assert counts or "no room" in dict(listener.notes)["rehearsed"]


def test_a_trial_whose_worker_died_is_told(monkeypatch, tmp_path):
    listener = Silent()
    trial = early_dry_run._Early(wanted(tmp_path), listener, 0)

    def died(_):
        raise ray.exceptions.WorkerCrashedError

    monkeypatch.setattr(early_dry_run.ray, "get", died)
    trial._judge()
    assert "could not be tried" in dict(listener.notes)["rehearsed"]


@pytest.mark.usefixtures("local_ray")
def test_a_prepare_that_is_ended_so_leaves_no_job_and_goes_on(tmp_path):
    source, out = make_source(tmp_path / "raw", 400), str(tmp_path / "out")
    settings = Prepare(rows_per_shard=8, vocab_size=100)
    reported, before = [], executors()

    def refused(progress):
        reported.append(progress)
        if progress.stage == "pack" and progress.done_rows > 0:
            raise UsageError("a mistake")

    with pytest.raises(UsageError, match="a mistake") as held:  # with its frames, and what is open in them
        prepare(str(source), out, settings, refused)
    until_s = time.monotonic() + 10
    while (left := executors() - before) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert held and not left
    assert 0 < reported[-1].done_rows < 400
    again = []
    assert prepare(str(source), out, settings, again.append).num_rows == 400
    assert again[-1].done_rows == 400 and max(progress.kept_rows for progress in again) >= 8


def executors():
    """Threads in which Ray Data runs a job."""
    return {thread for thread in threading.enumerate() if "StreamingExecutor" in thread.name and thread.is_alive()}
