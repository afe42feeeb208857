"""The training loop: bitwise resume, checked rows, logged metrics, and errors that end the run."""

from __future__ import annotations

import io
import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.metrics.table import METRICS, is_own
from mmray.engine.optimizer import lr_at
from mmray.engine.run_state import EMA_KEY, LoopResult
from mmray.errors import TrainingError, UsageError
from tests.engine import toy


@pytest.fixture(autouse=True)
def few_nonfinite_steps(monkeypatch):
    monkeypatch.setattr(loop, "MAX_NONFINITE_STEPS", 3)


def plan_of(steps: int, micro: int = 3, world: int = 1) -> SamplePlan:
    return SamplePlan(num_rows=33, global_batch_size=10, world_size=world, seed=1, steps=steps)


class Checkpoints(dict):
    """States by step, serialized and loaded without pickle like real checkpoints."""

    def save(self, step, state, metrics, last):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self[step] = buffer.getvalue()

    def load(self, step):
        return torch.load(io.BytesIO(self[step]), weights_only=True)


def train(model, plan, state=None, first=0, **options):
    return toy.run(model, plan, None, None if state is None else lambda _: state, first, **options)


def on_step(function):
    return SimpleNamespace(on_step=function)


def test_resumed_run_is_bitwise_equal():
    """The first step after the checkpoint has the last 3 rows of an epoch and 7 of the next."""
    plan, checkpoints, log = plan_of(8), Checkpoints(), toy.Lines()
    whole = toy.Toy(dropout=0.2, batch_norm=True)
    train(whole, plan, save=checkpoints.save, log=log)
    assert list(checkpoints) == [3, 6, 8]

    resumed, resumed_log = toy.Toy(dropout=0.2, batch_norm=True), toy.Lines()
    torch.manual_seed(99)  # earlier random numbers must not matter
    train(resumed, plan, checkpoints.load(3), first=3, log=resumed_log)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    measured = ("time", "thr", "mem", "host", "gpu")
    expected, lines = (
        [{k: v for k, v in line.items() if not k.startswith(measured)} for line in each]
        for each in (log, resumed_log)
    )
    assert lines == [line for line in expected if line["step"] in (4, 6, 8)]


def move_row(steps):
    steps[2][1]["pos"][0] = 99
    return steps


@pytest.mark.parametrize(
    ("change", "message", "taken"),
    [
        (move_row, r"step 3 on rank 0: row 3 has position 99, 23 expected", [1, 2]),
        (lambda steps: steps[:3], "ended after step 3 of 4", [1, 2, 3]),
        (
            lambda steps: [micro_batches[:-1] for micro_batches in steps],
            "9 rows arrived, 10 expected",
            [],
        ),
    ],
)
def test_wrong_rows_end_the_run_before_their_step(change, message, taken):
    plan, steps = plan_of(4), []
    spec = toy.train_spec(
        toy.Toy(), plan, callbacks=(on_step(lambda step, metrics: steps.append(step)),)
    )
    with pytest.raises(TrainingError, match=message):
        loop.train_loop(spec, change(list(toy.steps_of(plan, 0))))
    assert steps == taken


@pytest.mark.parametrize(
    "name", ["train/loss", "train/lr", "throughput/samples_per_s", "evaluate/loss"]
)
def test_metric_of_a_callback_with_the_name_of_another_ends_the_run(name):
    callback = on_step(lambda *args: None)
    callback.compute_metrics = lambda step: {name: 1.0, "mine/steps": step}
    with pytest.raises(UsageError, match=f"compute_metrics returned {name}, which is .*: rename"):
        train(toy.Toy(), plan_of(5), callbacks=(callback,), log=toy.Lines())


def test_two_callbacks_with_a_metric_of_one_name_end_the_run():
    callbacks = [on_step(lambda *args: None), on_step(lambda *args: None)]
    for value, callback in enumerate(callbacks):
        callback.compute_metrics = lambda step, value=value: {"mine/value": value}
    with pytest.raises(UsageError, match="compute_metrics returned mine/value, which is another"):
        train(toy.Toy(), plan_of(5), callbacks=callbacks, log=toy.Lines())


