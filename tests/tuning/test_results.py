"""Rows of trials: metrics from log lines, classification of errors; ranking and recommendation."""

import pytest

from mmray.engine.batch import BatchShape
from mmray.errors import ResourceError, TrainingError, UsageError
from mmray.training.local import describe_exit
from mmray.tuning.results import (
    TrialOutcome,
    _against_recipe,
    aggregate_metrics,
    build_row,
    classify_error,
    flag_unequal_losses,
    learning_curve,
    rung_value,
    samples_to,
    select_best,
    summarize_error,
)
from mmray.tuning.trials import Trial


def line(step, rate, step_s, loss=1.0, **more):
    rates = {"throughput/samples_per_s": rate, "time/step_s": step_s} if rate else {}
    return {
        "step": step,
        "rows_stop": step * 10,
        "train/loss": loss,
        "memory/peak_gib": step / 10,
        **rates,
        **more,
    }


def test_figures_exclude_the_first_window_and_a_short_last_one_from_the_spread():
    lines = [line(4, 1, 10), line(8, 100, 0.1), line(12, 50, 0.2), line(13, 10, 1.0)]
    lines[-1] |= {"time/step_p50_s": 0.5, "time/step_p95_s": 0.9}
    result = aggregate_metrics(lines)
    # Rows over seconds of 4 steps at 100/s, 4 at 50/s and 1 at 10/s: (40 + 40 + 10) / (0.4 + 0.8 +
    # 1).
    assert result["samples_per_s"] == pytest.approx(90 / 2.2)
    assert (result["samples_per_s_min"], result["samples_per_s_max"]) == (50, 100)
    assert (result["steps"], result["samples"], result["peak_gib"]) == (13, 130, 1.3)
    assert (result["step_p50_s"], result["step_p95_s"]) == (0.5, 0.9)
    assert set(aggregate_metrics([]).values()) == {None}
    assert aggregate_metrics([line(1, None, None)])["samples_per_s"] is None


def test_learning_curve_has_samples_values_and_seconds_without_the_first_step():
    lines = [line(1, None, None), line(4, 10, 0.5), line(8, 10, 0.25, **{"evaluate/loss": 2.0})]
    lines += [
        line(12, 10, 0.25),
        line(16, 10, 1.0, **{"evaluate/loss": None}),
        line(17, 10, 1, **{"evaluate/loss": 1}),
    ]
    assert learning_curve(lines, "evaluate/loss") == [[80, 2.0, 2.5], [170, 1, 8.5]]


def test_loss_is_the_mean_of_the_last_quarter():
    lines = [line(step, 10, 1, loss=float(step)) for step in range(1, 9)]
    assert aggregate_metrics(lines)["loss"] == 7.5
    # not finite: not averaged away
    assert aggregate_metrics([*lines, line(9, 10, 1, loss=None)])["loss"] is None


