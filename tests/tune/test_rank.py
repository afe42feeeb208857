"""The recommendation: within each global batch, overall, and its explanation."""

import math

from mmray.tune.results import select_best


def row(trial, size, rate, gib=1.0, loss=1.0, recall=0.5, status="finished", spread=0.01):
    return {
        "trial": trial,
        "status": status,
        "global": size,
        "samples_per_s": rate,
        "samples_per_s_min": rate * (1 - spread),
        "samples_per_s_max": rate * (1 + spread),
        "peak_gib": gib,
        "loss": loss,
        "recall_at_1": recall,
    }


def test_fastest_is_ranked_per_global_batch_and_overall():
    rows = [row("t001", 64, 100), row("t002", 64, 120), row("t003", 128, 300), row("t004", 128, 200)]
    found = select_best(rows, "throughput", True)
    assert (found["best"], found["per_global"]) == ("t003", {"64": "t002", "128": "t003"})
    assert found["why"] == "t003 has the most samples/s of 4 trials: 300 samples/s."


def test_lower_memory_wins_within_two_percent():
    rows = [row("t001", 64, 100, gib=8), row("t002", 64, 99, gib=4), row("t003", 64, 97, gib=1)]
    found = select_best(rows, "throughput", True)
    assert found["best"] == "t002"
    assert found["why"].startswith(
        "t002 is within 2% of the most samples/s (99 samples/s; t001: 100 samples/s) and uses less memory "
        "(4.00 GiB; t001: 8.00 GiB)."
    )


def test_rival_within_the_spread_is_named():
    rows = [row("t001", 64, 100, spread=0.2), row("t002", 64, 90)]
    assert "90 samples/s is within the range of 80 to 120" in select_best(rows, "throughput", True)["why"]
    assert "may be as fast" not in select_best([row("t001", 64, 100), row("t002", 64, 90)], "throughput", True)["why"]


def test_unfinished_trial_is_never_best():
    rows = [row("t001", 64, 900, status="out_of_memory"), row("t002", 64, 800, status="stopped"), row("t003", 64, 5)]
    assert select_best(rows, "throughput", True)["best"] == "t003"
    assert select_best(rows, "throughput", True)["why"] == "t003 is the only trial that finished: 5 samples/s."
    assert select_best(rows[:2], "throughput", True) is None


def test_unmeasured_goal_has_no_best():
    rows = [row("t001", 64, 10, recall=None), row("t002", 64, 9, recall=0.2)]
    assert select_best(rows, "recall", True)["best"] == "t002"
    assert select_best(rows[:1], "recall", True) is None


def test_contrastive_losses_of_different_global_batches_are_compared_below_chance():
    """2.0 for 64 rows is 2.16 nats below chance; 1.9 for 16 rows, though smaller, is only 0.87 below."""
    rows = [row("t001", 16, 10, loss=1.9), row("t002", 64, 10, loss=2.0), row("t003", 64, 10, loss=2.5)]
    found = select_best(rows, "loss", relative_to_chance=True)
    assert (found["best"], found["per_global"]) == ("t002", {"16": "t001", "64": "t002"})
    assert f"{math.log(64) - 2.0:.2f} nats below chance" in found["why"]
    assert select_best(rows, "loss", relative_to_chance=False)["best"] == "t001"


def test_equal_losses_of_one_global_batch_are_decided_by_speed():
    rows = [row("t001", 64, 10, loss=2.0), row("t002", 64, 30, loss=2.001), row("t003", 64, 90, loss=2.5)]
    assert select_best(rows, "loss", True)["best"] == "t002"


def test_memory_goal_picks_the_lowest():
    rows = [row("t001", 64, 10, gib=1.0), row("t002", 64, 30, gib=1.01), row("t003", 64, 90, gib=4)]
    assert select_best(rows, "memory", True)["best"] == "t002"
