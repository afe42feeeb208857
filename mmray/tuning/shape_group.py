"""A Ray Train worker group that measures batch shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions
import ray.train

from mmray.cluster.run_resources import resource_demand
from mmray.config import Config
from mmray.storage.paths import AnyPath
from mmray.training import RunReporter
from mmray.training.ray_backend import RayBackend, cause_in_group
from mmray.training.ray_trainer import run_group, select_device
from mmray.tuning.shape import Measurements, ShapeTask


class ShapeGroup:
    """A Ray worker group that measures batch shapes: as many workers as fit, at most the configured
    ones.

    `run(task, on_message)` returns the Measurements: `visits` (step time and memory of shapes) and
    `failures`.

    Args:
        config: Settings of the workers and of the cluster.
        scratch: Folder for files of Ray Train.

    Attributes:
        config: The config with values in place of `auto` in `cluster.accelerator` and
            `cluster.cpus_per_worker`.
        workers: Number of workers.

    Raises:
        ResourceError: The cluster can never start the smallest number of workers that
            `cluster.workers` allows, such as 1 of `1-4`.
    """

    def __init__(self, config: Config, scratch: AnyPath, reporter: RunReporter) -> None:
        backend = RayBackend()
        backend.check(config, reporter)
        self.config = backend.resolve(config)
        try:
            self.workers = backend.choose_world_size(self.config)
        finally:
            backend.autoscaler.cancel()
        self._scratch = scratch
        self._log = reporter.log

    def run(self, task: ShapeTask, on_message: Callable[[dict[str, Any]], None]) -> Measurements:
        """Start a new worker group that measures batch shapes, and wait for its result.

        Args:
            on_message: Called with each message of rank 0, a dict with one or more of `status` and
                `note` (texts), `trying` (a pair, the rows of the global batch and of the
                micro-batch) and `measured` (a Visit with step time and memory, or a Failure with
                the reason).

        Raises:
            WorkerFailed: A worker was lost, or raised an error.
            ResourceError: The workers did not get their resources in time.
        """
        config = task.config.with_cluster(workers=self.workers)
        demand = resource_demand(config, with_data=False)
        try:
            measured: Measurements = run_group(
                _measure_in_worker, config, self._scratch, demand, self._log, on_message, task=task
            )
            return measured
        except ray.train.TrainingFailedError as error:
            raise cause_in_group(error) from error


def _measure_in_worker(arguments: dict[str, Any]) -> Measurements:
    """Measure in the process group that Ray Train made."""
    from mmray.engine.collectives import Group  # the driver imports this module without the engine
    from mmray.tuning.shape_worker import measure_shapes

    task = arguments["task"]
    coordinator = arguments["coordinator"]
    group = Group.current(select_device(), task.config.cluster.group_timeout_s)
    report = coordinator.push.remote if group.rank == 0 else lambda _: None
    return measure_shapes(task, group, report)
