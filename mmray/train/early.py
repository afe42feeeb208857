"""While data is prepared, which may take hours: one worker tries the model, so that a mistake shows in seconds.

course.py listens through it. What trains rehearses again at its start, with the batch it will have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from mmray.cluster import nodes
from mmray.config import Config
from mmray.errors import MmrayError, OutOfMemoryError
from mmray.train.board import Listener
from mmray.train.resources import demand_of

if TYPE_CHECKING:
    from mmray.data.prepare import Progress

AFTER_S = 10.0  # a prepare that takes less is over before a worker has imported torch


@contextmanager
def tried_meanwhile(config: Config, listener: Listener, after_s: float = AFTER_S) -> Iterator[Listener]:
    """The listener, with a trial of the model beside a prepare that it is told of.

    A trial that finds a mistake ends the prepare: the error comes out of `preparing`. What is prepared stays so.
    """
    early = _Early(config, listener, after_s)
    try:
        yield early
    finally:
        early.close()


class _Early:
    """A listener before the one it is given."""

    def __init__(self, config: Config, listener: Listener, after_s: float) -> None:
        self.note, self.phase, self.step = listener.note, listener.phase, listener.step
        self._config, self._listener = config, listener
        self._due = threading.Timer(after_s, self._begin)
        self._due.daemon = True
        self._trial: Any = None
        self._on_gpu = self._as_trained = False
        self._over = getattr(config.model, "regions", False)  # a head whose labels the data names

    def preparing(self, progress: Progress) -> None:
        """Tell of it, and look whether a trial has ended. Raises MmrayError."""
        self._listener.preparing(progress)
        if self._over:
            return
        if self._due.ident is None:
            self._due.start()
        elif self._trial is not None and ray.wait([self._trial], timeout=0)[0]:
            self._over = True
            self._judge()

    def close(self) -> None:
        """End a trial that is not over: the run itself begins, and rehearses."""
        if self._due.ident is not None:
            self._due.cancel()
            self._due.join()
        if self._trial is not None and not self._over:
            ray.cancel(self._trial, force=True)

    def _begin(self) -> None:
        self._on_gpu, self._as_trained, labels = _places(self._config)
        options = {"num_gpus": 1} if self._on_gpu else {}
        selector = {"label_selector": labels} if self._on_gpu and labels else {}
        self._trial = _try.options(num_cpus=1, **options, **selector).remote(self._config, self._on_gpu)

    def _judge(self) -> None:
        where = "a GPU" if self._on_gpu else "a CPU"
        try:
            error, took_s = ray.get(self._trial)
        except ray.exceptions.RayError as lost:  # its worker died, or the model is at odds with this one place
            self.note(f"the model could not be tried on {where} beforehand: {str(lost).splitlines()[-1]}", "rehearsed")
            return
        if error is None:
            self.note(f"a step on made-up rows passed the model, on {where} in {took_s:.0f} s", "rehearsed")
        elif self._as_trained or not isinstance(error, OutOfMemoryError):
            raise error


def _places(config: Config) -> tuple[bool, bool, dict[str, str]]:
    """Whether the trial gets a GPU (none is started for it), whether it is then where the run will be, and labels."""
    demand = demand_of(config, with_data=False)
    free = [node for node in nodes.free_nodes() if node.bears(demand.worker_labels)]
    wanted = "GPU" in demand.per_worker
    on_gpu = wanted and any(node.resources.get("GPU", 0) >= 1 for node in free)
    return on_gpu, on_gpu == wanted, dict(demand.worker_labels)


@ray.remote(max_retries=0)
def _try(config: Config, on_gpu: bool) -> tuple[MmrayError | None, float]:
    """What is wrong with the model, if anything, and how long that took to find out in seconds."""
    from mmray.train.rehearsal import try_alone  # late: the driver imports this module, and needs no engine

    began_s = time.monotonic()
    try:
        try_alone(config, on_gpu)
    except MmrayError as error:
        return error, 0.0
    return None, time.monotonic() - began_s
