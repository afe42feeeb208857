"""The wish for nodes that an elastic run could use beside those it has: told to the autoscaler, where there is one.

A group of fixed size asks by its placement group. What more workers would need nobody asks for: not the tasks, for none
waits. It goes through the actor by which Ray Data and Ray Train ask too, which adds the wishes up; what is asked for by
ray.autoscaler.sdk would be overwritten by it. A wish that is not made again expires: a driver that dies keeps no node.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from mmray.cluster.capacity import Labels, Resources

EXPIRES_S, AGAIN_S, ANSWER_S = 60.0, 15.0, 5.0


@dataclass
class AutoscalerRequest:
    """One run's wish, under `name`."""

    name: str
    _count: int = 0
    _asked_s: float = field(default=float("-inf"))

    def ask(self, unit: Resources, labels: Labels, count: int) -> None:
        """Wish for `count` places of `unit` on nodes with these labels; made again every 15 s at most, 0 ends it.

        An autoscaler that does not answer is asked again at the next call.
        """
        if count == 0:
            self.end()
            return
        if count == self._count and time.monotonic() - self._asked_s < AGAIN_S:
            return
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import ResourceRequestPriority

        self._count, self._asked_s = count, time.monotonic()
        self._tell(
            "request_resources",
            requester_id=self.name,
            resources=[dict(unit)] * count,
            label_selectors=[dict(labels)] * count if labels else None,
            expire_after_s=EXPIRES_S,
            priority=ResourceRequestPriority.HIGH,
        )

    def end(self) -> None:
        """Take the wish back."""
        if self._count:
            self._count = 0
            self._tell("cancel_request", requester_id=self.name)

    def _tell(self, what: str, **given: Any) -> None:
        # Internal to Ray 2.60, and the one way that Data's and Train's own wishes do not overwrite.
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        try:
            ray.get(getattr(get_or_create_autoscaling_coordinator(), what).remote(**given), timeout=ANSWER_S)
        except (ray.exceptions.RayError, TimeoutError):
            self._asked_s = float("-inf")
