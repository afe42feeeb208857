"""The training loop: bitwise resume, checked rows, logged metrics, and errors that end the run."""

from __future__ import annotations

import io
import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.metrics.timers import PHASES
from mmray.engine.run_state import EMA_KEY, LoopResult
from mmray.errors import TrainingError
from tests.engine import toy


def plan_of(steps: int, micro: int = 3, world: int = 1) -> SamplePlan:
    return SamplePlan(num_rows=33, global_rows=10, world=world, micro=micro, seed=1, steps=steps)


class Checkpoints(dict):
    """States by step, serialized and loaded without pickle like real checkpoints."""

    def save(self, step, state, metrics, last):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self[step] = buffer.getvalue()

    def load(self, step):
        return torch.load(io.BytesIO(self[step]), weights_only=True)


def train(model, plan, state=None, first=0, **options):
    return loop.run(
        toy.task(model, plan, **options),
        toy.steps_of(plan, 0, first),
        None if state is None else lambda _: state,
    )


def test_resumed_run_is_bitwise_equal():
    plan, checkpoints, log = plan_of(8), Checkpoints(), toy.Lines()
    whole = toy.Toy(dropout=0.2, batch_norm=True)
    train(whole, plan, save=checkpoints.save, log=log)
    assert list(checkpoints) == [3, 6, 8]

    again, second_log = toy.Toy(dropout=0.2, batch_norm=True), toy.Lines()
    torch.manual_seed(99)  # earlier random numbers must not matter
    train(again, plan, checkpoints.load(3), first=3, log=second_log)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    measured = ("time", "thr", "mem", "host", "gpu")
    numbers, resumed = (
        [{k: v for k, v in line.items() if not k.startswith(measured)} for line in each.lines]
        for each in (log, second_log)
    )
    assert resumed == [line for line in numbers if line["step"] in (4, 6, 8)]


def test_loaded_checkpoint_is_freed_before_first_step():
    plan, checkpoints, read, alive = plan_of(5), Checkpoints(), [], []
    train(toy.Toy(), plan, save=checkpoints.save)

    def stored(_):
        state = checkpoints.load(3)
        read.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    seen = SimpleNamespace(on_step=lambda step, metrics: alive.append([one for one in read if one() is not None]))
    loop.run(toy.task(toy.Toy(), plan, callbacks=(seen,)), toy.steps_of(plan, 0, 3), stored)
    assert read and alive == [[], []]


def test_different_accumulation_takes_same_steps():
    models = [toy.Toy().double(), toy.Toy().double()]
    for model, micro in zip(models, (10, 4), strict=True):
        train(model, plan_of(8, micro))
    torch.testing.assert_close(toy.flat(models[0]), toy.flat(models[1]), rtol=0, atol=1e-9)


def test_row_out_of_order_ends_the_run_before_its_step():
    plan, model = plan_of(4), toy.Toy()
    steps = list(toy.steps_of(plan, 0))
    steps[2][1]["pos"][0] = 99
    callback = Steps()
    with pytest.raises(TrainingError, match=r"step 3 on rank 0: row 3 has position 99, 23 expected"):
        loop.run(toy.task(model, plan, callbacks=(callback,)), steps)
    assert [step for step, _ in callback.seen] == [1, 2]


def test_short_stream_ends_the_run():
    plan = plan_of(4)
    with pytest.raises(TrainingError, match="ended after step 3 of 4"):
        loop.run(toy.task(toy.Toy(), plan), list(toy.steps_of(plan, 0))[:3])


def test_missing_micro_batch_ends_the_run():
    plan = plan_of(2)
    steps = [micro_batches[:-1] for micro_batches in toy.steps_of(plan, 0)]
    with pytest.raises(TrainingError, match="9 rows arrived, 10 expected"):
        loop.run(toy.task(toy.Toy(), plan), steps)


class Steps:
    def __init__(self):
        self.seen = []

    def on_step(self, step, metrics):
        self.seen.append((step, metrics))


