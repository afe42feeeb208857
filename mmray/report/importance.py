"""Importance of searched settings, with a permutation test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmray.report.sweep import SweepRecord

MIN_TRIALS = 8  # of fewer, no order of the results is significant
NUM_PERMUTATIONS = 2000
SIGNIFICANCE = 0.05  # of all settings together
TRIALS_PER_GROUP, MAX_GROUPS = 3, 4  # of a setting with many values


class Importance(NamedTuple):
    """Share of the variance of the trials' ranks that a setting explains, with the share that
    chance explains.

    `by_chance`: the 95th percentile of the share if the results are shuffled; `p`: how often
    shuffled ones reach it.
    """

    setting: str
    share: float
    by_chance: float
    p: float


def rank_settings(sweep: SweepRecord) -> tuple[list[Importance], str]:
    """Return the importance of the settings of a learning goal, and a sentence.

    Trials are compared at the first rung, which all reach; one whose loss was not finite counts as
    the worst.
    """
    if not sweep.is_learning:
        return [], ""
    worst = -np.inf if sweep.goal.maximize else np.inf
    values = [
        (trial.settings, trial.rung_values[0] if trial.rung_values else worst)
        for trial in sweep.trials
        if trial.values.get("parent") is None  # others have the first rung of their parent
        if trial.rung_values or "not finite" in str(trial.value("error"))
    ]
    found = importance([settings for settings, _ in values], [value for _, value in values])
    return found, explain(found, len(values))


def importance(settings: Sequence[dict[str, Any]], results: Sequence[float]) -> list[Importance]:
    """Return each setting with two or more values, the most important first; empty for too few
    trials.

    The share is eta squared of an analysis of variance of ranks (Kruskal & Wallis 1952) over the
    values of the setting; many values are grouped by size, so that an optimum inside a range counts
    too. A permutation test gives its distribution without the setting's influence, which is far
    from zero for few trials.
    """
    if len(results) < MIN_TRIALS:
        return []
    ranks = _ranks(np.asarray(results, dtype=np.float64))
    ranks -= ranks.mean()
    total = float(ranks @ ranks)
    if total == 0:
        return []
    rng = np.random.default_rng(0)
    shuffled = rng.permuted(np.tile(ranks, (NUM_PERMUTATIONS, 1)), axis=1)
    found = []
    for name in dict.fromkeys(name for each in settings for name in each):
        # [trials, groups], 1.0 for a member
        members = _groups([each.get(name) for each in settings])
        if members.shape[1] < 2:
            continue
        shares = ((np.vstack([ranks, shuffled]) @ members) ** 2 / members.sum(0)).sum(1) / total
        p = float((shares >= shares[0] - 1e-9).mean())  # the real order is one of the possible ones
        found.append(
            Importance(name, float(shares[0]), float(np.quantile(shares[1:], 1 - SIGNIFICANCE)), p)
        )
    return sorted(found, key=lambda each: -each.share)


def explain(found: Sequence[Importance], num_trials: int) -> str:
    """Return a sentence about the settings that explain more than chance does."""
    if not found:
        return ""
    better = [each for each in found if each.p <= SIGNIFICANCE / len(found)]  # Bonferroni
    if not better:
        return (
            f"No setting explains the differences between the {num_trials} trials better than "
            "chance."
        )
    parts = [f"{each.setting} explains {each.share:.0%} (p = {each.p:.2g})" for each in better]
    others = (
        "" if len(better) == len(found) else (" No other setting explains more than chance would.")
    )
    return (
        f"Of the differences in rank between the {num_trials} trials, "
        f"{' and '.join(parts)}.{others}"
    )


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1; equal values have their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def _groups(values: Sequence[Any]) -> NDArray[np.float64]:
    """Return the members of the groups of equal values, or of numbers of similar size, as columns
    of 0 and 1.
    """
    texts, labels = np.unique([json.dumps(value) for value in values], return_inverse=True)
    most = min(MAX_GROUPS, max(2, len(values) // TRIALS_PER_GROUP))
    if len(texts) > most and all(isinstance(value, int | float) for value in values):
        labels = ((_ranks(np.asarray(values, dtype=np.float64)) - 0.5) * most / len(values)).astype(
            int
        )
    return np.eye(len(values))[labels][:, np.unique(labels)]
