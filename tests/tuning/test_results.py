"""Rows of trials: metrics from log lines, classification of errors; ranking and recommendation."""

from dataclasses import replace

import pytest

from mmray.config import recipes
from mmray.engine.batch import BatchShape
from mmray.errors import ResourceError, TrainingError, UsageError
from mmray.processes import describe_exit
from mmray.sweep_files import Rung, TrialRow
from mmray.tuning.results import (
    TrialOutcome,
    classify_error,
    measured_row,
    newest_value,
    recommend_trial,
    summarize_error,
)
from mmray.tuning.trials import Trial

FINISHED = TrialOutcome("finished")


def line(step, **more):
    """A line of metrics.jsonl of a run with 256 rows per step, 0.5 s each."""
    times = {"time/step_p50_s": 0.5} if step > 1 else {}
    return {"step": step, "rows_stop": 256 * step, "memory/peak_gib": step / 10, **times, **more}


def measured(lines, goal="throughput", rungs=(), auto=False, status="finished"):
    """The row of a trial with micro-batches of 64 rows."""
    shape = BatchShape(256, 64, 2, auto)
    trial = Trial("t001", {"batch.micro": 64}, recipes.load("sample"), shape)
    row = TrialRow("t001", "running", trial.settings, rungs=rungs)
    return measured_row(row, trial, TrialOutcome(status), goal, lines)


def test_row_has_speed_without_the_first_step_and_the_largest_peak_memory():
    row = measured([line(1), line(4), line(8)])
    assert (row.samples_per_s, row.step_p50_s, row.peak_gib) == (512, 0.5, 0.8)
    assert (row.micro, row.accumulation, row.workers, row.global_batch_size) == (64, 2, 2, 256)
    assert row.run == "trials/t001"
    assert measured([line(1)]).samples_per_s is None
    unstarted = measured([])
    assert (unstarted.samples_per_s, unstarted.peak_gib, unstarted.run) == (None, None, None)


def test_row_has_the_value_of_the_last_rung_and_a_curve_of_finite_values():
    lines = [line(1), line(4, **{"evaluate/loss": 2.0}), line(8, **{"evaluate/loss": None})]
    lines.append(line(12, **{"evaluate/loss": 1.0}))
    row = measured(lines, "loss", (Rung(1024, 2.0), Rung(3072, 1.0)))
    assert (row.value("loss"), row.samples) == (1.0, 3072)
    assert row.curve == ((1024, 2.0), (3072, 1.0))
    assert TrialRow.from_json(row.to_json()) == row


def test_other_errors_are_failures_with_one_line():
    text = (
        "The actor died unexpectedly. Potential root causes: (1) SIGKILL by OOM killer due to "
        "high memory usage."
    )
    assert classify_error(TrainingError(text)).status == "failed"
    text = f"the last: the worker process was {describe_exit(-9).partition('was ')[2]}"
    assert "out of memory" in text and classify_error(TrainingError(text)).status == "failed"
    error = TrainingError("KeyError: 'label'\n  at some line")
    assert classify_error(error) == TrialOutcome("failed", "KeyError: 'label'")
    assert classify_error(UsageError("global batch too large")).status == "infeasible"
    assert classify_error(ResourceError("the workers did not start")).status == "failed"
    assert classify_error(KeyboardInterrupt()).status == "stopped"
    assert summarize_error(ValueError()) == "ValueError"
    assert len(summarize_error(ValueError("x" * 1000))) == 240


def test_requested_micro_batch_that_had_to_shrink_is_out_of_memory():
    row = measured([line(2, **{"batch/micro": 64}), line(4, **{"batch/micro": 16})])
    assert (row.status, row.micro, row.accumulation) == ("out_of_memory", 64, 2)
    assert "out of memory at micro-batch 64; the run continued with 16" in row.error
    assert row.samples_per_s == 512
    assert recommend_trial([row], "throughput") is None


def test_requested_tokens_that_had_to_shrink_are_out_of_memory():
    shape = BatchShape(256, 2, 2, micro_tokens=8192)
    trial = Trial("t001", {"batch.tokens": 8192}, recipes.load("sample"), shape)
    row = TrialRow("t001", "running", trial.settings)
    lines = [line(2, **{"batch/tokens": 8192}), line(4, **{"batch/tokens": 4096})]
    shrunk, same = (
        measured_row(row, trial, TrialOutcome("finished"), "throughput", each)
        for each in (lines, lines[:1])
    )
    assert (shrunk.status, same.status) == ("out_of_memory", "finished")


