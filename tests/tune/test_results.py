"""Rows of trials: metrics from log lines, classification of errors; ranking and recommendation."""

import pytest

from mmray.engine.batch import BatchShape
from mmray.errors import ResourceError, TrainingError, UsageError
from mmray.tune.results import (
    TrialOutcome,
    aggregate_metrics,
    build_row,
    classify_error,
    learning_curve,
    rung_value,
    samples_to,
    select_best,
    summarize_error,
)
from mmray.tune.trials import Trial


def line(step, rate, step_s, loss=1.0, **more):
    rates = {"throughput/samples_per_s": rate, "time/step_s": step_s} if rate else {}
    return {"step": step, "rows_stop": step * 10, "train/loss": loss, "memory/peak_gib": step / 10, **rates, **more}


def test_figures_exclude_the_first_window_and_a_short_last_one_from_the_spread():
    lines = [line(4, 1, 10), line(8, 100, 0.1), line(12, 50, 0.2), line(13, 10, 1.0)]
    lines[-1] |= {"time/step_p50_s": 0.5, "time/step_p95_s": 0.9}
    result = aggregate_metrics(lines)
    # Rows over seconds of 4 steps at 100/s, 4 at 50/s and 1 at 10/s: (40 + 40 + 10) / (0.4 + 0.8 + 1).
    assert result["samples_per_s"] == pytest.approx(90 / 2.2)
    assert (result["samples_per_s_min"], result["samples_per_s_max"]) == (50, 100)
    assert (result["steps"], result["samples"], result["peak_gib"]) == (13, 130, 1.3)
    assert (result["step_p50_s"], result["step_p95_s"]) == (0.5, 0.9)
    assert set(aggregate_metrics([]).values()) == {None}
    assert aggregate_metrics([line(1, None, None)])["samples_per_s"] is None


def test_learning_curve_has_samples_values_and_seconds_without_the_first_step():
    lines = [line(1, None, None), line(4, 10, 0.5), line(8, 10, 0.25, **{"evaluate/loss": 2.0})]
    lines += [line(12, 10, 0.25), line(16, 10, 1.0, **{"evaluate/loss": None}), line(17, 10, 1, **{"evaluate/loss": 1})]
    assert learning_curve(lines, "evaluate/loss") == [[80, 2.0, 2.5], [170, 1, 8.5]]


def test_loss_is_the_mean_of_the_last_quarter():
    lines = [line(step, 10, 1, loss=float(step)) for step in range(1, 9)]
    assert aggregate_metrics(lines)["loss"] == 7.5
    assert aggregate_metrics([*lines, line(9, 10, 1, loss=None)])["loss"] is None  # not finite: not averaged away


def test_other_errors_are_failures_with_one_line():
    text = "The actor died unexpectedly. Potential root causes: (1) SIGKILL by OOM killer due to high memory usage."
    assert classify_error(TrainingError(text)).status == "failed"
    error = TrainingError("KeyError: 'label'\n  at some line")
    assert classify_error(error) == TrialOutcome("failed", "KeyError: 'label'")
    assert classify_error(UsageError("global batch too large")).status == "infeasible"
    assert classify_error(ResourceError("the workers did not start")).status == "failed"
    assert classify_error(KeyboardInterrupt()).status == "stopped"
    assert summarize_error(ValueError()) == "ValueError" and len(summarize_error(ValueError("x" * 1000))) == 240


def row_with(micro, status="finished", auto=False, goal="throughput"):
    """A row of a trial with micro-batches of 64 rows whose run ended with `micro`."""
    trial = Trial("t001", {"batch.micro": 64}, None, BatchShape(256, 64, 2, 2, auto))
    lines = [line(step, 100, 0.1) | {"batch/micro": 64 if step == 1 else micro} for step in (1, 2, 3)]
    return build_row(trial, TrialOutcome(status), goal, lines, elapsed_s=3.0)


def test_trial_with_reduced_micro_batch_is_out_of_memory():
    row = row_with(16)
    assert (row["status"], row["micro"], row["accumulation"]) == ("out_of_memory", 64, 2)
    assert "out of memory at micro-batch 64; the run continued with 16" in row["error"]
    assert row["elapsed_s"] == 3.0 and row["samples_per_s"] == 100
    assert select_best([row], "throughput") is None


@pytest.mark.parametrize(
    ("micro", "status", "auto", "split"),
    [
        (64, "finished", False, (64, 2)),
        (16, "finished", True, (16, 8)),
        (64, "finished", True, (64, 2)),
        (16, "stopped", False, (64, 2)),  # run again
        (16, "finished", None, (16, 8)),  # a learning goal: the loss does not depend on micro-batches
    ],
)
def test_other_trials_keep_their_status(micro, status, auto, split):
    row = row_with(micro, status, bool(auto), "loss" if auto is None else "throughput")
    assert (row["status"], row["error"], (row["micro"], row["accumulation"])) == (status, None, split)


def row(trial, size, rate, gib=1.0, loss=1.0, recall=0.5, status="finished", spread=0.01):
    row = {"trial": trial, "status": status, "global": size, "peak_gib": gib, "recall_at_1": recall, "eval_loss": loss}
    row |= {"rungs": [{"samples": 400, "value": loss}], "curve": [[100, 2 * loss], [400, loss]], "quality_s": None}
    rates = {"samples_per_s_min": rate * (1 - spread), "samples_per_s_max": rate * (1 + spread)}
    return row | rates | {"samples_per_s": rate}


