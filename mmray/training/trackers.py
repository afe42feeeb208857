"""Experiment trackers: the metrics that rank 0 logs, sent from the driver by one background thread
per tracker.

A tracker may be slow, fail or hang: training never waits for it, and the end of a run waits at most
MAX_WAIT_S. metrics.jsonl has all lines. The run's tracker-NAME.json keeps the tracker's run id and
the last step it accepted, so a resumed run continues there without duplicate steps.
"""

from __future__ import annotations

import json
import math
import os
import queue
import tempfile
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmray import plugins
from mmray.config import flatten
from mmray.errors import ForceExit, UsageError, first_line
from mmray.storage.paths import AnyPath, write_atomic
from mmray.training.run_dir import redact, redact_text

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.training import RunReporter

BUILT_IN = {
    "mlflow": "mmray.training.trackers:MlflowTracker",
    "wandb": "mmray.training.trackers:WandbTracker",
}
MAX_WAIT_S = 30.0  # wait at the end of a run, for all trackers together


class Tracker(Protocol):
    """An experiment tracker, called by a thread of the driver.

    Built in are `mlflow` and `wandb`. Name your own as `package.module:Class` in run.trackers; it
    is built without arguments.
    """

    def start(self, run_info: dict[str, Any], run_id: str | None) -> str:
        """Start a run of the tracker, or resume one.

        Args:
            run_info: `name` and `folder` of the run, and its settings as the dict `config`, without
                secrets.
            run_id: ID that an earlier start returned; None: start a new run.

        Returns:
            The ID of the tracker's run.
        """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step.

        Args:
            step: Number of the step, higher than in the call before.
            metrics: The finite values of a line of metrics.jsonl by name, such as `train/loss`.
        """

    def finish(self, success: bool) -> None:
        """End the run of the tracker.

        Args:
            success: The run finished, or the user stopped it; False: it failed.
        """


def check_trackers(config: Config) -> None:
    """Check the trackers of a run before anything starts.

    Raises:
        UsageError: A tracker cannot be imported, is named twice, or cannot write to `run.storage`.
    """
    if len(set(config.run.trackers)) < len(config.run.trackers):
        raise UsageError(
            f"run.trackers: {' '.join(config.run.trackers)} names a tracker twice; remove one"
        )
    for name in config.run.trackers:
        if name not in BUILT_IN:
            plugins.load_class(name, "run.trackers", tuple(BUILT_IN))
            continue
        plugins.check_installed(name, "run.trackers", name)
        if (
            name == "mlflow"
            and "://" in config.run.storage
            and not os.environ.get("MLFLOW_TRACKING_URI")
        ):
            raise UsageError(
                "run.trackers: mlflow cannot write to an object store; set MLFLOW_TRACKING_URI"
            )


class TrackingReporter:
    """Passes progress to another reporter, and metrics to the run's trackers, which finish at the
    end of the `with` block.

    Attributes:
        run_status: How the run ended: `finished` or `stopped`, which the driver sets before the end
            of the block; `failed` until then.
    """

    def __init__(self, config: Config, folder: AnyPath, reporter: RunReporter) -> None:
        settings = redact(config.to_json())
        run_info = {"name": folder.name, "folder": str(folder), "config": settings}
        self.threads = [TrackerThread(name, folder, run_info) for name in config.run.trackers]
        self.reporter = reporter
        self.log = reporter.log
        self.status = reporter.status
        self.phase = reporter.phase
        self.prepare_progress = reporter.prepare_progress
        self.run_status = "failed"  # the driver replaces it when the run has ended

    def step(self, metrics: dict[str, Any], total_steps: int) -> None:
        """Send the finite numbers of a line of metrics to the trackers, without waiting, and pass
        it on.
        """
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for thread in self.threads:
            thread.put(metrics["step"], numbers)
        self._log_warnings()
        self.reporter.step(metrics, total_steps)

    def __enter__(self) -> TrackingReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the trackers and wait for them, MAX_WAIT_S at most in total."""
        wait_s = 0.0 if kind is ForceExit else MAX_WAIT_S
        deadline_s = time.monotonic() + wait_s
        success = self.run_status in ("finished", "stopped") or kind is KeyboardInterrupt
        for thread in self.threads:
            thread.end(success)
        for thread in self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                thread.warnings.append(
                    f"did not finish within {wait_s:g} s; the end of the run may be missing "
                    "(metrics.jsonl has all lines)"
                )
        self._log_warnings()

    def _log_warnings(self) -> None:
        for thread in self.threads:
            while thread.warnings:
                self.log(f"{thread.tracker}: {thread.warnings.popleft()}", "tracker")


