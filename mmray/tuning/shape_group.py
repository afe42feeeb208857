"""A Ray Train worker group that measures batch shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.torch

from mmray.cluster.run_resources import resource_demand
from mmray.config import Config
from mmray.errors import MmrayError, OutOfMemoryError, TrainingError, first_line, is_out_of_memory
from mmray.storage.paths import AnyPath
from mmray.training import RunReporter
from mmray.training.local import WorkerFailed
from mmray.training.ray_backend import RayBackend, is_worker_lost
from mmray.training.ray_trainer import run_group, start_coordinator, torch_trainer
from mmray.tuning.shape import Measurements, ShapeTask


class ShapeGroup:
    """A Ray worker group that measures batch shapes: as many workers as fit, at most the configured
    ones.

    Args:
        config: Settings of the workers and of the cluster.
        scratch: Folder for files of Ray Train.
        reporter: Receives log lines.

    Raises:
        ResourceError: Fewer workers than the minimum can ever start.
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
        self._groups = 0

    def run(self, task: ShapeTask, on_message: Callable[[dict[str, Any]], None]) -> Measurements:
        """Start a new worker group that measures batch shapes, and wait for its result.

        Args:
            task: The global batches to measure, and what earlier worker groups measured.
            on_message: Called with each message of rank 0, a dict with one or more of `status` and
                `note` (texts), `trying` (global batch and micro-batch in rows) and `measured` (a
                Visit with step time and memory, or a Failure with the reason).

        Returns:
            All measurements, also those of earlier groups.

        Raises:
            WorkerFailed: A worker was lost, or raised an error that is no MmrayError.
            MmrayError: The error of a worker, or the workers did not start in time.
        """
        self._groups += 1
        coordinator = start_coordinator(set())
        config = task.config.with_cluster(workers=self.workers)
        demand = resource_demand(config, with_data=False)
        trainer = torch_trainer(
            _measure_in_worker,
            config,
            self._scratch,
            demand,
            name=f"shapes-{self._groups}",
            train_loop_config={"task": task, "coordinator": coordinator},
        )
        received = 0

        def poll() -> None:
            nonlocal received
            messages, _ = ray.get(coordinator.drain.remote(received))
            received += len(messages)
            for message in messages:
                on_message(message)

        try:
            queue_timeout_s = config.cluster.queue_timeout_s
            measured: Measurements = run_group(trainer, demand, queue_timeout_s, self._log, poll)
            return measured
        except ray.train.TrainingFailedError as error:
            raise _find_cause(error) from error
        finally:
            ray.kill(coordinator)


def _find_cause(error: ray.train.TrainingFailedError) -> Exception:
    """Return the error to report: mmray's own, then any other, then a lost worker.

    Out of memory is first of a kind.
    """
    failures = getattr(error, "worker_failures", {}).values()
    causes = [getattr(each, "health_check_failure", each) for each in failures] or [error]
    raised = [each for each in causes if not is_worker_lost(each)]
    mmray_errors = [each for each in raised if isinstance(each, MmrayError)]
    mmray_errors.sort(key=lambda each: not isinstance(each, OutOfMemoryError))
    if mmray_errors:
        return mmray_errors[0]
    if raised:
        return WorkerFailed("raised", raised[0])
    # by Ray's memory monitor; peers only lose a connection
    killed = next(filter(is_out_of_memory, causes), None)
    kind = TrainingError if killed is None else OutOfMemoryError
    return WorkerFailed("lost", kind(f"a worker was lost ({first_line(killed or causes[0])})"))


def _measure_in_worker(arguments: dict[str, Any]) -> Measurements:
    """Measure in the process group that Ray Train made."""
    from mmray.engine.collectives import Group  # the driver imports this module without the engine
    from mmray.tuning.shape_worker import measure_shapes

    task = arguments["task"]
    coordinator = arguments["coordinator"]
    group = Group.current(ray.train.torch.get_device(), task.config.cluster.group_timeout_s)
    report = coordinator.push.remote if group.rank == 0 else lambda _: None
    return measure_shapes(task, group, report)
