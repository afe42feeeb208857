"""Search space of `--space key=values`: a grid of listed values, or values to sample from lists and
ranges.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mmray.config import LENGTHS, Config, override
from mmray.errors import UsageError

_RANGE = re.compile(r"(uniform|loguniform)\(([^,]+),([^,]+)\)")
_COMMA = re.compile(r",(?![^\[]*\])")  # not inside [ ]
DEFAULT_SAMPLES = 32  # configurations, if there is a range
MAX_CORNERS = 1000  # more are not checked before the first trial


@dataclass(frozen=True)
class Range:
    """Uniform or log-uniform distribution of a setting."""

    low: float
    high: float
    log: bool

    def __str__(self) -> str:
        return f"{'loguniform' if self.log else 'uniform'}({self.low:.15g}, {self.high:.15g})"


def round_sampled(value: object) -> Any:
    """Return a sampled float with four significant digits, to keep recipes readable.

    Other values, such as integers, are returned unchanged.
    """
    return float(f"{value:.4g}") if isinstance(value, float) else value


Axis = tuple[Any, ...] | Range  # listed values, or a range


@dataclass(frozen=True)
class Space:
    """Settings that a sweep searches.

    Attributes:
        axes: By setting, in the order given: its listed values, or a Range (`low`, `high`, `log`).
            An example is {"batch.micro": (8, 16)}.
        num_samples: Configurations to sample; None: the grid of the listed values.
        seed: Seed of the random choice of configurations.
    """

    axes: dict[str, Axis]
    num_samples: int | None = None  # configurations to sample; None: the grid of the listed values
    seed: int = 0

    @property
    def has_ranges(self) -> bool:
        """Whether any setting of the space has a range instead of listed values."""
        return any(isinstance(axis, Range) for axis in self.axes.values())

    @property
    def num_trials(self) -> int:
        """Number of configurations that a sweep tries: `num_samples`, but without ranges at most
        the number of combinations of the listed values.
        """
        grid = math.prod(len(axis) for axis in self.axes.values() if not isinstance(axis, Range))
        if self.num_samples is None:
            return grid
        return self.num_samples if self.has_ranges else min(self.num_samples, grid)

    def round(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Round the values that were sampled from ranges to four significant digits, such as
        {"optimizer.lr": 0.00123456}; listed values are unchanged.
        """
        return {
            key: round_sampled(value) if isinstance(self.axes[key], Range) else value
            for key, value in settings.items()
        }

    def contains(self, settings: dict[str, Any]) -> bool:
        """Return whether each value is listed or within the range of its setting.

        Args:
            settings: Value by searched setting, such as {"optimizer.lr": 0.001}.
        """
        for key, value in settings.items():
            axis = self.axes[key]
            if not isinstance(axis, Range):
                inside = value in axis
            else:
                inside = isinstance(value, int | float) and axis.low <= value <= axis.high
            if not inside:
                return False
        return True

    def corners(self) -> list[dict[str, Any]]:
        """Return the combinations of all listed values and both ends of each range.

        Returns:
            Value by setting of each combination, such as [{"batch.micro": 8, "optimizer.lr":
            1e-05}, ...]. The last setting changes fastest. At most the first 1000 are returned.
        """
        values = [
            (axis.low, axis.high) if isinstance(axis, Range) else axis
            for axis in self.axes.values()
        ]
        combinations = itertools.islice(itertools.product(*values), MAX_CORNERS)
        return [dict(zip(self.axes, each, strict=True)) for each in combinations]


def parse_axes(given: Sequence[str]) -> dict[str, str]:
    """Split the values of `--space` at the first `=`.

    Args:
        given: Texts such as `batch.micro=8,16`.

    Returns:
        Values as text by setting, such as {"batch.micro": "8,16"}.

    Raises:
        UsageError: A text has no setting or no values, or a setting is given twice.
    """
    axes: dict[str, str] = {}
    for text in given:
        key, equals, values = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals or not key or not values.strip():
            raise UsageError(
                f"--space {text}: write a setting and its values, as in --space batch.micro=8,16,32"
            )
        if key in axes:
            raise UsageError(
                f"--space {key} is given twice; list its values after one `=`, with commas"
            )
        axes[key] = values.strip()
    return axes