class TrackerThread(threading.Thread):
    """Calls one tracker from a daemon thread, which starts at once.

    No ThreadPoolExecutor, whose threads Python joins at exit, also one in which a tracker hangs.

    Args:
        tracker: `mlflow`, `wandb`, or a user's `package.module:Class`.
        folder: Folder of the run, for the file with the tracker's run ID.
        run_info: `name` and `folder` of the run, and its settings as the dict `config`, without
            secrets.

    Attributes:
        warnings: Texts about errors of the tracker, a deque that another thread empties and logs.
    """

    def __init__(self, tracker: str, folder: AnyPath, run_info: dict[str, Any]) -> None:
        super().__init__(name=f"mmray-{tracker}", daemon=True)
        self.tracker = tracker
        self.warnings: deque[str] = deque()
        self._run_info = run_info
        self._spec = BUILT_IN.get(tracker, tracker)
        self._file = folder / f"tracker-{tracker.replace(':', '.')}.json"
        # The last item is whether the run succeeded.
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | bool] = queue.SimpleQueue()
        self.start()

    def put(self, step: int, metrics: dict[str, float]) -> None:
        """Queue the metrics of a step, unless the tracker could not start."""
        if self.is_alive():
            self._queue.put((step, metrics))

    def end(self, success: bool) -> None:
        """Finish the tracker after the queued lines, without waiting for it."""
        self._queue.put(success)

    def run(self) -> None:
        """Start the tracker, send each queued line, and finish the tracker; the main function of
        the thread.
        """
        run_id = None
        last_step = 0
        has_failed = False
        with suppress(OSError, ValueError, KeyError):  # missing or damaged: start a new run there
            known = json.loads(self._file.read_text())
            run_id = known["id"]
            last_step = known["last_step"]
        # A library may raise anything, and training continues.
        try:
            tracker: Tracker = plugins.load_class(self._spec, "run.trackers")()
            run_id = tracker.start(self._run_info, run_id)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._warn("could not start, so nothing of this run is sent", error)
            return
        while not isinstance(item := self._queue.get(), bool):
            step, metrics = item
            if step <= last_step:  # logged before a restart
                continue
            try:
                tracker.log(step, metrics)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                if not has_failed:
                    self._warn(f"did not accept step {step}", error)
                has_failed = True
                continue
            last_step = step
            with suppress(OSError):  # a resumed run then sends some steps twice
                write_atomic(self._file, json.dumps({"id": run_id, "last_step": last_step}) + "\n")
        try:
            tracker.finish(item)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._warn("could not finish the run", error)

    def _warn(self, what: str, error: BaseException) -> None:
        self.warnings.append(
            redact_text(f"{what}: {type(error).__name__}: {first_line(error)[:300]}")
        )


class WandbTracker:
    """A `Tracker` for Weights & Biases, with the user's WANDB_* variables.

    It sends no facts about machine, repository or command line.
    """

    def start(self, run_info: dict[str, Any], run_id: str | None) -> str:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or (
            "online" if wandb.login(prompt=False) else "offline"
        )
        run_id = run_id or uuid.uuid4().hex[:12]
        folder = run_info["folder"]
        # W&B writes to local folders only, in `online` mode copies of what it sends
        if "://" in folder:
            if mode == "offline":
                raise UsageError(
                    "wandb cannot write to an object store; log in (WANDB_API_KEY), "
                    "or use a local folder"
                )
            folder = tempfile.mkdtemp(prefix="mmray-wandb-")
        # What W&B records of the machine and the repository may hold private data.
        private = dict.fromkeys(("disable_git", "x_disable_meta", "x_disable_stats"), True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mmray"),
            name=run_info["name"],
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=folder,
            config=run_info["config"],
            settings=wandb.Settings(
                console="off", silent=True, save_code=False, x_save_requirements=False, **private
            ),
        )
        return run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def finish(self, success: bool) -> None:
        self._run.finish(exit_code=0 if success else 1)


# Limits of MLflow.
MAX_PARAM_CHARS = 500
MAX_PARAMS_PER_CALL = 100


class MlflowTracker:
    """A `Tracker` for MLflow at MLFLOW_TRACKING_URI, or with files in `mlruns` next to the runs.

    It sets no tags of the machine.
    """

    def start(self, run_info: dict[str, Any], run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow requires it for a folder
        address = (
            os.environ.get("MLFLOW_TRACKING_URI")
            or (Path(run_info["folder"]).parent / "mlruns").as_uri()
        )
        client = self._client = MlflowClient(tracking_uri=address)
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mmray")
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        self._run_id = str(client.create_run(experiment_id, run_name=run_info["name"]).info.run_id)
        params = [
            Param(name, str(value)[:MAX_PARAM_CHARS])
            for name, value in flatten(run_info["config"]).items()
        ]
        for first in range(0, len(params), MAX_PARAMS_PER_CALL):
            client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS_PER_CALL])
        return self._run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id, [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        )

    def finish(self, success: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if success else "FAILED")
