"""Waiting for a state that another thread or process brings about."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], limit_s: float = 60.0, pause_s: float = 0.01
) -> None:
    """Poll until `condition()` is true; after the limit, which only ends a broken test, fail."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {limit_s:g} s"
        time.sleep(pause_s)
