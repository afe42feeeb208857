"""Figures from arrivals: rates of a steady middle, gaps at an epoch's end, ratios of windows side by side.

Pure. An arrival is what a consumer saw: when a block of rows came, how many, and the last epoch among them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmray.bench.processes import spent_s

SKIP = 2  # first arrivals of a consumer that do not count: they were made while others started
OWN_SHARE = 0.75  # of what its slowest stage allows: a stream below that loses its time elsewhere


@dataclass(frozen=True)
class Arrival:
    """Rows that one consumer got at one moment (the machine's clock, in seconds)."""

    at_s: float
    rows: int
    epoch: int = 0
    num_bytes: int = 0


def rate(consumers: Sequence[Sequence[Arrival]], skip: int = SKIP) -> float:
    """Rows a second over all consumers, without what was ready before: each consumer's first `skip` arrivals."""
    return sum(_rate(arrivals[min(skip, max(0, len(arrivals) - 2)) :]) for arrivals in consumers)


def _rate(arrivals: Sequence[Arrival]) -> float:
    took_s = arrivals[-1].at_s - arrivals[0].at_s
    return sum(arrival.rows for arrival in arrivals[1:]) / took_s if took_s > 0 else 0.0


def cpu_s_per_row(
    consumers: Sequence[Sequence[Arrival]], history: list[tuple[float, dict[str, float]]], skip: int = SKIP
) -> dict[str, float] | None:
    """CPU seconds for a row by role of process, over the window that `rate` counts; None: too short to tell."""
    counted = [arrivals[min(skip, max(0, len(arrivals) - 2)) :] for arrivals in consumers]
    spent = spent_s(history, max(each[0].at_s for each in counted), min(each[-1].at_s for each in counted))
    if spent is None:
        return None
    roles, first_s, last_s = spent
    rows = sum(_rate(each) for each in counted) * (last_s - first_s)
    return {role: seconds / rows for role, seconds in roles.items()} if rows else None


def epoch_stall_s(consumers: Sequence[Sequence[Arrival]], skip: int = SKIP) -> float | None:
    """How much longer a consumer waits for a block that begins an epoch than for others: medians; None without one."""
    at_end: list[float] = []
    within: list[float] = []
    for arrivals in consumers:
        for before, after in zip(arrivals[skip:], arrivals[skip + 1 :], strict=False):
            (within if before.epoch == after.epoch else at_end).append(after.at_s - before.at_s)
    if not at_end or not within:
        return None
    return max(0.0, statistics.median(at_end) - statistics.median(within))


def ratios(rounds: Sequence[Mapping[str, float]], named: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    """{name: median, min, max, pairs} of arm : arm, each pair from one round, where both were measured."""
    out = {}
    for name, (over, under) in named.items():
        found = [each[over] / each[under] for each in rounds if each.get(over) and each.get(under)]
        if found:
            spread = {"min": round(min(found), 4), "max": round(max(found), 4), "pairs": len(found)}
            out[name] = {"median": round(statistics.median(found), 4), **spread}
    return out


def order(arms: Sequence[str], turn: int) -> list[str]:
    """The arms of one round: forwards, then backwards, so that a machine that grows slower favours none (ABBA)."""
    return list(arms) if turn % 2 == 0 else list(reversed(arms))


def bottleneck(limits: Mapping[str, float], stream: float) -> str:
    """Name of the stage that lets the fewest rows a second through; the stream's own where it stays far below all."""
    slowest = min(limits, key=lambda name: limits[name])
    return slowest if stream >= OWN_SHARE * limits[slowest] else "the stream itself (Ray, and copies of blocks)"


def workers_for(gpu_rate: float, rate_of_all: float, workers: int) -> int:
    """CPU workers that feed a device of `gpu_rate` rows a second, where `workers` of them gave `rate_of_all`."""
    return math.ceil(gpu_rate / (rate_of_all / workers))