def test_metrics_are_logged_and_callbacks_called():
    plan, log, called, saved = plan_of(5), toy.Lines(), [], []
    counting = on_step(lambda *args: None)
    counting.compute_metrics = lambda step: {"mine/steps": step}
    outcome = train(
        toy.Toy(),
        plan,
        log=log,
        callbacks=(on_step(lambda *args: called.append(args)), counting),
        save=lambda step, state, metrics, last: saved.append((step, metrics, last)),
        evaluate=lambda step, _: {"recall_at_1/image_to_text": step / 10},
        evaluate_every=4,
    )
    assert log.of("step") == [2, 3, 4, 5]  # every 2nd; saved at 3; evaluated at 4; the last
    rows = [(10, 20, 0), (20, 30, 0), (30, 40, 0), (40, 50, 1)]
    assert [(line["rows_start"], line["rows_stop"], line["epoch"]) for line in log] == rows
    assert [line.get("evaluate/recall_at_1/image_to_text") for line in log] == [
        None,
        None,
        0.4,
        0.5,
    ]
    own = {f"train/loss_{each}" for each in ("image_to_text", "text_to_image")}
    own |= {"train/logit_scale", "mine/steps"}
    other = ("memory/", "gpu/", "time/device", "time/launch", "time/rows", "batch/", "compile/")
    expected = {name for name in METRICS if not name.startswith((*other, "throughput/mfu"))}
    expected |= own | {"memory/peak_gib", "batch/padding"}
    assert expected - {"time/evaluate_s"} <= log[0].keys()
    assert {name for name in log[2] if is_own(name)} == own
    assert log.of("mine/steps") == [2, 3, 4, 5]
    assert called == list(zip([1, 2, 3, 4, 5], [None, *log], strict=True))
    assert saved == [(3, log[1], False), (5, log[3], True)]
    assert outcome == LoopResult("finished", 5, 50, 0, log[-1])


def test_times_of_a_line_add_up_to_the_wall_clock(monkeypatch):
    """Steps, evaluation, checkpoint, log and callbacks: no time of the training thread is missing
    in a rate.

    Only these activities advance the clock.
    """
    now_s, lines_s, log, model = [0.0], [], toy.Lines(), toy.Toy()
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def spend(seconds):
        now_s[0] += seconds

    def write(metrics):
        lines_s.append(now_s[0])
        log.append(metrics)
        spend(3.0)

    model.register_forward_pre_hook(lambda *_: spend(0.5))
    train(
        model,
        plan_of(9),
        log=SimpleNamespace(write=write),
        callbacks=(on_step(lambda *_: spend(1.0)),),
        save=lambda *_: spend(5.0),
        evaluate=lambda *_: spend(7.0) or {},
        evaluate_every=4,
        train=toy.train_settings(log_every=2, checkpoint_every=4),
    )
    assert log.of("step") == [2, 4, 6, 8, 9]
    for before, line, start_s, end_s in zip(log, log[1:], lines_s, lines_s[1:], strict=False):
        steps, wall_s = line["step"] - before["step"], line["time/wall_s"]
        between_s = {
            name: line.get(f"time/{name}_s", 0.0)
            for name in ("evaluate", "checkpoint", "log", "callbacks")
        }
        evaluated, saved = line["step"] in (4, 8, 9), before["step"] in (4, 8)
        assert between_s == {
            "evaluate": 7 * evaluated,
            "checkpoint": 5 * saved,
            "log": 3,
            "callbacks": steps,
        }
        assert wall_s == end_s - start_s == steps * line["time/step_s"] + sum(between_s.values())
        assert line["time/step_s"] > 0 and line["throughput/samples_per_s"] == pytest.approx(
            10 * steps / (wall_s - between_s["evaluate"])
        )


def test_rate_without_multipliers_is_logged():
    log, settings = toy.Lines(), toy.optimizer_settings(lr_multipliers=["*words*=10"])
    train(toy.Branched(), plan_of(2), log=log, optimizer=settings)
    assert [line["train/lr"] for line in log] == [
        lr_at(line["step"] - 1, settings, 2) for line in log
    ]


