"""While data is prepared, which may take hours: one worker tries the model, so that a mistake shows early.

course.py listens through it. What trains rehearses again at its start, in full; here a run is given up only for what
would end it there as well. So there is no trial where too little is known before the data is, none on another kind of
device than the run's, and none of a run that may go on with what it has; and memory is not judged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from mmray.cluster import placement
from mmray.config import Config
from mmray.data.text.chat import encoder_of, fitted, language_token_of
from mmray.data.text.tokenizer import declared_pad_id, load_tokenizer
from mmray.errors import MmrayError, OutOfMemoryError
from mmray.train import run_dir
from mmray.train.coordinator import Listener
from mmray.train.resources import demand_of

if TYPE_CHECKING:
    from mmray.data.prepare.pipeline import Progress

AFTER_S = 10.0  # a prepare that takes less is over before a worker has imported torch
FEW_TOKENS = 64  # of a tokenizer that is still to be trained
CLOSING_S = 5.0  # for a trial that is just beginning when the prepare is over


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
        self._where = ""
        self._over = False

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
            self._due.join(CLOSING_S)
        if self._trial is not None and not self._over:
            self._over = True
            with suppress(ray.exceptions.RayError, ValueError):  # Ray has gone, and the trial with it
                ray.cancel(self._trial, force=True)

    def _begin(self) -> None:
        """In the timer's thread: start a trial, where there can be one."""
        with suppress(MmrayError, ray.exceptions.RayError, OSError):  # what it is shows when the run comes to it
            asked, place = known(self._config), free_place(self._config)
            if asked is not None and place is not None:
                self._where = "a GPU" if "num_gpus" in place else "a CPU"
                self._trial = _try.options(**place).remote(asked, "num_gpus" in place)

    def _judge(self) -> None:
        try:
            error, took_s = ray.get(self._trial)
        except ray.exceptions.RayError as lost:  # its worker died, or the user's own module raised
            self.note(f"the model could not be tried beforehand: {str(lost).splitlines()[-1]}", "rehearsed")
            return
        if error is None:
            self.note(f"a step on made-up rows passed the model, on {self._where} in {took_s:.0f} s", "rehearsed")
        elif isinstance(error, OutOfMemoryError):  # alone, uncut, beside a prepare: the run has other room
            self.note(f"a step on made-up rows had no room on {self._where}: {error}", "rehearsed")
        else:
            raise error


def known(config: Config) -> Config | None:
    """The config as any worker of the cluster reads it; None where what the model is hangs on the data, or on a run.

    Raises MmrayError for a tokenizer that is not there.
    """
    spec, inputs = config.model, config.model.inputs
    if getattr(spec, "regions", False) or next(run_dir.paths(config)).exists():
        return None  # a head whose labels the data names; a run that is there brings its own architecture
    if not spec.vocab_size and inputs.tokenizer == "trained" and _has_weights(spec.model_dump()):
        return None  # theirs and the tokenizer's tokens have to agree
    return config.replace(model=spec.with_absolute_weights().with_tokens(*_tokens(inputs)))


def _has_weights(values: dict[str, Any]) -> bool:
    named = values.get("weights", "none") != "none"
    return named or any(_has_weights(value) for value in values.values() if isinstance(value, dict))


def _tokens(inputs: Any) -> tuple[int, int | None]:
    """How many tokens there are, and which of them the tokenizer says it pads with."""
    if inputs.tokenizer == "trained":
        return FEW_TOKENS, 0
    tokenizer_json = load_tokenizer(inputs.tokenizer, None)
    if language_token_of(inputs):  # which languages there are, the data knows: a few more at most
        inputs = inputs.replace(language_token="")
    return int(encoder_of(fitted(tokenizer_json, inputs), inputs).vocab_size), declared_pad_id(tokenizer_json)


def free_place(config: Config) -> dict[str, Any] | None:
    """Options of a Ray task where the run's workers will be; None where they want GPUs and none is free now.

    A GPU's trial asks for no CPU: those are with the prepare, and for one more a cluster might start a node.
    """
    demand = demand_of(config, with_data=False)
    selector = {"label_selector": dict(demand.worker_labels)} if demand.worker_labels else {}
    if "GPU" not in demand.per_worker:
        return {"num_cpus": 1, **selector}
    free = [node for node in placement.free_nodes() if node.bears(demand.worker_labels)]
    if not any(node.resources.get("GPU", 0) >= 1 for node in free):
        return None
    return {"num_cpus": 0, "num_gpus": 1, **selector}


@ray.remote(max_retries=0, max_calls=1)  # a process of its own, which leaves nothing on a GPU
def _try(config: Config, on_gpu: bool) -> tuple[MmrayError | None, float]:
    """What is wrong with the model, if anything, and how long that took to find out in seconds."""
    from mmray.engine.dry_run import try_alone  # late: the driver imports this module, and needs no engine

    began_s = time.monotonic()
    try:
        try_alone(config, on_gpu)
    except MmrayError as error:
        return error, 0.0
    return None, time.monotonic() - began_s
