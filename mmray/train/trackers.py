"""What a run measures, to experiment trackers as well: each in a process of its own that training never waits for.

The driver hands on what rank 0 logs. A tracker may fail, or its server hang inside a library's own threads: its process
is told through a bounded queue and a pipe, loses what it does not take, and is ended when it does not end. What goes
wrong is a note to the user, nothing more. tracking_child.py is the other end.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

from mmray import plugins
from mmray.errors import AtOnce, UsageError
from mmray.storage.paths import AnyPath
from mmray.train.run_dir import redact

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.train.coordinator import Progress, ProgressReporter


BUILT_IN = {
    "mlflow": "mmray.train.trackers:MlflowTracker",
    "wandb": "mmray.train.trackers:WandbTracker",
}
WAITING = 2000  # lines a tracker may be behind; older ones are lost then
ENDING_S = 30.0  # for all trackers together, at the end of a run, to take what is left


def check_trackers(config: Config) -> None:
    """Raise UsageError, before anything starts, for a tracker that is not there."""
    for name in config.run.trackers:
        if name not in BUILT_IN:
            plugins.load_class(name, "run.trackers", tuple(BUILT_IN))
        elif importlib.util.find_spec(name) is None:
            raise UsageError(
                f'run.trackers: {name} is not installed here, where the run is started: `pip install "mmray[{name}]"`'
            )


@contextmanager
def track_run(config: Config, folder: AnyPath, reporter: ProgressReporter) -> Iterator[TrackingReporter]:
    """The listener, with the run's trackers beside it; they are ended with the block, however it ends."""
    if not config.run.trackers:
        yield TrackingReporter(reporter, [])
        return
    about = {
        "name": folder.name,
        "project": config.run.project,
        "folder": str(folder),
        "config": redact(config.model_dump(mode="json", by_alias=True)),
    }
    told = TrackingReporter(reporter, [Remote(name, about) for name in config.run.trackers])
    wait_s = ENDING_S
    try:
        yield told
    except AtOnce:
        wait_s = 0.0
        raise
    finally:
        told.end(wait_s)


class TrackingReporter:
    """A listener that tells another all it hears, and the trackers every line of metrics."""

    def __init__(self, reporter: ProgressReporter, remotes: list[Remote]) -> None:
        self.reporter, self.remotes = reporter, remotes
        self.run_status = "failed"  # until someone says how the run ended

    def log(self, text: str, label: str = "") -> None:
        self.reporter.log(text, label)

    def status(self, title: str) -> None:
        self.reporter.status(title)

    def prepare_progress(self, progress: Progress) -> None:
        self.reporter.prepare_progress(progress)

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        for remote in self.remotes:
            remote.put({"step": metrics["step"], "metrics": _figures(metrics)})
        self._pass_on()
        self.reporter.step(metrics, total_steps)

    def end(self, wait_s: float) -> None:
        """Tell the trackers how the run ended, and wait so long for them."""
        deadline_s = time.monotonic() + wait_s
        for remote in self.remotes:
            remote.put({"status": self.run_status})
        for remote in self.remotes:
            remote.end(deadline_s)
        self._pass_on()

    def _pass_on(self) -> None:
        for remote in self.remotes:
            while remote.notes:
                self.reporter.log(f"{remote.name}: {remote.notes.popleft()}", "tracker")


class Remote:
    """A tracker in its own process: `put` never waits, `notes` is what it has to say."""

    def __init__(self, name: str, about: dict[str, Any]) -> None:
        self.name = name
        self.notes: deque[str] = deque(maxlen=20)
        self._lines: Queue[dict[str, Any] | None] = Queue(WAITING)
        self._lost = 0
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mmray.train.tracker_process", BUILT_IN.get(name, name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library's own chatter; its errors come as notes
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},  # as imports go here
            start_new_session=True,  # Ctrl-C is the run's, which then tells how it ended
            text=True,
        )
        self.put(about)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def put(self, line: dict[str, Any] | None) -> None:
        """Hand a line on; the oldest is lost where the tracker does not keep up."""
        while True:
            try:
                self._lines.put_nowait(line)
                return
            except Full:
                self._drop()

    def end(self, deadline_s: float) -> None:
        """Wait for the tracker to take what is left, until `deadline_s` of the monotonic clock, then end it."""
        self.put(None)
        try:
            code = self._child.wait(max(0.1, deadline_s - time.monotonic()))
            if code:
                self.notes.append(f"its process ended with exit code {code}; not all of the run is with it")
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            self.notes.append(f"it did not end within {ENDING_S:g} s and was stopped; not all of the run is with it")
        for thread in self._threads:
            thread.join(1.0)
        if self._lost:
            self.notes.append(f"it did not keep up: {self._lost} lines were lost (metrics.jsonl has them all)")

    def _drop(self) -> None:
        try:
            self._lines.get_nowait()
            self._lost += 1
        except Empty:
            return  # the writer was quicker

    def _write(self) -> None:
        assert self._child.stdin is not None
        try:
            with self._child.stdin as pipe:
                while (line := self._lines.get()) is not None:
                    pipe.write(json.dumps(line) + "\n")
                    pipe.flush()
        except OSError:
            return  # the process has ended: `end` says so

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.notes.append(line.rstrip())


def _figures(metrics: dict[str, Any]) -> dict[str, float]:
    """What of a line of metrics is a number."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "step"}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


# Weights & Biases as a tracker: online where there is a key, else into the run's folder, for `wandb sync` later.
#
# Of machine, repository and command line nothing is sent: they may hold what is nobody's business.
class WandbTracker:
    """A run of W&B under one id; WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY and its other variables count."""

    def start(self, about: dict[str, Any], run_id: str | None) -> str:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        run_id = run_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=about["project"],
            name=about["name"],
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=about["folder"],
            config=about["config"],
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def finish(self, good: bool) -> None:
        self._run.finish(exit_code=0 if good else 1)


# MLflow as a tracker: the server that MLFLOW_TRACKING_URI names, or files beside the runs.
#
# Through MlflowClient, which keeps no state of its own and adds no tags of the machine or its repository.
LONGEST = 500  # letters of a setting's value that MLflow takes
AT_ONCE = 100  # settings in one call


class MlflowTracker:
    """A run of MLflow: settings as parameters under their full names, metrics by step."""

    def start(self, about: dict[str, Any], run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        from mmray.train.run_dir import flatten

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks for it where the store is a folder
        address = os.environ.get("MLFLOW_TRACKING_URI") or (Path(about["folder"]).parent / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=address)
        self._run_id = run_id or self._created(about)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
        else:
            params = [Param(name, str(value)[:LONGEST]) for name, value in flatten(about["config"]).items()]
            for first in range(0, len(params), AT_ONCE):
                self._client.log_batch(self._run_id, params=params[first : first + AT_ONCE])
        return self._run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(name, value, now_ms, step) for name, value in metrics.items()])

    def finish(self, good: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if good else "FAILED")

    def _created(self, about: dict[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name(about["project"])
        number = experiment.experiment_id if experiment else self._client.create_experiment(about["project"])
        return str(self._client.create_run(number, run_name=about["name"]).info.run_id)