def test_metrics_are_logged_and_callbacks_called():
    plan, log, callback, saved = plan_of(5), toy.Lines(), Steps(), []
    outcome = train(
        toy.Toy(),
        plan,
        log=log,
        callbacks=(callback,),
        save=lambda step, state, metrics, last: saved.append((step, metrics, last)),
        evaluate=lambda step, _: {"recall_at_1/image_to_text": step / 10},
        evaluate_every=4,
    )
    assert [line["step"] for line in log.lines] == [2, 3, 4, 5]  # every 2nd; saved at 3; evaluated at 4; the last
    assert [(line["rows_start"], line["rows_stop"], line["epoch"]) for line in log.lines] == [
        (10, 20, 0),
        (20, 30, 0),
        (30, 33, 0),
        (33, 43, 1),
    ]
    assert [line.get("evaluate/recall_at_1/image_to_text") for line in log.lines] == [None, None, 0.4, 0.5]
    expected = {"train/loss", "train/lr", "train/grad_norm", "train/logit_scale", "train/skipped_steps"}
    expected |= {"time/step_s", "time/data_wait_s", "time/data_wait_share", "throughput/samples_per_s"}
    expected |= {"time/step_p50_s", "time/step_p95_s", "time/first_step_s", "throughput/tokens_per_s"}
    expected |= {f"time/{phase}_s" for phase in PHASES} | {"host/cpu_percent", "throughput/tflops_per_device"}
    assert expected | {"memory/peak_gib", "rows_sha", "batch/padding"} <= log.lines[0].keys()
    assert "batch/padding_unbucketed" not in log.lines[0]  # the rows are not reordered
    assert [step for step, _ in callback.seen] == [1, 2, 3, 4, 5]
    assert [metrics for _, metrics in callback.seen] == [None, *log.lines]
    assert saved == [(3, log.lines[1], False), (5, log.lines[3], True)]
    assert outcome == LoopResult("finished", 5, 43, 0, log.lines[-1])