def build_space(
    given: Mapping[str, str | Sequence[Any]], num_samples: int | None = None, seed: int = 0
) -> Space:
    """Build a search space from lists of values and ranges.

    Args:
        given: For each setting a list of values, or a text such as `8,16`, `uniform(0,0.1)` or
            `loguniform(1e-5,1e-3)`. An example is {"batch.micro": [8, 16]}.
        num_samples: Number of configurations to sample; None: 32 if there is a range, otherwise all
            combinations.
        seed: Seed of the random choice of configurations.

    Returns:
        A Space: `axes` (the listed values or a Range, by setting), `num_samples` and `seed`.

    Raises:
        UsageError: A list or a range is invalid, or a setting cannot be searched.
    """
    axes: dict[str, Axis] = {}
    for key, values in given.items():
        if key in LENGTHS:
            raise UsageError(
                f"--space {key}: every trial trains as many samples, so a sweep has "
                f"one length: --{key} N"
            )
        if key.startswith(("run.", "cluster.address")) or key == "recipe":
            raise UsageError(
                f"--space {key}: it belongs to the whole sweep; give it once, as --{key} VALUE"
            )
        axes[key] = (
            _parse_axis(key, values) if isinstance(values, str) else _checked_values(key, values)
        )
    if not axes:
        raise UsageError(
            "nothing to search: give at least one --space, as in --space batch.micro=8,16,32"
        )
    space = Space(axes, num_samples, seed)
    if num_samples is None and space.has_ranges:
        return replace(space, num_samples=DEFAULT_SAMPLES)
    return space


def override_settings(base: Config, settings: dict[str, Any]) -> Config:
    """Return a config with some settings changed, such as {"optimizer.lr": 1e-3}, and all settings
    validated, as `override` does.

    Raises:
        UsageError: A setting is unknown or invalid.
    """
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        group = nested
        for section in sections:
            group = group.setdefault(section, {})
            if not isinstance(group, dict):
                raise UsageError(f"{key}: `{section}` is one setting, not a group of them")
        group[name] = value
    return override(base, nested)


def setting_value(config: Config, key: str) -> Any:
    """Return the value of a setting such as `optimizer.lr` as JSON data."""
    *sections, name = key.split(".")
    values = config.to_json()
    for section in sections:
        values = values[section]
    return values[name]


def _checked_values(key: str, given: Sequence[Any]) -> tuple[Any, ...]:
    values = tuple(given)
    if not values or "" in values or any(values.count(value) > 1 for value in values):
        listed = ",".join(map(str, values))
        raise UsageError(f"--space {key}={listed}: a value is empty, or listed twice")
    return values


def _parse_value(text: str) -> Any:
    """Return the value of a text, `None`, or a list in brackets."""
    if text.startswith("["):
        return yaml.safe_load(text)
    return None if text == "None" else text


def _parse_axis(key: str, text: str) -> Axis:
    match = _RANGE.fullmatch(text)
    if match is None:
        items = [item.strip() for item in _COMMA.split(text)]
        try:
            values = [_parse_value(item) for item in items]
        except yaml.YAMLError:
            raise UsageError(
                f"--space {key}={text}: a list must end with `]`, as in [0.9,0.98],[0.9,0.95]"
            ) from None
        return _checked_values(key, values)
    try:
        low = float(match[2])
        high = float(match[3])
        log = match[1] == "loguniform"
    except ValueError:
        low = high = math.nan
    if not low < high or (log and low <= 0):
        raise UsageError(
            f"--space {key}={text}: the bounds must be numbers, low < high, above 0 for loguniform"
        )
    return Range(low, high, log)
