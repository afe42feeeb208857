"""Search space of `--space key=values`: each random draw is combined with every point of the grid."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from mmray.config import LENGTHS, Config
from mmray.errors import UsageError

_RANGE = re.compile(r"(uniform|loguniform)\(([^,]+),([^,]+)\)")
_COMMA = re.compile(r",(?![^\[]*\])")  # not inside [ ]


@dataclass(frozen=True)
class Range:
    """Uniform or log-uniform distribution between two bounds."""

    low: float
    high: float
    log: bool

    def sample(self, rng: random.Random) -> float:
        """Sample a value, rounded to four digits to keep recipes readable."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = rng.uniform(low, high)
        return float(f"{math.exp(value) if self.log else value:.4g}")


@dataclass(frozen=True)
class Space:
    """Searched settings in the order given: {`section.field`: listed values or a range}."""

    axes: dict[str, tuple[Any, ...] | Range]
    num_samples: int = 1  # from the ranges
    seed: int = 0

    def combinations(self) -> list[dict[str, Any]]:
        """Return each combination as {`section.field`: value}; the last axis changes fastest."""
        rng = random.Random(self.seed)
        ranges = {key: axis for key, axis in self.axes.items() if isinstance(axis, Range)}
        listed = {key: axis for key, axis in self.axes.items() if not isinstance(axis, Range)}
        samples = [{key: axis.sample(rng) for key, axis in ranges.items()} for _ in range(self.num_samples)]
        grid = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
        return [{key: (sample | lists)[key] for key in self.axes} for sample in samples for lists in grid]


def parse_space(given: Sequence[str], num_samples: int | None = None, seed: int = 0) -> Space:
    """Parse `key=v1,v2` and `key=loguniform(low,high)`. Raises UsageError."""
    axes: dict[str, str] = {}
    for text in given:
        key, equals, values = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals or not key or not values.strip():
            raise UsageError(f"--space {text}: write a setting and its values, as in --space batch.micro=8,16,32")
        if key in axes:
            raise UsageError(f"--space {key} is given twice; list its values after one `=`, with commas")
        axes[key] = values.strip()
    return build_space(axes, num_samples, seed)


def build_space(given: Mapping[str, str | Sequence[Any]], num_samples: int | None = None, seed: int = 0) -> Space:
    """Return the space of settings with their listed values, or text as after `=` in `--space`. Raises UsageError."""
    axes: dict[str, tuple[Any, ...] | Range] = {}
    for key, values in given.items():
        if key in LENGTHS:
            raise UsageError(f"--space {key}: every trial trains as many samples, so a sweep has one length: --{key} N")
        if key.startswith(("run.", "cluster.address")) or key == "recipe":
            raise UsageError(f"--space {key}: it belongs to the whole sweep; give it once, as --{key} VALUE")
        axes[key] = _parse_axis(key, values) if isinstance(values, str) else _checked_values(key, values)
    if not axes:
        raise UsageError("nothing to search: give at least one --space, as in --space batch.micro=8,16,32")
    has_ranges = any(isinstance(axis, Range) for axis in axes.values())
    if has_ranges != (num_samples is not None):
        raise UsageError("--samples N is the number of draws from a range: give both, or neither")
    return Space(axes, num_samples or 1, seed)


def override_settings(base: Config, settings: dict[str, Any]) -> Config:
    """Return `base` with these settings changed and validated. Raises UsageError."""
    values = base.model_dump(mode="json", by_alias=True)
    for key, value in settings.items():
        *sections, name = key.split(".")
        group = values
        for section in sections:
            group = group.setdefault(section, {})
            if not isinstance(group, dict):
                raise UsageError(f"{key}: `{section}` is one setting, not a group of them")
        group[name] = value
    return Config.model_validate(values)


def setting_value(config: Config, key: str) -> Any:
    """Return the value of `section.field` as JSON data."""
    value: Any = config.model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        value = value[part]
    return value


def _checked_values(key: str, given: Sequence[Any]) -> tuple[Any, ...]:
    values = tuple(given)
    if not values or "" in values or any(values.count(value) > 1 for value in values):
        listed = ",".join(map(str, values))
        raise UsageError(f"--space {key}={listed}: a value is empty, or listed twice")
    return values


def _parse_axis(key: str, text: str) -> tuple[Any, ...] | Range:
    match = _RANGE.fullmatch(text)
    if match is None:
        items = [item.strip() for item in _COMMA.split(text)]  # text, `None`, or a list in brackets
        values = [yaml.safe_load(item) if item.startswith("[") else None if item == "None" else item for item in items]
        return _checked_values(key, values)
    try:
        low, high, log = float(match[2]), float(match[3]), match[1] == "loguniform"
    except ValueError:
        low = high = math.nan
    if not low < high or (log and low <= 0):
        raise UsageError(f"--space {key}={text}: the bounds must be numbers, low < high, above 0 for loguniform")
    return Range(low, high, log)