def test_logged_loss_is_the_loss_of_the_step():
    plan, log = plan_of(1), toy.Lines()
    train(toy.Toy(), plan, log=log)
    expected = toy.reference_gradients(toy.Toy(), next(toy.steps_of(plan, 0)), 0)
    assert log.lines[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(precision):
    log = toy.Lines()
    settings = SimpleNamespace(**{**vars(toy.TRAIN), "precision": precision})
    outcome = train(toy.Toy(), plan_of(30), log=log, train=settings)
    losses = [line["train/loss"] for line in log.lines]
    assert losses[-1] < 0.5 * losses[0]
    assert outcome.skipped_steps <= 2  # fp16 may find its scale at the start


def test_model_is_in_train_mode_after_evaluation():
    model = toy.Toy(dropout=0.5)
    train(model, plan_of(4), evaluate=lambda _, model: {"in_eval": float(not model.eval().training)}, evaluate_every=1)
    assert model.training


def test_ema_weights_are_evaluated_and_resumed():
    settings = SimpleNamespace(**{**vars(toy.TRAIN), "ema": 0.8})
    plan, checkpoints, model, seen = plan_of(8), Checkpoints(), toy.Toy(), []
    expected = None

    class Naive:
        def on_step(self, step, metrics):
            nonlocal expected
            now = toy.flat(model)
            expected = now if expected is None else 0.8 * expected + 0.2 * now

    train(
        model,
        plan,
        save=checkpoints.save,
        train=settings,
        callbacks=(Naive(),),
        evaluate=lambda _, averaged: seen.append(toy.flat(averaged)) or {},
    )
    torch.testing.assert_close(seen[0], expected)
    assert not torch.allclose(seen[0], toy.flat(model), atol=1e-4)
    again = Checkpoints()
    train(toy.Toy(), plan, checkpoints.load(3), first=3, save=again.save, train=settings)
    whole, resumed = checkpoints.load(8)[EMA_KEY], again.load(8)[EMA_KEY]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_finished_run_takes_no_step():
    plan, checkpoints = plan_of(3), Checkpoints()
    model = toy.Toy()
    train(model, plan, save=checkpoints.save)
    before = toy.flat(model)
    outcome = train(model, plan, checkpoints.load(3), first=3)
    assert outcome == LoopResult("finished", 3, 30, 0, {})
    assert torch.equal(toy.flat(model), before)


def test_stopped_run_saves_a_checkpoint():
    plan, checkpoints, asked = plan_of(100), Checkpoints(), iter(range(100))
    outcome = train(toy.Toy(), plan, save=checkpoints.save, stop=lambda: next(asked) == 4)
    assert (outcome.status, outcome.steps, list(checkpoints)) == ("stopped", 5, [3, 5])
    assert checkpoints.load(5)["progress"]["step"] == 5


class Poisoned(toy.Toy):
    """Returns NaN at the given steps, counted from 1."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.step = steps, 0

    def forward(self, batch):
        outputs = super().forward(batch)
        outputs["image_embed"] = outputs["image_embed"] * (float("nan") if self.step + 1 in self.steps else 1.0)
        return outputs

    def on_step(self, step, metrics):
        self.step = step


def test_non_finite_steps_are_skipped_and_counted():
    model, log = Poisoned(steps=(2, 3, 5)), toy.Lines()
    outcome = train(model, plan_of(6), log=log, callbacks=(model,))
    assert outcome.skipped_steps == 3
    assert [line["train/skipped_steps"] for line in log.lines] == [1, 2, 3]
    assert torch.isfinite(toy.flat(model)).all()


def test_too_many_consecutive_non_finite_steps_end_the_run_across_restarts():
    checkpoints, model = Checkpoints(), Poisoned(steps=(2, 3, 4))
    with pytest.raises(TrainingError, match="3 steps in a row, up to step 4"):
        train(model, plan_of(6), save=checkpoints.save, callbacks=(model,))
    again = Poisoned(steps=(4,))
    again.step = 3
    with pytest.raises(TrainingError, match="3 steps in a row"):
        train(again, plan_of(6), checkpoints.load(3), first=3, callbacks=(again,))


class PoisonedRow(toy.Toy):
    """Returns NaN for one row, identified by its tokens."""

    def forward(self, batch):
        outputs = super().forward(batch)
        poison = torch.where(batch["key"] == toy.rows(33, 0)["key"][POISONED], float("nan"), 1.0)
        return outputs | {"text_embed": outputs["text_embed"] * poison[:, None]}


POISONED = 17


def test_row_with_non_finite_output_is_named():
    plan = SamplePlan(num_rows=33, global_rows=33, world=1, micro=8, seed=1, steps=5)
    with pytest.raises(TrainingError, match=r"3 steps in a row.*outputs not finite for sample 17\)"):
        train(PoisonedRow(), plan, names=lambda rows: [f"sample {row}" for row in rows])


def test_search_for_non_finite_row_keeps_to_the_micro_batch_size():
    sizes = []

    class Watched(PoisonedRow):
        def forward(self, batch):
            if not torch.is_grad_enabled():
                sizes.append(len(batch["valid"]))
            return super().forward(batch)

    plan = SamplePlan(num_rows=33, global_rows=33, world=1, micro=8, seed=1, steps=5)
    with pytest.raises(TrainingError, match="row 17"):
        train(Watched(), plan, micro=4)
    assert max(sizes) == 4


class PoisonedPair(toy.Toy):
    """The match score of one row with its own partner is NaN; its embeddings are finite."""

    def forward(self, batch):
        outputs = super().forward(batch)
        if "match" in outputs:
            bad = batch["key"] == toy.rows(33, 0)["key"][POISONED]
            outputs["match"] = outputs["match"] * torch.where(bad, float("nan"), 1.0)
        return outputs


def test_row_that_is_non_finite_only_with_its_partner_is_named():
    plan = SamplePlan(num_rows=33, global_rows=33, world=1, micro=8, seed=1, steps=5)
    with pytest.raises(TrainingError, match=r"outputs not finite for sample 17\)"):
        model, names = PoisonedPair(kind="matching"), lambda rows: [f"sample {row}" for row in rows]
        train(model, plan, objective=toy.objective("matching"), names=names)


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp16"), ("fp16", "bf16"), ("fp32", "fp16")])
def test_checkpoint_resumes_in_another_precision(before, after):
    plan, checkpoints = plan_of(6), Checkpoints()
    first, then = (SimpleNamespace(**{**vars(toy.TRAIN), "precision": name}) for name in (before, after))
    train(toy.Toy(), plan, save=checkpoints.save, train=first)
    outcome = train(toy.Toy(), plan, checkpoints.load(3), first=3, train=then)
    assert (outcome.status, outcome.steps) == ("finished", 6)


def test_rows_of_the_step_are_named_if_no_single_row_is_non_finite(monkeypatch):
    monkeypatch.setattr(loop, "optimizer_step", lambda *given: replace(taken(*given), finite=False))
    with pytest.raises(TrainingError, match=r"all outputs finite, and the rows are rows 20 to 29 of the sample order"):
        train(toy.Toy(), plan_of(5))


taken = loop.optimizer_step


@pytest.mark.cluster
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_under_torchrun_equal_one_process(tmp_path, parallel):
    """Two ranks, or one per GPU."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = ["-m", "tests.engine.torchrun_script", tmp_path / "weights.pt", parallel]
    world = str(torch.cuda.device_count() or 2)
    ended = subprocess.run([*torchrun, world, *script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    alone = toy.Branched().double()
    train(alone, plan_of(8, micro=2))
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), toy.flat(alone), rtol=1e-9, atol=1e-12)


def test_engine_runs_without_ray_and_pydantic():
    code = (
        "import sys; import mmray.engine.loop, mmray.engine.metrics.writers; "
        "found = {'ray', 'pydantic', 'tensorboard'} & set(sys.modules); sys.exit(f'imports {found}' if found else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
