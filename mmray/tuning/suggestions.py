"""The settings of trials: a grid, random draws or suggestions of Optuna, none of them twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

from mmray.config import Config
from mmray.config.search_space import Range, Space, override_settings, round_sampled, setting_value
from mmray.tuning.trials import starting_points

MAX_REPEATS = 1000  # draws in a row that were drawn before; then a space of lists has no more


def tune_space(base: Config, space: Space) -> dict[str, Any]:
    """Return what Ray Tune samples from; ranges of integer settings are integer."""
    domains: dict[str, Any] = {}
    for key, axis in space.axes.items():
        if not isinstance(axis, Range):
            domains[key] = tune.choice(list(axis))
        elif _is_integer(base, key, axis):
            domains[key] = (tune.lograndint if axis.log else tune.randint)(
                round(axis.low), round(axis.high) + 1
            )
        else:
            domains[key] = (tune.loguniform if axis.log else tune.uniform)(axis.low, axis.high)
    return domains


def _is_integer(base: Config, key: str, axis: Range) -> bool:
    """Return whether a range is of integers, also if the recipe has `auto` or nothing."""
    value = setting_value(base, key)
    if isinstance(value, int | float) or int(axis.high) != axis.high:
        return isinstance(value, int)
    return isinstance(setting_value(override_settings(base, {key: int(axis.high)}), key), int)


def distinct_settings(
    base: Config, space: Space, first: list[dict[str, Any]], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield `first`, then random draws, none twice, until all listed values were drawn; a grid for
    lists alone.
    """
    if space.num_samples is None:
        for values in itertools.product(
            *(axis for axis in space.axes.values() if not isinstance(axis, Range))
        ):
            yield dict(zip(space.axes, values, strict=True))
        return
    rng, domains, seen, repeats = (
        np.random.RandomState(seed),
        tune_space(base, space),
        set[str](),
        0,
    )
    points, ranges = (
        iter(first),
        [key for key, axis in space.axes.items() if isinstance(axis, Range)],
    )
    while repeats < MAX_REPEATS:
        draw = next(points, None) or {
            key: domain.sample(random_state=rng) for key, domain in domains.items()
        }
        settings = {key: _plain(value) if key in ranges else value for key, value in draw.items()}
        repeats += 1
        if (text := json.dumps(settings)) not in seen:
            seen.add(text)
            repeats = 0
            yield settings


def _plain(value: Any) -> Any:
    """Return a sampled number, maybe of numpy, as a rounded one of Python."""
    return round_sampled(value.item() if isinstance(value, np.generic) else value)


class DistinctOptuna(OptunaSearch):
    """Optuna's TPE; repeated suggestions are replaced by random settings."""

    def __init__(
        self, points: list[dict[str, Any]], others: list[dict[str, Any]], seed: int
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        super().__init__(points_to_evaluate=points, seed=seed)
        self._others, self._seen = others, set[str]()

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Ignore a report without a metric, such as that of the start of a trial's workers."""
        if self.metric in result:
            super().on_trial_result(trial_id, result)

    def suggest(self, trial_id: str) -> Any:
        """Return new settings, or FINISHED if there are no more."""
        from optuna.trial import TrialState

        study: Any = self._ot_study
        while True:
            settings: Any = super().suggest(trial_id)
            text = json.dumps({key: round_sampled(value) for key, value in settings.items()})
            if text not in self._seen:
                self._seen.add(text)
                return settings
            # without effect on others
            study.tell(self._ot_trials.pop(trial_id), state=TrialState.FAIL)
            if not self._others:
                return self.FINISHED
            study.enqueue_trial(self._others.pop(0))


def build_optuna(
    base: Config, space: Space, earlier: list[dict[str, Any]], num_concurrent: int
) -> ConcurrencyLimiter:
    """Return Ray Tune's searcher that tries the settings of earlier commands first."""
    points = earlier + [each for each in starting_points(base, space) if each not in earlier]
    # otherwise it would repeat the random draws of an earlier command
    seed = space.seed + len(earlier)
    # each trial needs a new one; the others are repeated ones
    count = 2 * (space.num_samples or 0) + len(earlier)
    others = list(itertools.islice(distinct_settings(base, space, [], seed), count))
    return ConcurrencyLimiter(DistinctOptuna(points, others, seed), num_concurrent)
