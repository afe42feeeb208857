"""MLflow as a tracker: the server that MLFLOW_TRACKING_URI names, or files beside the runs.

Through MlflowClient, which keeps no state of its own and adds no tags of the machine or its repository.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

LONGEST = 500  # letters of a setting's value that MLflow takes
AT_ONCE = 100  # settings in one call


class MlflowTracker:
    """A run of MLflow: settings as parameters under their full names, metrics by step."""

    def start(self, about: dict[str, Any], run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        from mmray.train.continuation import flatten

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