@pytest.mark.parametrize(
    ("rows", "goal", "best", "why"),
    [
        (
            [row("a", 64, 100), row("b", 64, 120), row("c", 128, 300), row("d", 128, 200)],
            *("throughput", "c", "c has 300 samples/s, the highest of 4 trials."),
        ),
        (  # less memory wins within two percent
            [row("a", 64, 100, gib=8), row("b", 64, 99, gib=4), row("c", 64, 97, gib=1)],
            *("throughput", "b", "b has 99 samples/s, within 2% of the highest (100 samples/s of a), and uses less"),
        ),
        ([row("a", 64, 100, spread=0.2), row("b", 64, 90)], "throughput", "a", "are within the range of 80 to 120"),
        (
            [row("a", 64, 900, status="out_of_memory"), row("b", 64, 800, status="stopped"), row("c", 64, 5)],
            *("throughput", "c", "c has 5 samples/s, the highest of 1 trials."),
        ),
        ([row("a", 64, 10, recall=None), row("b", 64, 9, recall=0.2)], "recall", "b", "recall@1 0.200"),
        (
            [row("a", 64, 10, loss=2.0), row("b", 64, 30, loss=2.001), row("c", 64, 90, loss=2.5)],
            *("loss", "a", "Not certain: b differ by less than 2%."),
        ),
        ([row("a", 64, 10, gib=1.0), row("b", 64, 30, gib=1.01), row("c", 64, 9, gib=4)], "memory", "b", "is faster"),
    ],
)
def test_best_trial_and_its_reason(rows, goal, best, why):
    chosen = select_best(rows, goal)
    assert chosen["best"] == best and why in chosen["why"]
    assert ("may be as fast" in chosen["why"]) == ("range" in why)


def test_best_is_chosen_per_global_batch_from_measured_trials():
    rows = [row("a", 64, 100), row("b", 64, 120), row("c", 128, 300), row("d", 128, 900, status="stopped")]
    assert select_best(rows, "throughput")["per_global"] == {"64": "b", "128": "c"}
    assert select_best(rows[3:], "throughput") is None
    assert select_best([row("a", 64, 10, recall=None) | {"rungs": []}], "recall") is None


def test_best_trial_is_compared_with_the_settings_of_the_recipe():
    rows = [
        row("t001", 64, 10, loss=2.0),
        row("t002", 64, 10, loss=1.0),
        row("t003", 64, 10, status="pruned", loss=0.5),
    ]
    why = select_best(rows, "loss")["why"]
    assert why.startswith("t002 has held-out loss 1.000, the lowest of 2 trials. The recipe's own settings (t001) have")
    assert "held-out loss 2.000 after 400 samples; t002 reached it in 100." in why
    assert "no other trial was better" in select_best(rows[:1], "loss")["why"]


def test_time_to_quality_is_the_samples_to_the_loss_of_the_recipe_over_the_rate():
    """b needs more samples than a, but is four times as fast; c never reaches the target."""
    rows = [
        row("t001", 64, 10, loss=2.0),
        row("a", 64, 10, loss=1.0),
        row("b", 256, 40, loss=1.5),
        row("c", 64, 90, loss=9),
    ]
    chosen = select_best(rows, "time-to-quality")
    assert chosen["best"] == "b" and rows[3]["quality_s"] is None
    assert [each["quality_s"] for each in rows[:3]] == [40.0, 10.0, (100 + 300 * (3 - 2) / 1.5) / 40]


@pytest.mark.parametrize(
    ("curve", "target", "maximize", "samples"),
    [
        ([[10, 5.0], [20, 3.0]], 4.0, False, 15.0),
        ([[10, 5.0], [20, 3.0]], 6.0, False, 10),
        ([[10, 5.0], [20, 3.0]], 1.0, False, None),
        ([[10, 0.1], [20, 0.3], [30, 0.2]], 0.2, True, 15.0),
        ([], 1.0, False, None),
    ],
)
def test_samples_to_a_target_are_interpolated(curve, target, maximize, samples):
    assert samples_to(curve, target, maximize) == (pytest.approx(samples) if samples else None)


def test_without_a_full_trial_those_with_most_samples_are_compared():
    rows = [row("t001", 64, 10, loss=2.0, status="stopped"), row("t002", 64, 10, loss=1.0, status="pruned")]
    rows[1]["rungs"] = [{"samples": 100, "value": 1.0}]
    chosen = select_best(rows, "loss")
    assert chosen["best"] == "t001" and "It has 400 samples only." in chosen["why"]


def test_value_of_a_rung_is_the_newest_held_out_metric_or_the_reason_why_there_is_none():
    lines = [{"evaluate/loss": 2.0}, {"evaluate/loss": 1.0, "evaluate/recall_at_1/mean": 0.25}, {"train/loss": 3.0}]
    assert rung_value(lines, "loss") == rung_value(lines, "time-to-quality") == 1.0
    assert rung_value(lines, "recall") == 0.25
    assert "was not measured; use another --goal" in rung_value(lines[:1], "recall")
    assert rung_value([{"evaluate/loss": None}], "loss") == "evaluate/loss is not finite"
    assert rung_value([line(4, 100, 0.1)], "throughput") == 100
