"""Settings of trials: a grid, or random draws."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
from ray import tune

from mmray.config import Config
from mmray.config.search_space import Range, Space, override_settings, round_sampled, setting_value


def tune_space(base: Config, space: Space) -> dict[str, Any]:
    """Convert a search space to domains of Ray Tune.

    Args:
        base: The recipe; a setting that is an integer in it gets integers only.
        space: Lists and ranges by setting.

    Returns:
        By setting: `tune.choice`, `tune.uniform`, `tune.loguniform`, `tune.randint` or
        `tune.lograndint`.
    """
    domains: dict[str, Any] = {}
    for key, axis in space.axes.items():
        if not isinstance(axis, Range):
            domains[key] = tune.choice(list(axis))
        elif isinstance(setting_value(override_settings(base, {key: axis.low}), key), int):
            draw_integer = tune.lograndint if axis.log else tune.randint
            domains[key] = draw_integer(round(axis.low), round(axis.high) + 1)
        else:
            draw = tune.loguniform if axis.log else tune.uniform
            domains[key] = draw(axis.low, axis.high)
    return domains


def random_settings(base: Config, space: Space) -> list[dict[str, Any]]:
    """Return the settings of all trials: those that `starting_points` returns, then random ones.

    Without ranges and without a number of samples, it is the grid of all listed values. A number of
    samples takes random combinations of the grid. A larger number of samples keeps the ones of a
    smaller number.

    Args:
        space: Lists and ranges by setting, number of samples and seed.

    Returns:
        Value by setting of each trial, such as [{"optimizer.lr": 0.001}].
    """
    points = starting_points(base, space)
    if space.has_ranges:
        rng = np.random.RandomState(space.seed)
        domains = tune_space(base, space).items()
        draws = range(space.num_trials - len(points))
        drawn = [
            {key: _to_python(domain.sample(random_state=rng)) for key, domain in domains}
            for _ in draws
        ]
        return points + [space.round(settings) for settings in drawn]
    grid = [
        dict(zip(space.axes, values, strict=True))
        for values in itertools.product(*space.axes.values())  # type: ignore[arg-type]
    ]
    if space.num_samples is None:
        return grid
    random.Random(space.seed).shuffle(grid)
    others = [settings for settings in grid if settings not in points]
    return (points + others)[: space.num_trials]


def _to_python(value: object) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def starting_points(base: Config, space: Space) -> list[dict[str, Any]]:
    """Return the settings of the trials that are tried first; empty for a grid of listed values.

    They are the recipe's own, then other global batches with scaled learning rates: by the square
    root of the global batch (Malladi et al. 2022), then by the batch itself (Goyal et al. 2017).
    They are at most half of the samples, so that the others explore.

    Args:
        space: Lists and ranges by setting, and number of samples.

    Returns:
        Value by setting of each trial, such as [{"optimizer.lr": 0.001, "batch.global": 512}].
    """
    if space.num_samples is None:
        return []
    own = {key: setting_value(base, key) for key in space.axes}
    points = [own]
    lr_range = space.axes.get("optimizer.lr")
    own_size = own.get("batch.global")
    if isinstance(lr_range, Range) and own_size:
        sizes = _sizes_to_try(space.axes["batch.global"])
        sizes.sort(key=lambda size: abs(math.log(size / own_size)))
        for exponent in (0.5, 1.0):
            for size in sizes:
                lr = own["optimizer.lr"] * (size / own_size) ** exponent
                lr = round_sampled(float(min(max(lr, lr_range.low), lr_range.high)))
                points.append(own | {"batch.global": size, "optimizer.lr": lr})
    unique = [point for number, point in enumerate(points) if point not in points[:number]]
    inside = [point for point in unique if space.contains(point)]
    return inside[: max(1, space.num_samples // 2)]


def _sizes_to_try(axis: tuple[Any, ...] | Range) -> list[int]:
    if not isinstance(axis, Range):
        return list(axis)
    return [round(axis.low), round(math.sqrt(axis.low * axis.high)), round(axis.high)]
