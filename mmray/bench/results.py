"""What all benchmarks share: a comparison in ABBA order, and the machine of their results."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmray.machine import cores

if TYPE_CHECKING:
    import torch


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine of a measurement.

    Args:
        device: The device that is measured; None: the CPU.

    Returns:
        `cpu` (model), `cores` (available), `device` (name of the GPU, or `cpu`), `load_1min` (load
        average), `python` and `torch` (versions).
    """
    import torch  # Not above: processes that read rows import this module, and no torch.

    is_gpu = device is not None and device.type == "cuda"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0].strip() if names else platform.processor() or platform.machine(),
        "cores": cores(),
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def compare(
    arms: Mapping[str, Callable[[], dict[str, float]]],
    rounds: int,
    rate: str,
    ratios: Mapping[str, tuple[str, str]],
    notify: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure each arm (what is compared, such as a loop) once per round; every second round in
    reversed order.

    Args:
        arms: By name a function without arguments that measures an arm once and returns its values
            by name.
        rounds: Number of rounds.
        rate: Name of the value that is compared, such as `samples_per_s`.
        ratios: By name two arms, of whose rates the ratio is taken in each round.
        notify: Called with a line after each measurement.

    Returns:
        `ratios` (medians over the rounds, by name), `spread` (by ratio `min` and `max` over the
        rounds, and `pairs`, their number) and `rows`: of each arm its name as `arm`, the medians of
        its values, and the `lowest` and `highest` rate.
    """
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(list(arms)):
            values = arms[arm]()
            measured[arm].append(values)
            text = f"{values[rate]:,.1f} {title_of(rate)}"
            notify(f"round {number + 1} of {rounds}: {arm} {text}")
    rates = {arm: [values[rate] for values in runs] for arm, runs in measured.items()}
    rows = []
    for arm, runs in measured.items():
        medians = {name: statistics.median(values[name] for values in runs) for name in runs[0]}
        row = {"arm": arm, rate: medians[rate], "lowest": min(rates[arm])}
        rows.append(row | {"highest": max(rates[arm])} | medians)
    pairs = {
        name: [one / other for one, other in zip(rates[arm], rates[base], strict=True)]
        for name, (arm, base) in ratios.items()
    }
    return {
        "ratios": {name: statistics.median(values) for name, values in pairs.items()},
        "spread": {
            name: {"min": min(values), "max": max(values), "pairs": len(values)}
            for name, values in pairs.items()
        },
        "rows": rows,
    }


def title_of(name: str) -> str:
    """Return the title of a value, such as `samples/s` of `samples_per_s`."""
    return name.replace("_per_s", "/s").replace("_", " ")