@pytest.mark.parametrize(
    ("before", "after"), [("bf16", "fp16"), ("fp16", "bf16"), ("fp32", "fp16")]
)
def test_checkpoint_resumes_in_another_precision(before, after):
    plan, checkpoints = plan_of(6), Checkpoints()
    train(toy.Toy(), plan, save=checkpoints.save, train=toy.train_settings(precision=before))
    outcome = train(
        toy.Toy(), plan, checkpoints.load(3), first=3, train=toy.train_settings(precision=after)
    )
    assert (outcome.status, outcome.steps) == ("finished", 6)


def test_model_is_in_train_mode_after_evaluation():
    model = toy.Toy(dropout=0.5)
    train(
        model,
        plan_of(4),
        evaluate=lambda _, model: {"in_eval": float(not model.eval().training)},
        evaluate_every=1,
    )
    assert model.training


def test_ema_weights_are_evaluated_and_resumed():
    settings = toy.train_settings(ema=0.8)
    plan, checkpoints, resumed, model = plan_of(8), Checkpoints(), Checkpoints(), toy.Toy()
    evaluated, expected = [], []

    def average(step, metrics):
        weights = toy.flat(model)
        expected.append(0.8 * expected[-1] + 0.2 * weights if expected else weights)

    options = {"train": settings, "callbacks": (on_step(average),)}
    train(
        model,
        plan,
        save=checkpoints.save,
        evaluate=lambda _, ema: evaluated.append(toy.flat(ema)) or {},
        **options,
    )
    torch.testing.assert_close(evaluated[0], expected[-1])
    assert not torch.allclose(evaluated[0], toy.flat(model), atol=1e-4)
    train(toy.Toy(), plan, checkpoints.load(3), first=3, save=resumed.save, train=settings)
    ema, resumed_ema = checkpoints.load(8)[EMA_KEY], resumed.load(8)[EMA_KEY]
    assert ema.keys() == resumed_ema.keys() and all(
        torch.equal(ema[name], resumed_ema[name]) for name in ema
    )


def test_stopped_run_saves_a_checkpoint():
    checkpoints, polls = Checkpoints(), iter(range(100))
    outcome = train(toy.Toy(), plan_of(100), save=checkpoints.save, stop=lambda: next(polls) == 4)
    assert (outcome.status, outcome.steps, list(checkpoints)) == ("stopped", 5, [3, 5])
    assert checkpoints.load(5)["progress"]["step"] == 5


@pytest.mark.parametrize("after", [0, 3, 5])
def test_run_that_waits_for_rows_when_it_is_stopped_saves_a_checkpoint(after):
    """The stream ends because it is interrupted; step 3 has been saved before."""
    plan, checkpoints, stops = plan_of(100), Checkpoints(), []

    def steps():
        yield from itertools.islice(toy.steps_of(plan, 0), after)
        stops.append(True)

    spec = toy.train_spec(toy.Toy(), plan, save=checkpoints.save, stop=lambda: bool(stops))
    outcome = loop.train_loop(spec, steps())
    assert (outcome.status, outcome.steps) == ("stopped", after)
    assert list(checkpoints) == {0: [], 3: [3], 5: [3, 5]}[after]


def test_non_finite_steps_are_skipped_and_counted():
    model, log = toy.NanAtSteps(steps=(2, 3, 5)), toy.Lines()
    assert train(model, plan_of(6), log=log, callbacks=(model,)).skipped_steps == 3
    assert log.of("train/skipped_steps") == [1, 2, 3]
    assert torch.isfinite(toy.flat(model)).all()


def test_too_many_consecutive_non_finite_steps_end_the_run_across_restarts():
    checkpoints, model = Checkpoints(), toy.NanAtSteps(steps=(2, 3, 4))
    with pytest.raises(TrainingError, match="3 steps in a row, up to step 4"):
        train(model, plan_of(6), save=checkpoints.save, callbacks=(model,))
    resumed = toy.NanAtSteps(steps=(4,), first=3)
    with pytest.raises(TrainingError, match="3 steps in a row"):
        train(resumed, plan_of(6), checkpoints.load(3), first=3, callbacks=(resumed,))
