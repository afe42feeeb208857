"""Trials of a sweep on Ray Tune: the trial function, the tuner thread and its events.

A trial reports {"now": progress and metrics} while it runs and {"ended": its outcome} at the end.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any

from ray import tune

from mmray.cluster.ray_internals import HEAD_RESOURCE
from mmray.config import Config
from mmray.errors import ForceExit, TrainingError
from mmray.train.driver import train
from mmray.train.monitor import signal_handlers
from mmray.train.worker_group import run_in_thread
from mmray.tune.results import TrialOutcome, outcome_of
from mmray.tune.sweep_state import SweepState

Report = Callable[[dict[str, Any]], Any]

FIGURES = {
    "samples_per_s": "throughput/samples_per_s",
    "step_p50_s": "time/step_p50_s",
    "step_p95_s": "time/step_p95_s",
    "peak_gib": "memory/peak_gib",
    "loss": "train/loss",
}


def run_trial(config: Config, report: Report) -> None:
    """Train `config` and report the outcome; a failure is reported instead of raised."""
    began_s = time.monotonic()
    try:
        train(config, _Reporting(report))
        ended = TrialOutcome("finished", None, time.monotonic() - began_s)
    except Exception as error:  # noqa: BLE001 - any error is the outcome of this trial only
        ended = outcome_of(error, time.monotonic() - began_s)
    report({"ended": asdict(ended)})


class _Reporting:
    """ProgressReporter of a trial: reports status and metrics to Ray Tune."""

    def __init__(self, report: Report):
        self.report = report

    def log(self, text: str, label: str = "") -> None:
        """Ignored: the sweep logs it once for all trials."""

    def prepare_progress(self, progress: Any) -> None:
        """Ignored: data is prepared before the first trial."""

    def status(self, title: str) -> None:
        self.report({"now": {"doing": title}})

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        figures = {name: metrics[key] for name, key in FIGURES.items() if metrics.get(key) is not None}
        self.report({"now": {"doing": f"step {metrics['step']:,}/{total_steps:,}"} | figures})


# The driver of a trial runs on the head node and requests no CPU, because a small machine needs all of them for data.
_DRIVER = {HEAD_RESOURCE: 0.001}


def run_trials(running: SweepState, runs: dict[str, Config], at_once: int) -> None:
    """Run Ray Tune in a thread; this thread redraws the table and handles signals. Each started trial gets a row."""
    news: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
    for name in runs:
        running.folder.clear_trial(name)
    scratch = running.folder.path / "ray"
    shutil.rmtree(scratch, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(_trial, configs=runs), _DRIVER),
        param_space={"trial": tune.grid_search(list(runs))},
        # Actors are reused because importing torch takes several seconds.
        tune_config=tune.TuneConfig(max_concurrent_trials=at_once, reuse_actors=True),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(scratch),
            verbose=0,
            stop=_Stopper(running.stop),
            callbacks=[_QueueCallback(news)],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    with _handle_signals(running):
        gave_up = run_in_thread(partial(_fit, tuner), partial(_drain_events, running, news))
    for name in list(running.live):
        running.end(name, TrialOutcome("stopped"))
    shutil.rmtree(scratch, ignore_errors=True)
    if gave_up is not None:
        raise TrainingError(f"Ray Tune failed: {gave_up}") from gave_up


def _fit(tuner: tune.Tuner) -> Exception | None:
    """Run Ray Tune; return an error instead of raising it, so that rows are written first."""
    try:
        tuner.fit()
    except Exception as error:  # noqa: BLE001 - raised by run_trials
        return error
    return None


def _drain_events(running: SweepState, news: queue.SimpleQueue[tuple[str, str, Any]]) -> None:
    """Apply the queued events and redraw the table of trials."""
    while not news.empty():
        what, name, value = news.get()
        if what == "ended":
            running.end(name, value)
        else:
            running.now(name, value)
    running.listener.trials(running.table())


@contextmanager
def _handle_signals(running: SweepState) -> Iterator[None]:
    """On the first Ctrl-C or SIGTERM, end the running trials and keep the results; on the second, raise ForceExit."""

    def ask(_: int, __: FrameType | None) -> None:
        if running.stop.is_set():
            raise ForceExit
        running.stop.set()
        running.listener.log("stopping the running trials; press Ctrl-C again to exit at once", "stop")

    with signal_handlers(ask):
        yield


def _trial(given: dict[str, Any], configs: dict[str, Config]) -> None:
    run_trial(configs[given["trial"]], tune.report)


class _Stopper(tune.Stopper):
    """Stops the experiment when the event is set. Ray Tune pickles the stopper, so the state excludes the event."""

    def __init__(self, stop: threading.Event):
        self._stop = stop

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stop.is_set()


class _QueueCallback(tune.Callback):
    """Puts trial events of Ray Tune into a queue; pickled without the queue."""

    def __init__(self, news: queue.SimpleQueue[tuple[str, str, Any]]):
        self._news = news

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._tell(trial, "now", {"status": "running", "doing": "starting"})

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "ended" in result:
            self._tell(trial, "ended", TrialOutcome(**result["ended"]))
        else:
            self._tell(trial, "now", result["now"])

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        error = trial.get_pickled_error() or TrainingError("its driver process died; see the logs of the head node")
        self._tell(trial, "ended", outcome_of(error))

    def _tell(self, trial: Any, what: str, value: Any) -> None:
        self._news.put((what, trial.config["trial"], value))