def test_unequal_loss_of_an_equal_global_batch_is_flagged():
    def trial(name, micro, loss, samples=640, **settings):
        shape = {"batch.micro": micro, "batch.accumulation": 16 // micro}
        row = {
            "trial": name,
            "global": 16,
            "samples": samples,
            "settings": settings | shape,
            "loss": loss,
        }
        return row | {"error": None, "parent": None}

    rows = [
        *(trial("t1", 4, 1.0), trial("t2", 8, 1.019), trial("t3", 16, 1.03)),
        *(trial("t4", 8, 2.0, lr=0.5), trial("t5", 8, 3.0, samples=64), trial("t6", 2, None)),
    ]
    flag_unequal_losses(rows)
    assert [row["trial"] for row in rows if row["error"]] == ["t3"]
    assert rows[2]["error"].startswith(
        "training loss 1.030 instead of 1.000 of t1, which splits the same global batch"
    )


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
    assert (
        summarize_error(ValueError()) == "ValueError"
        and len(summarize_error(ValueError("x" * 1000))) == 240
    )


def row_with(micro, status="finished", auto=False, goal="memory"):
    """A row of a trial with micro-batches of 64 rows whose run ended with `micro`."""
    trial = Trial("t001", {"batch.micro": 64}, None, BatchShape(256, 64, 2, auto))
    lines = [
        line(step, 100, 0.1) | {"batch/micro": 64 if step == 1 else micro} for step in (1, 2, 3)
    ]
    return build_row(trial, TrialOutcome(status), goal, lines, elapsed_s=3.0)


def test_trial_with_reduced_micro_batch_is_out_of_memory():
    row = row_with(16)
    assert (row["status"], row["micro"], row["accumulation"]) == ("out_of_memory", 64, 2)
    assert "out of memory at micro-batch 64; the run continued with 16" in row["error"]
    assert row["elapsed_s"] == 3.0 and row["samples_per_s"] == 100
    assert select_best([row], "memory") is None


@pytest.mark.parametrize(
    ("micro", "status", "auto", "split"),
    [
        (64, "finished", False, (64, 2)),
        (16, "finished", True, (16, 8)),
        (64, "finished", True, (64, 2)),
        (16, "stopped", False, (64, 2)),  # run again
        # a learning goal: the loss does not depend on micro-batches
        (16, "finished", None, (16, 8)),
    ],
)
def test_other_trials_keep_their_status(micro, status, auto, split):
    row = row_with(micro, status, bool(auto), "loss" if auto is None else "memory")
    assert (row["status"], row["error"], (row["micro"], row["accumulation"])) == (
        status,
        None,
        split,
    )


def row(trial, size, rate, gib=1.0, loss=1.0, recall=0.5, status="finished", **changes):
    row = {
        "trial": trial,
        "status": status,
        "global": size,
        "peak_gib": gib,
        "recall_at_1": recall,
        "eval_loss": loss,
    }
    row |= {
        "rungs": [{"samples": 400, "value": loss}],
        "curve": [[100, 2 * loss, 1], [400, loss, 4]],
    }
    row |= {
        "quality_s": None,
        "samples_per_s": rate,
        "is_recipe": trial == "own",
        "parent": None,
        "settings": {},
    }
    return row | changes


@pytest.mark.parametrize(
    ("rows", "goal", "best", "why"),
    [
        (
            [row("a", 64, 10, gib=4), row("b", 64, 10, gib=2), row("c", 128, 10, gib=3)],
            *("memory", "b", "b has 2.00 GiB, the lowest of 3 trials."),
        ),
        (  # the faster one wins within two percent
            [row("a", 64, 10, gib=1.0), row("b", 64, 30, gib=1.01), row("c", 64, 90, gib=4)],
            *(
                "memory",
                "b",
                "b has 1.01 GiB, within 2% of the lowest (1.00 GiB of a), and is faster.",
            ),
        ),
        (
            [row("a", 64, 30, gib=2.0), row("b", 64, 20, gib=1.0)],
            *("throughput", "a", "a has 30 samples/s, the highest of 2 trials."),
        ),
        (  # the one with less memory wins within two percent
            [row("a", 64, 30, gib=2.0), row("b", 64, 29.9, gib=1.0), row("c", 64, 20, gib=0.5)],
            *("throughput", "b", "(30 samples/s of a), and needs less memory."),
        ),
        (
            [
                row("a", 64, 9, status="out_of_memory"),
                row("b", 64, 8, status="stopped"),
                row("c", 64, 5),
            ],
            *("memory", "c", "c has 1.00 GiB; no other trial was measured."),
        ),
        (
            [row("a", 64, 10, recall=None), row("b", 64, 9, recall=0.2)],
            "recall",
            "b",
            "recall@1 0.200; no other trial was trained",
        ),
        (
            [row("a", 64, 10, loss=2.0), row("b", 64, 30, loss=2.001), row("c", 64, 90, loss=2.5)],
            *(
                "loss",
                "a",
                "The recipe's own settings were not measured. Not certain: b is within 2% of it.",
            ),
        ),
        (
            [row(str(n), 64, 10) for n in range(6)],
            "loss",
            "0",
            "Not certain: 1, 2, 3 and 2 more are within 2% of it.",
        ),
    ],
)
def test_best_trial_and_its_reason(rows, goal, best, why):
    chosen = select_best(rows, goal)
    assert chosen["best"] == best and why in chosen["why"]


def test_best_is_chosen_per_global_batch_from_measured_trials():
    rows = [
        row("a", 64, 9, gib=2),
        row("b", 64, 9),
        row("c", 128, 9, gib=3),
        row("d", 128, 9, status="stopped"),
    ]
    assert select_best(rows, "memory")["per_global"] == {"64": "b", "128": "c"}
    assert select_best(rows[3:], "memory") is None
    assert select_best([row("a", 64, 10, recall=None) | {"rungs": []}], "recall") is None


OWN = " After 400 samples the recipe's own settings (own) have held-out loss 2.000 and best has"


@pytest.mark.parametrize(
    ("curve", "loss", "why"),
    [
        (
            [[100, 3.0, 1], [400, 1.0, 4]],
            1.0,
            "1.000; it reached their value after about 250 (38% fewer).",
        ),
        ([[400, 1.0, 4]], 1.0, "1.000."),  # not measured before
        (
            [[100, 9.0, 1], [400, 2.5, 4], [800, 1.5, 8]],
            2.5,
            "2.500; it reached their value after about 600.",
        ),
        ([[100, 9.0, 1], [400, 2.5, 4]], 2.5, "2.500; it never reached their value."),
    ],
)
def test_best_trial_is_compared_with_the_recipe_where_both_were_measured(curve, loss, why):
    best = row("best", 64, 10, curve=curve, loss=loss)
    best["rungs"].append({"samples": 800, "value": 0.5})
    assert (
        _against_recipe(best, [row("own", 64, 10, loss=2.0, status="pruned"), best], "loss")
        == f"{OWN} {why}"
    )


def test_recipe_itself_can_be_the_best():
    why = select_best([row("own", 64, 10), row("b", 64, 10, loss=9)], "loss")["why"]
    assert "These are the recipe's own settings: the search found none that are better." in why


def test_trial_of_a_population_names_those_that_it_continues():
    rows = [
        row("a", 64, 10, settings={"optimizer.lr": 1}),
        row("b", 64, 10, settings={"optimizer.lr": 2}, loss=0.5),
    ]
    rows[1]["parent"] = {"trial": "a", "samples": 100}
    assert (
        "It continues a (optimizer.lr=1) until 100 samples; best.yaml has its "
        "last" in select_best(rows, "loss")["why"]
    )


def test_time_to_quality_is_the_samples_to_the_loss_of_the_recipe_over_the_rate():
    """b needs more samples than a, but is four times as fast; c never reaches the target."""
    rows = [
        row("own", 64, 10, loss=2.0),
        row("a", 64, 10, loss=1.0),
        row("b", 256, 40, loss=1.5),
        row("c", 64, 90, loss=9),
    ]
    chosen = select_best(rows, "time-to-quality")
    assert chosen["best"] == "b" and rows[3]["quality_s"] is None
    assert [each["quality_s"] for each in rows[:3]] == [
        40.0,
        10.0,
        (100 + 300 * (3 - 2) / 1.5) / 40,
    ]


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
    rows = [
        row("own", 64, 10, loss=2.0, status="stopped"),
        row("t002", 64, 10, loss=1.0, status="pruned"),
    ]
    rows[1]["rungs"] = [{"samples": 100, "value": 1.0}]
    chosen = select_best(rows, "loss")
    assert chosen["best"] == "own" and "It has 400 samples only." in chosen["why"]


def test_value_of_a_rung_is_the_newest_held_out_metric_or_the_reason_why_there_is_none():
    lines = [
        {"evaluate/loss": 2.0},
        {"evaluate/loss": 1.0, "evaluate/recall_at_1/mean": 0.25},
        {"train/loss": 3.0},
    ]
    assert rung_value(lines, "loss") == rung_value(lines, "time-to-quality") == 1.0
    assert rung_value(lines, "recall") == 0.25
    assert "was not measured; use another --goal" in rung_value(lines[:1], "recall")
    assert rung_value([{"evaluate/loss": None}], "loss") == "evaluate/loss is not finite"
    assert rung_value([line(4, 100, 0.1)], "memory") == 0.4