@pytest.mark.parametrize(
    ("micro", "options", "split"),
    [
        (64, {}, (64, 2)),
        (16, {"auto": True}, (16, 8)),
        (64, {"auto": True}, (64, 2)),
        (16, {"status": "stopped"}, (64, 2)),  # It is run again.
        (16, {"goal": "loss"}, (16, 8)),  # The loss does not depend on micro-batches.
    ],
)
def test_other_trials_keep_their_status_and_have_the_micro_batch_that_was_used(
    micro, options, split
):
    row = measured([line(2), line(4, **{"batch/micro": micro})], **options)
    assert (row.status, row.error) == (options.get("status", "finished"), None)
    assert (row.micro, row.accumulation) == split


def trial(name, *values, status="finished", size=64, gib=1.0, **settings):
    """A row with these values at rungs of 100, 400 and 1600 samples."""
    rungs = tuple(Rung(100 * 4**number, value) for number, value in enumerate(values))
    return TrialRow(
        name,
        status,
        settings,
        global_batch_size=size,
        peak_gib=gib,
        samples_per_s=values[-1] if values else None,
        rungs=rungs,
        is_recipe=name == "own",
    )


@pytest.mark.parametrize(
    ("rows", "goal", "best", "why"),
    [
        (
            [trial("a", 10.0, gib=4), trial("b", 30.0), trial("c", 20.0)],
            "throughput",
            "b",
            "b has 30 samples/s, the highest of 3 trials.",
        ),
        (
            [trial("a", 10.0, gib=4), trial("b", 9.9, gib=2), trial("c", 5.0, gib=1)],
            "throughput",
            "b",
            "a has 10 samples/s, the highest of 3 trials. b is within 2% of it and needs less "
            "memory.",
        ),
        (
            [trial("a", 9.0, status="failed"), trial("b", 0.2)],
            "recall",
            "b",
            "b has 0.2 recall@1; no other trial was trained for as many samples.",
        ),
        (
            [trial("a", 2.0), trial("b", 2.001), trial("c", 2.5)],
            "loss",
            "a",
            "The recipe's own settings were not measured. Not certain, because within 2% of it: b.",
        ),
        (
            [trial(str(number), 1.0) for number in range(6)],
            "loss",
            "0",
            "Not certain, because within 2% of it: 1, 2, 3, 4, 5.",
        ),
        (
            [trial("own", 3.0, 2.0, status="pruned"), trial("best", 2.5, 1.5, 1.0)],
            "loss",
            "best",
            "After 400 samples the recipe's own settings (own) have 2 held-out loss and best "
            "has 1.5.",
        ),
        (
            [trial("own", 1.0), trial("b", 9.0)],
            "loss",
            "own",
            "These are the recipe's own settings: the search found none that are better.",
        ),
        (
            # The budget ended before the last rung.
            [trial("own", 3.0, 2.0, status="stopped"), trial("b", 1.0, status="pruned")],
            "loss",
            "own",
            "It has 400 samples only.",
        ),
        (
            [
                replace(trial("own", 1.0, status="failed"), error="evaluate/loss is not finite"),
                trial("b", 2.0, status="pruned"),
            ],
            "loss",
            "b",
            "have 1 held-out loss and b has 2. own failed later: evaluate/loss is not finite.",
        ),
        (
            # The best of the first rung diverged on the way to the second.
            [
                replace(trial("a", 1.0, status="failed"), error="evaluate/loss is not finite"),
                trial("b", 2.0, status="pruned"),
            ],
            "loss",
            "b",
            "b has 2 held-out loss; no other trial was trained for as many samples.",
        ),
    ],
)
def test_best_trial_and_its_reason(rows, goal, best, why):
    chosen = recommend_trial(rows, goal)
    assert chosen.best == best and why in chosen.why


def test_without_a_measured_trial_nothing_is_recommended():
    assert recommend_trial([trial("a"), trial("b", status="failed")], "recall") is None


def test_value_is_the_newest_held_out_metric_or_the_reason_why_there_is_none():
    lines = [
        {"evaluate/loss": 2.0},
        {"evaluate/loss": 1.0, "evaluate/recall_at_1/mean": 0.25},
        {"train/loss": 3.0},
    ]
    assert newest_value(lines, "loss") == 1.0
    assert newest_value(lines, "recall") == 0.25
    assert "was not measured; use another --goal" in newest_value(lines[:1], "recall")
    diverged = {"evaluate/loss": None, "evaluate/recall_at_1/mean": 0.0}
    for goal in ("loss", "recall"):
        assert newest_value([diverged], goal) == "evaluate/loss is not finite"
    assert newest_value([line(1), line(4)], "throughput") == 512
    assert "no step was timed" in newest_value([line(1)], "throughput")
